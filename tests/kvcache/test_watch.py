"""A reader who replaces the nodes that events bring has a true picture of the tree."""

from __future__ import annotations

import random

import numpy as np

from radixserve.kvcache.base import Handle
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.radix import RadixPrefixCache
from radixserve.kvcache.watch import HEAD_TOKENS, MAX_EVENTS, MAX_NODES, TAIL_TOKENS, SeenNode, TreeEvent, TreeWatch

PAGE = 4


def ids(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


class Reader:
    """Keeps the picture as the page does."""

    def __init__(self) -> None:
        self.nodes: dict[int, SeenNode] = {}

    def read(self, watch: TreeWatch) -> list[TreeEvent]:
        picture, events = watch.take()
        if picture is not None:
            self.nodes = {node.id: node for node in picture}
        for event in events:
            self.nodes |= {node.id: node for node in event.nodes}
            for node_id, locks, uses in event.counts:
                self.nodes[node_id] = self.nodes[node_id]._replace(locks=locks, uses=uses)
            for node_id in event.gone:
                self.nodes.pop(node_id, None)
        return events

    def facts(self) -> dict[int, SeenNode]:
        """Without the times."""
        return {node_id: node._replace(used_at=None) for node_id, node in self.nodes.items()}


def watched_tree() -> tuple[RadixPrefixCache, TreeWatch, Reader]:
    tree, watch, reader = RadixPrefixCache(PAGE), TreeWatch(), Reader()
    tree.observe(watch)
    assert reader.read(watch) == []
    return tree, watch, reader


def insert(tree: RadixPrefixCache, tokens: np.ndarray, first_page: int) -> Handle:
    return tree.insert(tokens, np.arange(first_page, first_page + len(tokens) // PAGE, dtype=np.int32)).handle


def test_events_tell_a_match_that_splits_locks_and_evicts() -> None:
    tree, watch, reader = watched_tree()
    insert(tree, ids(*range(12)), 0)
    watch.owner = "second"
    handle = tree.match(ids(0, 1, 2, 3, 9, 9, 9, 9))
    tree.lock(handle)
    tree.evict(2)
    tree.unlock(handle)
    events = reader.read(watch)
    assert [event.kind for event in events] == ["insert", "split", "match", "lock", "evict", "unlock"]
    inserted, split, match, lock, evict, _ = events
    assert (inserted.owner, inserted.num_tokens) == ("", 12)
    assert (split.owner, split.num_tokens) == ("second", 4)
    assert [node.head for node in split.nodes] == [[0, 1, 2, 3], list(range(4, 12))]
    assert (match.node, match.num_tokens) == (split.node, 4)
    assert lock.counts == [(split.node, 1, 1)]
    assert evict.gone == [inserted.node] and evict.num_tokens == 8
    assert [(node.head, node.locks, node.num_children) for node in reader.nodes.values()] == [([0, 1, 2, 3], 0, 0)]


def test_the_picture_stays_true_through_any_events() -> None:
    tree, watch, reader = watched_tree()
    draw = random.Random(7)
    held: list[Handle] = []
    next_page = 0
    for _ in range(600):
        tokens = np.array([draw.randrange(2) for _ in range(PAGE * draw.randrange(1, 5))], np.int32)
        match draw.randrange(5):
            case 0 | 1:
                insert(tree, tokens, next_page)
                next_page += len(tokens) // PAGE
            case 2:
                held.append(tree.match(tokens))
                tree.lock(held[-1])
            case 3 if held:
                tree.unlock(held.pop(draw.randrange(len(held))))
            case 4:
                tree.evict(draw.randrange(4))
        if draw.randrange(4) == 0:
            reader.read(watch)
    reader.read(watch)
    seen = reader.facts()
    watch.tell_anew()
    reader.read(watch)
    assert len(seen) > 20
    assert seen == reader.facts()


def test_a_large_tree_is_told_in_part_with_what_was_used_last() -> None:
    tree = RadixPrefixCache(PAGE)
    for number in range(3 * MAX_NODES):
        insert(tree, ids(number, 0, 0, 0), number)
    watch, reader = TreeWatch(), Reader()
    tree.observe(watch)
    reader.read(watch)
    assert len(reader.nodes) == MAX_NODES
    tree.match(ids(0, 0, 0, 0))  # the oldest, which was not told
    (event,) = reader.read(watch)
    assert reader.nodes[event.node].head == [0, 0, 0, 0]
    watch.tell_anew()
    reader.read(watch)
    assert event.node in reader.nodes and len(reader.nodes) == MAX_NODES


def test_a_long_segment_is_told_by_its_ends() -> None:
    tree, watch, reader = watched_tree()
    insert(tree, np.arange(400, dtype=np.int32), 0)
    reader.read(watch)
    (node,) = reader.nodes.values()
    assert node.num_tokens == 400
    assert node.head == list(range(HEAD_TOKENS)) and node.tail == list(range(400 - TAIL_TOKENS, 400))


def test_more_events_than_anybody_reads_become_a_new_picture() -> None:
    tree, watch, reader = watched_tree()
    insert(tree, ids(1, 2, 3, 4), 0)
    for _ in range(MAX_EVENTS):
        handle = tree.match(ids(1, 2, 3, 4))
        tree.lock(handle)
        tree.unlock(handle)
    assert reader.read(watch) == []
    assert [node.uses for node in reader.nodes.values()] == [MAX_EVENTS]


def test_a_request_that_asks_in_vain_in_every_step_is_told_once() -> None:
    cache = CacheManager(RadixPrefixCache(PAGE), num_pages=2, max_rows=2, max_pages_per_row=8)
    watch, reader = TreeWatch(), Reader()
    cache.observe(watch)
    reader.read(watch)
    for _ in range(50):
        assert cache.admit(np.zeros(20, np.int32), owner="large") is None
    assert [(event.kind, event.owner) for event in reader.read(watch)] == [("match", "large")]


def test_a_tree_that_nobody_watches_any_more_reports_nothing() -> None:
    tree, watch, reader = watched_tree()
    tree.observe(None)
    insert(tree, ids(1, 2, 3, 4), 0)
    assert reader.read(watch) == [] and reader.nodes == {}

"""What happens in the radix tree, in pieces small enough to be drawn. Costs something only while somebody watches.

An event carries the new state of the nodes that it changed, so a reader keeps a true picture by replacing nodes. Only
part of a large tree is told: what was used last, then what is next to the root.
"""

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from radixserve.kvcache.base import Node

MAX_NODES = 240
MAX_EVENTS = 400  # between two calls of ``take``; with more of them the picture is told anew instead
HEAD_TOKENS, TAIL_TOKENS = 48, 16  # of a segment
_ROOT_ID = 0


class SeenNode(NamedTuple):
    """``parent`` is 0 below the root. ``tail``: the last token ids where ``head`` is not all of them. ``used_at``: in
    seconds of the watch's clock; None if that was before anybody watched."""

    id: int
    parent: int
    num_tokens: int
    num_pages: int
    num_children: int
    locks: int
    uses: int
    used_at: float | None
    head: list[int]
    tail: list[int]


class TreeEvent(NamedTuple):
    """``kind``: match, split, insert, evict, lock or unlock; ``owner``: the request it happened for ("": none);
    ``node``: where (0: at the root, or at a node that was not told); ``num_tokens``: matched from the root on, added,
    evicted, or in the upper part of what was split. ``nodes`` are new or changed, ``counts`` (id, locks, uses) are
    those on the way from the root, ``gone`` are no more."""

    kind: str
    owner: str
    node: int
    num_tokens: int
    at: float
    nodes: list[SeenNode]
    counts: list[tuple[int, int, int]]
    gone: list[int]


class TreeWatch:
    """Takes down what a tree reports since ``begin``. ``owner`` is set by who uses the tree."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.owner = ""
        self._clock = clock
        self._new_ids = itertools.count(_ROOT_ID + 1)
        self._ids: dict[Node, int] = {}  # of the nodes that were told
        self._used_at: OrderedDict[Node, float] = OrderedDict()  # last used last
        self._events: list[TreeEvent] = []
        self._anew = True

    def begin(self, root: Node) -> None:
        self._root = root

    def tell_anew(self) -> None:
        """Somebody new watches: what comes next begins with the whole picture."""
        self._anew = True
        self._events.clear()

    def take(self) -> tuple[list[SeenNode] | None, list[TreeEvent]]:
        """The whole picture (None: it follows from the last one and the events), and the events since the last call."""
        if self._anew:
            self._anew = False
            return self._picture(), []
        events, self._events = self._events, []
        return None, events

    # ---- what the tree reports ----

    def matched(self, node: Node, num_tokens: int) -> None:
        last = self._events[-1] if self._events else None
        asks_again = last is not None and last[:3] == ("match", self.owner, self._ids.get(node, _ROOT_ID))
        if not asks_again:  # as who waits for pages does in every step
            self._use(node)
            self._record("match", node, num_tokens)

    def split(self, upper: Node, lower: Node) -> None:
        self._record("split", upper, _num_tokens(upper), [lower])

    def inserted(self, leaf: Node) -> None:
        self._use(leaf)
        self._record("insert", leaf, _num_tokens(leaf), [leaf.parent])

    def locked(self, node: Node) -> None:
        if node is not self._root:
            self._record("lock", node, 0)

    def unlocked(self, node: Node) -> None:
        if node is not self._root:
            self._record("unlock", node, 0)

    def evicted(self, leaf: Node, num_tokens: int, *, whole: bool) -> None:
        """``leaf`` lost its last ``num_tokens`` or, if that was the ``whole`` of it, has just left its parent."""
        if not whole:
            self._record("evict", leaf, num_tokens, [leaf])
            return
        self._used_at.pop(leaf, None)
        node_id = self._ids.pop(leaf, _ROOT_ID)
        parent = leaf.parent
        changed = [self._seen(parent)] if parent is not None and parent in self._ids else []
        self._add(TreeEvent("evict", self.owner, node_id, num_tokens, self._clock(), changed, [], [node_id]))

    # ---- the picture ----

    def _record(self, kind: str, node: Node, num_tokens: int, others: Iterable[Node | None] = ()) -> None:
        if self._anew:
            return
        path = self._path(node)
        changed = [n for n in path if n not in self._ids]
        changed += [n for n in others if n is not None and n is not self._root and n not in changed]
        self._ids.update({n: next(self._new_ids) for n in changed if n not in self._ids})
        nodes = [self._seen(n) for n in changed]
        counts = [(self._ids[n], n.locks, n.uses) for n in path]
        self._add(
            TreeEvent(kind, self.owner, self._ids.get(node, _ROOT_ID), num_tokens, self._clock(), nodes, counts, [])
        )

    def _add(self, event: TreeEvent) -> None:
        if self._anew:
            return
        if len(self._events) < MAX_EVENTS and len(self._ids) <= 2 * MAX_NODES:
            self._events.append(event)
        else:
            self.tell_anew()

    def _picture(self) -> list[SeenNode]:
        chosen: dict[Node, None] = {}
        for node in reversed(self._used_at):
            path = [n for n in self._path(node) if n not in chosen]
            if len(chosen) + len(path) <= MAX_NODES:
                chosen.update(dict.fromkeys(path))
        pending = [self._root]
        for node in pending:
            newest = itertools.islice(reversed(node.children.values()), MAX_NODES)
            for child in newest:
                if len(chosen) < MAX_NODES or child in chosen:
                    chosen[child] = None
                    pending.append(child)
        self._ids = {n: self._ids.get(n) or next(self._new_ids) for n in chosen}
        return [self._seen(n) for n in chosen]

    def _seen(self, node: Node) -> SeenNode:
        ids = memoryview(node.text)[node.start :].cast("i")
        has_tail = len(ids) > HEAD_TOKENS + TAIL_TOKENS
        return SeenNode(
            id=self._ids[node],
            parent=_ROOT_ID if node.parent is None else self._ids.get(node.parent, _ROOT_ID),
            num_tokens=len(ids),
            num_pages=len(node.pages),
            num_children=len(node.children),
            locks=node.locks,
            uses=node.uses,
            used_at=self._used_at.get(node),
            head=(ids[:HEAD_TOKENS] if has_tail else ids).tolist(),
            tail=ids[-TAIL_TOKENS:].tolist() if has_tail else [],
        )

    def _use(self, node: Node) -> None:
        for n in self._path(node):
            self._used_at[n] = self._clock()
            self._used_at.move_to_end(n)
        while len(self._used_at) > MAX_NODES:
            self._used_at.popitem(last=False)

    def _path(self, node: Node) -> list[Node]:
        """From below the root down to ``node``."""
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]


def _num_tokens(node: Node) -> int:
    return (len(node.text) - node.start) // 4

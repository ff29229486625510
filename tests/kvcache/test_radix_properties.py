"""The radix tree against a naive model, in any order of operations, for every kind of page size.

The model keeps one entry for each cached page, found by the whole text up to its end, with the time when it was last
used. It predicts exactly which pages are found, protected and evicted.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from radixserve.kvcache.base import Handle, Int32s
from radixserve.kvcache.radix import RadixPrefixCache

NUM_PAGES = 40
Text = tuple[str, tuple[int, ...]]  # namespace, and one symbol for each page

texts = st.tuples(st.sampled_from(["", "salt"]), st.lists(st.integers(0, 2), max_size=7).map(tuple))


@dataclass
class CachedPage:
    page: int
    last_use: int
    locks: int = 0


class RadixTreeMachine(RuleBasedStateMachine):
    page_size: int

    def __init__(self) -> None:
        super().__init__()
        self.tree = RadixPrefixCache(self.page_size)
        self.free = set(range(NUM_PAGES))
        self.model: dict[Text, CachedPage] = {}
        self.locked: list[tuple[Text, Handle]] = []
        self.clock = itertools.count()

    # ---- the model ----

    def tokens(self, text: Text, tail: int = 0) -> Int32s:
        """Pages that differ in their last token only, then ``tail`` tokens that fill no page."""
        body = [[7] * (self.page_size - 1) + [symbol] for symbol in text[1]]
        return np.array([*itertools.chain(*body), *[5] * min(tail, self.page_size - 1)], np.int32)

    def cached_part(self, text: Text) -> list[Text]:
        prefixes = [(text[0], text[1][:end]) for end in range(1, len(text[1]) + 1)]
        return list(itertools.takewhile(self.model.__contains__, prefixes))

    def mark_used(self, prefixes: list[Text]) -> None:
        now = next(self.clock)
        for prefix in prefixes:
            if self.model[prefix].locks == 0:
                self.model[prefix].last_use = now

    def forget_evicted(self, freed: Int32s, asked: int) -> None:
        """Oldest first; of what was used together, the deepest first."""
        loose = [prefix for prefix, entry in self.model.items() if entry.locks == 0]
        loose.sort(key=lambda prefix: (self.model[prefix].last_use, -len(prefix[1])))
        expected = {self.model.pop(prefix).page for prefix in loose[:asked]}
        assert set(freed.tolist()) == expected and len(freed) == len(expected)
        self.free |= expected

    # ---- the operations ----

    @rule(text=texts, tail=st.integers(0, 63))
    def insert(self, text: Text, tail: int) -> None:
        count = len(text[1])
        if len(self.free) < count:
            self.forget_evicted(self.tree.evict(count), count)
        if len(self.free) < count:
            return
        pages = sorted(self.free)[:count]
        present = self.cached_part(text)
        result = self.tree.insert(self.tokens(text, tail), np.array(pages, np.int32), text[0])
        assert result.already_there == len(present) * self.page_size
        assert result.handle.cached_len == count * self.page_size
        for end in range(len(present) + 1, count + 1):
            self.model[text[0], text[1][:end]] = CachedPage(pages[end - 1], last_use=-1)
            self.free.remove(pages[end - 1])
        self.mark_used(self.cached_part(text))

    @rule(text=texts, tail=st.integers(0, 63), lock=st.booleans())
    def match(self, text: Text, tail: int, lock: bool) -> None:
        present = self.cached_part(text)
        assert self.tree.cached_len(self.tokens(text, tail), text[0]) == len(present) * self.page_size
        handle = self.tree.match(self.tokens(text, tail), text[0])
        assert handle.cached_len == len(present) * self.page_size
        self.mark_used(present)
        if lock:
            self.tree.lock(handle)
            assert self.tree.pages(handle).tolist() == [self.model[prefix].page for prefix in present]
            for prefix in present:
                self.model[prefix].locks += 1
            self.locked.append(((text[0], text[1][: len(present)]), handle))

    @precondition(lambda self: self.locked)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        text, handle = self.locked.pop(data.draw(st.integers(0, len(self.locked) - 1)))
        prefixes = self.cached_part(text)
        assert len(prefixes) == len(text[1]), "a locked page was evicted"
        assert self.tree.pages(handle).tolist() == [self.model[prefix].page for prefix in prefixes]
        self.tree.unlock(handle)
        for prefix in prefixes:
            self.model[prefix].locks -= 1
        self.mark_used(prefixes)

    @rule(count=st.integers(0, 12))
    def evict(self, count: int) -> None:
        self.forget_evicted(self.tree.evict(count), count)

    @rule()
    def clear(self) -> None:
        self.forget_evicted(self.tree.clear(), NUM_PAGES)

    # ---- what always holds ----

    @invariant()
    def every_page_has_one_owner(self) -> None:
        self.tree.check_integrity()
        owned = self.tree.owned_pages().tolist()
        assert sorted([*owned, *self.free]) == list(range(NUM_PAGES))
        protected = sum(entry.locks > 0 for entry in self.model.values())
        assert self.tree.evictable_pages == len(self.model) - protected


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
def test_the_tree_behaves_like_the_model(page_size: int) -> None:
    machine = type("Machine", (RadixTreeMachine,), {"page_size": page_size})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=60, stateful_step_count=50, suppress_health_check=list(HealthCheck)),
    )

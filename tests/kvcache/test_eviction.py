"""The seam of eviction policies: other orders than the built-in one drive the same tree."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from radixserve.kvcache import eviction
from radixserve.kvcache.base import Int32s
from radixserve.kvcache.radix import RadixPrefixCache


class Fifo(eviction.LruOrder):
    """First in, first out: lookups change nothing."""

    def use(self, node: Any) -> None:
        pass


class Lfu:
    """Least frequently used first, among equals the least recently used."""

    def __init__(self) -> None:
        self._by_uses: dict[int, OrderedDict[Any, None]] = {}

    @property
    def nodes(self) -> list[Any]:
        return [node for group in self._by_uses.values() for node in group]

    def add(self, node: Any) -> None:
        self._by_uses.setdefault(node.uses, OrderedDict())[node] = None

    def remove(self, node: Any) -> None:
        del self._by_uses[node.uses][node]

    def use(self, node: Any) -> None:
        del self._by_uses[node.uses - 1][node]
        self.add(node)

    def renew(self, node: Any) -> None:
        self._by_uses[node.uses].move_to_end(node)

    def victim(self) -> Any:
        return next(iter(self._by_uses[min(uses for uses, group in self._by_uses.items() if group)]))


def text(group: int, own: int) -> Int32s:
    """Two shared tokens, then two of its own."""
    return np.array([group, group, own, own], np.int32)


def tree_with(order: type[eviction.EvictionOrder], monkeypatch: pytest.MonkeyPatch) -> RadixPrefixCache:
    monkeypatch.setitem(eviction.EVICTION_ORDERS, "test", order)
    return RadixPrefixCache(1, eviction_policy="test")


def test_fifo_ignores_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_with(Fifo, monkeypatch)
    for i in range(3):
        tree.insert(text(i, i), np.arange(4 * i, 4 * i + 4, dtype=np.int32))
    tree.match(text(0, 0))
    assert sorted(tree.evict(4)) == [0, 1, 2, 3]


def test_lfu_keeps_what_is_looked_up_most(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tree_with(Lfu, monkeypatch)
    for i in range(3):
        tree.insert(text(i, i), np.arange(4 * i, 4 * i + 4, dtype=np.int32))
    for i in (0, 0, 1, 2, 2):
        tree.match(text(i, i))
    assert sorted(tree.evict(4)) == [4, 5, 6, 7]
    assert sorted(tree.evict(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize("order", [eviction.LruOrder, Fifo, Lfu])
def test_any_order_gives_up_leaves_only_and_everything_in_the_end(
    order: type[eviction.EvictionOrder], monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tree_with(order, monkeypatch)
    rng = np.random.default_rng(0)
    held = []
    next_page = 0
    for _ in range(2000):
        tokens = rng.integers(0, 3, rng.integers(1, 9)).astype(np.int32)
        match rng.integers(0, 5):
            case 0 | 1:
                tree.insert(tokens, np.arange(next_page, next_page + len(tokens), dtype=np.int32))
                next_page += len(tokens)
            case 2:
                held.append(tree.match(tokens))
                tree.lock(held[-1])
            case 3 if held:
                tree.unlock(held.pop(rng.integers(0, len(held))))
            case _:
                tree.match(tokens)
                tree.evict(int(rng.integers(0, 4)))
        tree.check_integrity()
    for handle in held:
        tree.unlock(handle)
    owned = sorted(tree.owned_pages())
    assert sorted(tree.clear()) == owned
    assert tree.sizes() == (0, 0)

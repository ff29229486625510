"""In which order the radix tree gives up what nobody holds: one small class for each policy, one table of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

from radixserve.kvcache.base import Node


class EvictionOrder(Protocol):
    """Orders the unprotected nodes of a tree. Only ``node.uses`` counts, the lookups they served.

    The tree reports a path from its deepest node up to the root, and a node never serves more lookups than the nodes
    above it. So an order that puts the last reported behind its equals names a node only after all nodes below it: its
    victim is always a leaf, and no tree walk is needed to find one.
    """

    @property
    def nodes(self) -> Collection[Node]:
        """All nodes in the order, for checks."""
        ...

    def add(self, node: Node) -> None:
        """``node`` is new, or lost its last lock."""
        ...

    def remove(self, node: Node) -> None:
        """``node`` was locked, or left the tree."""
        ...

    def use(self, node: Node) -> None:
        """A lookup went through ``node``; ``node.uses`` has just grown by one."""
        ...

    def renew(self, node: Node) -> None:
        """``node`` got new nodes below it: it must come after them."""
        ...

    def victim(self) -> Node:
        """The node to give up next; the order must not be empty."""
        ...


class LruOrder:
    """Least recently used first. Every report moves one node to the end of a linked list, in constant time."""

    def __init__(self) -> None:
        self.nodes: OrderedDict[Node, None] = OrderedDict()

    def add(self, node: Node) -> None:
        self.nodes[node] = None

    def remove(self, node: Node) -> None:
        del self.nodes[node]

    def use(self, node: Node) -> None:
        self.nodes.move_to_end(node)

    def renew(self, node: Node) -> None:
        self.nodes.move_to_end(node)

    def victim(self) -> Node:
        return next(iter(self.nodes))


class FifoOrder(LruOrder):
    """What came first goes first: lookups change nothing."""

    def use(self, node: Node) -> None:
        pass


class LfuOrder:
    """Least often used first, among equals the least recently used.

    Uses are compared by their power of two, so there are few groups, and a report costs no more than with LRU however
    often nodes are used.
    """

    def __init__(self) -> None:
        self._groups: dict[int, OrderedDict[Node, None]] = {}  # by bits of ``uses``; none of them is empty

    @property
    def nodes(self) -> list[Node]:
        return [node for group in self._groups.values() for node in group]

    def add(self, node: Node) -> None:
        self._groups.setdefault(node.uses.bit_length(), OrderedDict())[node] = None

    def remove(self, node: Node) -> None:
        self._remove(node, node.uses.bit_length())

    def use(self, node: Node) -> None:
        self._remove(node, (node.uses - 1).bit_length())
        self.add(node)

    def renew(self, node: Node) -> None:
        self._groups[node.uses.bit_length()].move_to_end(node)

    def victim(self) -> Node:
        return next(iter(self._groups[min(self._groups)]))

    def _remove(self, node: Node, bits: int) -> None:
        group = self._groups[bits]
        del group[node]
        if not group:
            del self._groups[bits]


# By the values of ``--radix-eviction-policy``.
EVICTION_ORDERS: dict[str, Callable[[], EvictionOrder]] = {"lru": LruOrder, "lfu": LfuOrder, "fifo": FifoOrder}

"""In which order the radix tree gives up what nobody holds: one small class for each policy, one table of them."""

from collections import OrderedDict
from collections.abc import Callable, Collection

from radixserve.kvcache.base import Node


class EvictionOrder:
    """Orders the unprotected nodes of a tree: this one the least recently used first, in a linked list.

    The tree reports a path from its deepest node up to the root, and a node never serves more lookups (``node.uses``)
    than the nodes above it. So an order that puts the last reported behind its equals names a node only after all nodes
    below it: its victim is always a leaf, and no tree walk is needed to find one. A report takes constant time.
    """

    def __init__(self) -> None:
        self._nodes: OrderedDict[Node, None] = OrderedDict()

    @property
    def nodes(self) -> Collection[Node]:
        """All nodes in the order, for checks."""
        return self._nodes

    def add(self, node: Node) -> None:
        """``node`` is new, or lost its last lock."""
        self._nodes[node] = None

    def remove(self, node: Node) -> None:
        """``node`` was locked, or left the tree."""
        del self._nodes[node]

    def use(self, node: Node) -> None:
        """A lookup went through ``node``; ``node.uses`` has just grown by one."""
        self._nodes.move_to_end(node)

    def renew(self, node: Node) -> None:
        """``node`` got new nodes below it: it must come after them."""
        self._nodes.move_to_end(node)

    def victim(self) -> Node:
        """The node to give up next; the order must not be empty."""
        return next(iter(self._nodes))


class FifoOrder(EvictionOrder):
    """What came first goes first: lookups change nothing."""

    def use(self, node: Node) -> None:
        pass


class LfuOrder(EvictionOrder):
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
EVICTION_ORDERS: dict[str, Callable[[], EvictionOrder]] = {"lru": EvictionOrder, "lfu": LfuOrder, "fifo": FifoOrder}

"""What the parts of the prefix cache say to each other: nodes of the tree, and handles to them. No torch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
NOTHING: Int32s = np.empty(0, np.int32)  # no pages, no tokens


class Node:
    """One segment of the tree: ``text[start:]`` (int32 ids as bytes) lies on ``pages``; ``branch`` is its key above.

    ``locks`` counts the locked handles that end here or below, so it never grows towards the leaves; ``uses`` counts
    the lookups that came through.
    """

    __slots__ = ("branch", "children", "locks", "pages", "parent", "start", "text", "uses")

    def __init__(self, parent: Node | None, branch: bytes, text: bytes, pages: Int32s):
        self.parent = parent
        self.branch = branch
        self.text = text
        self.start = 0
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.uses = 0


class Handle(NamedTuple):
    """A matched prefix: ``cached_len`` tokens that end at ``node``. Valid while locked, or until the next eviction."""

    cached_len: int
    node: Node


class InsertResult(NamedTuple):
    """``handle`` ends at what is cached of the inserted text; its first ``already_there`` tokens were in the tree
    before, on pages of the tree's own: the caller still owns its duplicates of those and frees or swaps them. The tree
    took over the pages of ``[already_there, handle.cached_len)``; those behind stay the caller's."""

    handle: Handle
    already_there: int

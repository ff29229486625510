"""A node of the radix tree."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Node:
    """One segment of the tree: ``text[start:]`` (int32 ids as bytes) lies on ``pages``; ``branch`` is its key above.

    ``locks`` counts the locked handles that end here or below, so it never grows towards the leaves; ``uses`` counts
    the lookups that came through.
    """

    __slots__ = ("branch", "children", "locks", "pages", "parent", "start", "text", "uses")

    def __init__(self, parent: Node | None, branch: bytes, text: bytes, pages: NDArray[np.int32]):
        self.parent = parent
        self.branch = branch
        self.text = text
        self.start = 0
        self.pages = pages
        self.children: dict[bytes, Node] = {}
        self.locks = 0
        self.uses = 0

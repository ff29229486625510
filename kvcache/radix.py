"""The radix tree: which prefixes are cached, and on which pages. Host memory only.

The idea of a radix tree over token ids with reference counts and leaf eviction is RadixAttention (Zheng et al., SGLang,
arXiv 2312.07104). Segments are kept as bytes, so that following a node is one hash lookup and one memcmp; recency is an
ordered list instead of a heap or a clock (see ``eviction.py``). ``docs/prefix_cache.md`` has a worked example.
"""

import numpy as np

from radixserve.kvcache.base import NOTHING, Handle, InsertResult, Int32s, Node
from radixserve.kvcache.compare import common_pages
from radixserve.kvcache.eviction import EVICTION_ORDERS
from radixserve.kvcache.watch import TreeWatch

_INT32 = np.dtype(np.int32)
_TOKEN_BYTES = _INT32.itemsize
_NO_TEXT = memoryview(b"")


class RadixPrefixCache:
    """A path-compressed tree of page-aligned token prefixes. Owns the pages of its nodes.

    Lengths are tokens and always whole pages; ``pages`` are int32 page ids, one for each ``page_size`` tokens. Requests
    of different ``namespace`` share nothing. A handle must be locked before its pages are used.

    Children are found by the bytes of their first page, at the root with the namespace before it, so requests of
    different namespaces never meet. All costs are those of the prompt and of the nodes on its path, none of the tree.
    """

    def __init__(self, page_size: int, eviction_policy: str = "lru"):
        self.page_size = page_size
        self._page_bytes = page_size * _TOKEN_BYTES
        self._root = Node(None, b"", b"", NOTHING)
        self._order = EVICTION_ORDERS[eviction_policy]()
        self.evictable_pages = 0  # those that no lock protects, on them or below them
        self._watch: TreeWatch | None = None

    def observe(self, watch: TreeWatch | None) -> None:
        """Report all changes to ``watch`` from now on, or to nobody."""
        self._watch = watch
        if watch is not None:
            watch.begin(self._root)

    def match(self, token_ids: Int32s, namespace: str = "") -> Handle:
        """Longest cached prefix in whole pages; marks it as used. Splits a node when the match ends inside it."""
        node, matched, partial, shared = self._walk(self._query(token_ids), namespace)
        if partial is not None:
            node = self._split(partial, shared)
            self._renew(node)
        handle = Handle((matched + shared) // _TOKEN_BYTES, node)
        while node.parent is not None:
            node.uses += 1
            if node.locks == 0:
                self._order.use(node)
            node = node.parent
        if self._watch is not None:
            self._watch.matched(handle.node, handle.cached_len)
        return handle

    def cached_len(self, token_ids: Int32s, namespace: str = "") -> int:
        """Tokens that ``match`` would find now, without marking or splitting anything."""
        _, matched, _, shared = self._walk(self._query(token_ids), namespace)
        return (matched + shared) // _TOKEN_BYTES

    def lock(self, handle: Handle) -> None:
        """Protect the prefix up to the root from eviction; counts, so lock and unlock pair up."""
        node = handle.node
        while node.parent is not None:
            if node.locks == 0:
                self._order.remove(node)
                self.evictable_pages -= len(node.pages)
            node.locks += 1
            node = node.parent
        assert node is self._root, "the handle was evicted before it was locked"
        if self._watch is not None:
            self._watch.locked(handle.node)

    def unlock(self, handle: Handle) -> None:
        node = handle.node
        while node.parent is not None:
            assert node.locks > 0, "unlocked more often than locked"
            node.locks -= 1
            if node.locks == 0:
                self._order.add(node)
                self.evictable_pages += len(node.pages)
            node = node.parent
        if self._watch is not None:
            self._watch.unlocked(handle.node)

    def pages(self, handle: Handle) -> Int32s:
        """The page ids of a locked handle, [cached_len / page_size]."""
        segments = [NOTHING]
        node = handle.node
        while node.parent is not None:
            segments.append(node.pages)
            node = node.parent
        return np.concatenate(segments[::-1])

    def insert(self, token_ids: Int32s, pages: Int32s, namespace: str = "") -> InsertResult:
        """Add the whole pages of ``token_ids`` (``pages`` has one id for each) and mark them as used."""
        query = self._query(token_ids)
        assert len(pages) * self._page_bytes == len(query), "one page id for each whole page of tokens"
        node, matched, partial, shared = self._walk(query, namespace)
        if partial is not None:
            node = self._split(partial, shared)
            matched += shared
        end = node if matched == len(query) else self._add_leaf(node, query, matched, pages, namespace)
        self._renew(node)  # after a new leaf, which must be evicted before the nodes above it
        return InsertResult(Handle(len(query) // _TOKEN_BYTES, end), matched // _TOKEN_BYTES)

    def evict(self, num_pages: int) -> Int32s:
        """Give up ``num_pages`` unprotected pages, or all if there are fewer, least valuable leaves first. The last one
        may only lose its end: the rest stays, and goes first next time."""
        freed = [NOTHING]
        missing = min(num_pages, self.evictable_pages)
        self.evictable_pages -= missing
        while missing > 0:
            leaf = self._order.victim()
            assert not leaf.children and leaf.parent is not None, "an eviction order named an inner node"
            kept = max(len(leaf.pages) - missing, 0)
            freed.append(leaf.pages[kept:])
            missing -= len(leaf.pages) - kept
            if kept:
                # Copies, so that the dropped ends do not stay in memory as long as a stub of their segment lives.
                leaf.text, leaf.start = leaf.text[leaf.start : leaf.start + kept * self._page_bytes], 0
                leaf.pages = leaf.pages[:kept].copy()
            else:
                self._order.remove(leaf)
                del leaf.parent.children[leaf.branch]
            if self._watch is not None:
                self._watch.evicted(leaf, len(freed[-1]) * self.page_size, whole=not kept)
            if not kept:
                leaf.parent = None  # no reference cycle: the node is freed here, not by the garbage collector
        return np.concatenate(freed)

    def owned_pages(self) -> Int32s:
        """Every page of the tree, in no order. Walks the tree: for checks, not for each step."""
        return np.concatenate([node.pages for node in self._nodes()])

    def clear(self) -> Int32s:
        """Evict all that is not protected."""
        return self.evict(self.evictable_pages)

    def check_integrity(self) -> None:
        """Raise AssertionError on any broken invariant of the structure."""
        evictable = 0
        nodes = self._nodes()
        for node in nodes:
            for branch, child in node.children.items():
                assert child.parent is node and child.branch == branch, "parent and child disagree"
                first_page = child.text[child.start : child.start + self._page_bytes]
                assert branch.endswith(first_page), "a branch is not its child's first page"
                assert len(child.text) == child.start + len(child.pages) * self._page_bytes, "text and pages differ"
                assert len(child.pages) > 0, "a node is empty"
            if node is not self._root:
                assert node.locks >= sum(child.locks for child in node.children.values()), "a lock misses its parents"
                evictable += len(node.pages) if node.locks == 0 else 0
        assert evictable == self.evictable_pages, "the count of pages is off"
        unprotected = {node for node in nodes if node.locks == 0 and node is not self._root}
        assert unprotected == set(self._order.nodes), "the eviction order misses nodes or has too many"
        owned = self.owned_pages()
        assert len(np.unique(owned)) == len(owned), "a page lies in two places of the tree"

    def _query(self, token_ids: Int32s) -> memoryview:
        """The bytes of the whole pages of ``token_ids`` (contiguous), not copied."""
        assert token_ids.dtype == _INT32
        num_pages = len(token_ids) // self.page_size
        return token_ids.data.cast("B")[: num_pages * self._page_bytes] if num_pages else _NO_TEXT

    def _walk(self, query: memoryview, namespace: str) -> tuple[Node, int, Node | None, int]:
        """Follow ``query`` (whole pages) from the root. Returns the last node that matches to its end and the bytes
        matched up to there, then the child inside which the match ends, or None, and the bytes shared with that.
        """
        node, matched, page_bytes = self._root, 0, self._page_bytes
        if not query:
            return node, 0, None, 0
        child = node.children.get(namespace.encode() + query[:page_bytes])
        while child is not None:
            length = len(child.pages) * page_bytes
            rest = query[matched : matched + length]
            if len(rest) < length or not child.text.startswith(rest, child.start):
                return node, matched, child, common_pages(child.text, child.start, rest, page_bytes) * page_bytes
            node = child
            matched += length
            child = node.children.get(bytes(query[matched : matched + page_bytes]))
        return node, matched, None, 0

    def _split(self, lower: Node, upper_bytes: int) -> Node:
        """Cut the first ``upper_bytes`` off ``lower`` into a new parent.

        Handles that end at ``lower`` stay right, as it keeps its end; the new node inherits their locks, as each of
        them covers it too. The upper part is copied; the lower part keeps the old text and skips its beginning, which
        wastes at most as much again, as the text above a node lives as long as the node.
        """
        parent, num_pages, middle = lower.parent, upper_bytes // self._page_bytes, lower.start + upper_bytes
        assert parent is not None
        upper = Node(parent, lower.branch, lower.text[lower.start : middle], lower.pages[:num_pages].copy())
        upper.locks, upper.uses = lower.locks, lower.uses
        parent.children[upper.branch] = upper
        lower.parent, lower.start, lower.pages = upper, middle, lower.pages[num_pages:]
        lower.branch = lower.text[middle : middle + self._page_bytes]
        upper.children[lower.branch] = lower
        if upper.locks == 0:
            self._order.add(upper)
        if self._watch is not None:
            self._watch.split(upper, lower)
        return upper

    def _add_leaf(self, parent: Node, query: memoryview, start: int, pages: Int32s, namespace: str) -> Node:
        branch = bytes(query[start : start + self._page_bytes])
        if parent is self._root:
            branch = namespace.encode() + branch
        # The pages are copied: callers pass a part of their page table, which changes.
        leaf = Node(parent, branch, bytes(query[start:]), pages[start // self._page_bytes :].copy())
        parent.children[branch] = leaf
        self._order.add(leaf)
        self.evictable_pages += len(leaf.pages)
        if self._watch is not None:
            self._watch.inserted(leaf)
        return leaf

    def _renew(self, node: Node) -> None:
        while node.parent is not None:
            if node.locks == 0:
                self._order.renew(node)
            node = node.parent

    def _nodes(self) -> list[Node]:
        """All nodes, the root first."""
        nodes = [self._root]
        for node in nodes:
            nodes.extend(node.children.values())
        return nodes

"""The prefix cache by itself: speed of the radix tree beside other key comparisons, layouts and eviction orders.

    python benchmarks/radix_tree.py --output benchmarks/results/w6_NAME.json

All variants are timed in the same run on the same data, since absolute times of a shared machine mean little. Times are
milliseconds of CPU time of the thread, best and median of the repeats. Needs no model and no torch.
"""

from __future__ import annotations

import argparse
import functools
import gc
import heapq
import itertools
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from radixserve.kvcache import eviction
from radixserve.kvcache.base import Handle, InsertResult, Int32s
from radixserve.kvcache.manager import CacheManager
from radixserve.kvcache.radix import RadixPrefixCache

PROMPT_TOKENS, NUM_LEAVES, LEAF_TOKENS = 100_000, 100_000, 16
Times = dict[str, list[float]]


# ---- other ways to do it ----


class NumpyCompare(RadixPrefixCache):
    """Key comparison: each node's ids as an array, compared element by element with numpy."""

    def _walk(self, query: memoryview, namespace: str) -> Any:
        node, matched, page_bytes, ids = self._root, 0, self._page_bytes, np.frombuffer(query, np.int32)
        child = node.children.get(namespace.encode() + query[:page_bytes])
        while child is not None:
            length = len(child.pages) * self.page_size
            rest = ids[matched // 4 : matched // 4 + length]
            differs = rest != np.frombuffer(child.text, np.int32, len(rest), child.start)
            first = int(differs.argmax())
            shared = first if differs[first] else len(rest)
            if shared < length:
                return node, matched, child, shared // self.page_size * page_bytes
            node, matched = child, matched + length * 4
            child = node.children.get(bytes(query[matched : matched + page_bytes]))
        return node, matched, None, 0


class ListCompare(RadixPrefixCache):
    """Key comparison: Python lists of ids, kept for each node; slices first, then a loop to the difference."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._lists: dict[tuple[Any, int, int], list[int]] = {}

    def _walk(self, query: memoryview, namespace: str) -> Any:
        node, matched, page_bytes, ids = self._root, 0, self._page_bytes, np.frombuffer(query, np.int32).tolist()
        child = node.children.get(namespace.encode() + query[:page_bytes])
        while child is not None:
            segment = (child, child.start, len(child.pages))  # a split or an eviction makes another one
            if segment not in self._lists:
                self._lists[segment] = np.frombuffer(child.text, np.int32, offset=child.start).tolist()
            key, start = self._lists[segment], matched // 4
            if ids[start : start + len(key)] != key:
                pairs = zip(itertools.islice(ids, start, None), key, strict=False)
                shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids) - start, len(key)))
                return node, matched, child, shared // self.page_size * page_bytes
            node, matched = child, matched + len(key) * 4
            child = node.children.get(bytes(query[matched : matched + page_bytes]))
        return node, matched, None, 0


class HashedBlocks:
    """Layout: no tree, one table entry for each page, found by the hash of the page and of all before it."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._page_of: dict[int, int] = {}
        self._locks: defaultdict[int, int] = defaultdict(int)
        self._order: OrderedDict[int, None] = OrderedDict()

    def _hashes(self, token_ids: Int32s) -> Iterator[int]:
        query, step, chain = token_ids.tobytes(), 4 * self.page_size, 0
        for start in range(0, len(query) - step + 1, step):
            chain = hash((chain, query[start : start + step]))
            yield chain

    def match(self, token_ids: Int32s) -> Handle:
        path = list(itertools.takewhile(self._page_of.__contains__, self._hashes(token_ids)))
        for chain in reversed(path):
            if not self._locks[chain]:
                self._order.move_to_end(chain)
        return Handle(len(path) * self.page_size, path)

    def lock(self, handle: Handle) -> None:
        for chain in handle.node:
            if not self._locks[chain]:
                del self._order[chain]
            self._locks[chain] += 1

    def unlock(self, handle: Handle) -> None:
        for chain in reversed(handle.node):
            self._locks[chain] -= 1
            if not self._locks[chain]:
                self._order[chain] = None

    def pages(self, handle: Handle) -> Int32s:
        return np.fromiter(map(self._page_of.__getitem__, handle.node), np.int32, len(handle.node))

    def insert(self, token_ids: Int32s, pages: Int32s) -> InsertResult:
        path, there = list(self._hashes(token_ids)), 0
        for chain, page in zip(path, pages.tolist(), strict=True):
            there += chain in self._page_of
            self._page_of.setdefault(chain, page)
        for chain in reversed(path):
            if not self._locks[chain]:
                self._order[chain] = None
                self._order.move_to_end(chain)
        return InsertResult(Handle(len(path) * self.page_size, path), there * self.page_size)

    def evict(self, num_pages: int) -> Int32s:
        oldest = [self._order.popitem(last=False)[0] for _ in range(min(num_pages, len(self._order)))]
        return np.array([self._page_of.pop(chain) for chain in oldest], np.int32)


class LazyHeapOrder(eviction.EvictionOrder):
    """Eviction order: a heap kept across calls, whose outdated entries are put right when they come up."""

    def __init__(self) -> None:
        super().__init__()
        self._heap: list[tuple[int, Any]] = []
        self._last_use: dict[Any, int] = {}
        self._tick = itertools.count()

    def add(self, node: Any) -> None:
        self._nodes[node] = None
        self.use(node)
        heapq.heappush(self._heap, (self._last_use[node], id(node), node))  # type: ignore[misc]

    def remove(self, node: Any) -> None:
        del self._nodes[node], self._last_use[node]

    def use(self, node: Any) -> None:
        self._last_use[node] = next(self._tick)

    renew = use

    def victim(self) -> Any:
        while True:
            tick, _, node = self._heap[0]  # type: ignore[misc]
            last_use = self._last_use.get(node)
            if tick == last_use:
                return node
            heapq.heappop(self._heap)
            if last_use is not None:
                heapq.heappush(self._heap, (last_use, id(node), node))  # type: ignore[misc]


class LazyHeap(RadixPrefixCache):
    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self._order = LazyHeapOrder()


class RebuiltHeap(LazyHeap):
    """Eviction order: leaves collected from the whole tree and put into a heap by each call."""

    def evict(self, num_pages: int) -> Int32s:
        order = self._order
        assert isinstance(order, LazyHeapOrder)
        leaves = [node for node in self._nodes() if not node.children and node.locks == 0 and node is not self._root]
        order._heap = [(order._last_use[node], id(node), node) for node in leaves]  # type: ignore[misc]
        heapq.heapify(order._heap)
        return super().evict(num_pages)


VARIANTS: dict[str, Callable[[int], Any]] = {
    "radixserve (bytes, linked list)": RadixPrefixCache,
    "keys compared by numpy": NumpyCompare,
    "keys as Python lists": ListCompare,
    "one hashed entry a page": HashedBlocks,
    "eviction by a lazy heap": LazyHeap,
    "eviction by a rebuilt heap": RebuiltHeap,
}


# ---- what is timed ----


class Timer:
    """Collects milliseconds of CPU time by operation."""

    def __init__(self) -> None:
        self.times: Times = {}

    def __call__(self, operation: str, work: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time_ns()
        result = work(*args)
        self.times.setdefault(operation, []).append((time.thread_time_ns() - start) / 1e6)
        return result


def random_ids(rng: np.random.Generator, *shape: int) -> Int32s:
    return rng.integers(0, 100_000, shape, dtype=np.int32)


def insert_all(tree: Any, texts: list[Int32s]) -> None:
    first_page = 0
    for text in texts:
        count = len(text) // tree.page_size
        tree.insert(text, np.arange(first_page, first_page + count, dtype=np.int32))
        first_page += count


def time_long_prompt(make: Callable[[], Any], timer: Timer, rng: np.random.Generator) -> None:
    prompt = random_ids(rng, PROMPT_TOKENS)
    half = np.concatenate([prompt[: PROMPT_TOKENS // 2], random_ids(rng, PROMPT_TOKENS // 2)])
    tree = make()
    insert_all(tree, [prompt])
    for _ in range(5):
        handle = timer("match 100,000 tokens, full hit", tree.match, prompt)
        tree.lock(handle)
        pages = timer("its pages as one array", tree.pages, handle)
        assert len(pages) == PROMPT_TOKENS // tree.page_size
        tree.unlock(handle)
    timer("match half of it (splits)", tree.match, half)
    for _ in range(5):
        assert timer("match half of it again", tree.match, half).cached_len == PROMPT_TOKENS // 2
    chunked = make()
    for end in range(2000, PROMPT_TOKENS + 1, 2000):
        chunked.insert(prompt[:end], np.arange(end // tree.page_size, dtype=np.int32))
    for _ in range(5):
        timer("match it, inserted in 50 chunks", chunked.match, prompt)


def time_shared_halves(make: Callable[[], Any], timer: Timer, rng: np.random.Generator) -> None:
    halves = random_ids(rng, 100, 1000)
    texts = [np.concatenate([halves[i % 100], random_ids(rng, 1000)]) for i in range(1000)]
    tree = make()
    gc.collect()
    timer("insert 1,000 prompts of 2,000 tokens", insert_all, tree, texts)
    timer("match them", lambda: [tree.match(text) for text in texts])


def time_many_leaves(make: Callable[[], Any], timer: Timer, rng: np.random.Generator) -> None:
    texts = list(random_ids(rng, NUM_LEAVES, LEAF_TOKENS))
    tree = make()
    leaf_pages = LEAF_TOKENS // tree.page_size
    gc.collect()
    timer("insert 100,000 leaves of 16 tokens", insert_all, tree, texts)
    for _ in range(5):
        timer("evict one leaf of 100,000", tree.evict, leaf_pages)
    timer("evict 1% of 100,000 leaves", tree.evict, leaf_pages * NUM_LEAVES // 100)
    for text in random.Random(0).sample(texts, len(texts)):
        tree.match(text)
    timer("evict one leaf after all were used", tree.evict, leaf_pages)


def time_manager(page_size: int, timer: Timer, rng: np.random.Generator) -> None:
    rows, length = 256, 1024
    cache = CacheManager(RadixPrefixCache(page_size), 600_000 // page_size, rows, 2048 // page_size)
    prompts = list(random_ids(rng, rows, length))

    def admit_all() -> list[Any]:
        leases = [cache.admit(prompt) for prompt in prompts]
        for lease, prompt in zip(leases, prompts, strict=True):
            assert lease is not None
            cache.extend(lease, length)
            cache.commit(lease, prompt)
        return leases

    leases = timer("manager: admit, extend, commit 256 prompts of 1,024", admit_all)
    order = np.array([lease.row for lease in leases], np.int32)
    kv_lens = length + np.arange(rows, dtype=np.int32) % 16  # so that every step brings some rows to a new page
    for lease, kv_len in zip(leases, kv_lens.tolist(), strict=True):
        cache.extend(lease, kv_len)
    for step in range(1, 51):
        assert timer("manager: a decode step of 256 rows", cache.extend_decodes, order, kv_lens + np.int32(step))
        cache.take_page_writes()

    def release_all() -> None:
        for lease, prompt in zip(leases, prompts, strict=True):
            cache.release(lease, prompt)

    timer("manager: release 256", release_all)
    cache.check_integrity()


def measure(page_size: int, repeats: int) -> dict[str, dict[str, dict[str, float]]]:
    """Variants take turns, so that a busy minute of the machine meets them all."""
    timers = {name: Timer() for name in VARIANTS}
    for repeat, (name, timer) in itertools.product(range(repeats), timers.items()):
        make = functools.partial(VARIANTS[name], page_size)
        rng = np.random.default_rng(repeat)
        time_long_prompt(make, timer, rng)
        time_shared_halves(make, timer, rng)
        if repeat % 3 == 0:
            time_many_leaves(make, timer, rng)
        if VARIANTS[name] is RadixPrefixCache:
            time_manager(page_size, timer, rng)
    return {
        name: {
            operation: {"best_ms": round(min(times), 4), "median_ms": round(statistics.median(times), 4)}
            for operation, times in timer.times.items()
        }
        for name, timer in timers.items()
    }


def describe_machine() -> dict[str, str]:
    cpu = next(
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "cpu": cpu,
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit,
        "command": "python " + " ".join(sys.argv),
    }


def print_table(results: dict[str, dict[str, dict[str, float]]]) -> None:
    """Median milliseconds: one line an operation, one column a variant."""
    print("| operation | " + " | ".join(results) + " |\n|" + "---|" * (len(results) + 1))
    for operation in next(iter(results.values())):
        cells = (f"{column[operation]['median_ms']:.3g}" if operation in column else "" for column in results.values())
        print(f"| {operation} | " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    report: dict[str, Any] = {"machine": describe_machine(), "page_size": {}}
    for page_size in args.page_sizes:
        results = measure(page_size, args.repeats)
        report["page_size"][str(page_size)] = results
        print(f"\nPage size {page_size}, median milliseconds\n")
        print_table(results)
    if args.output:
        args.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Decode attention of one layer that reads shared prefixes once, beside the kernel that does not.

`python benchmarks/gpu_shared_attention.py [--cases "16 groups of 16"]` prints the microseconds of a call, the time in
which each byte could be read once, and how far the two kernels are apart. bf16, 16 query and 8 KV heads of 128, page
size 16; each decode has tokens of its own behind its group's prefix.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_timing import BYTES_PER_US, DEVICE, attention_us, decode_layout, relative_error

from radixserve.kernels.interface import AttentionShape
from radixserve.kernels.shared_prefix import PrefixGroups, pack_tiles, unpack_tiles
from radixserve.kernels.triton_attention import DecodeTuning, TritonDecodeAttention
from radixserve.kernels.triton_shared_attention import TritonSharedAttention

BF16 = torch.bfloat16
Q_HEADS, KV_HEADS, DIM, PAGE = 16, 8, 128, 16
TOKEN_BYTES = 2 * 2 * KV_HEADS * DIM
CASES = {  # groups, decodes of each, tokens of its prefix, own tokens of a decode at least and at most, padding
    "16 groups of 16": (16, 16, 2048, 128, 192),
    "64 groups of 4": (64, 4, 2048, 128, 192),
    "one group of 256": (1, 256, 2048, 128, 192),
    "32 groups of 2": (32, 2, 2048, 128, 192),
    "256 apart": (256, 1, 0, 100, 1500),
    "1024 apart": (1024, 1, 0, 64, 700),
    "32 apart": (32, 1, 0, 100, 1500),
    "256 apart, padded to 1024": (256, 1, 0, 100, 1500, 768),
}
PLAIN_TUNINGS = {f"start {units}": DecodeTuning(start_units=units) for units in (0, 1, 2, 4, 8)}
TUNINGS = {  # rows of a tile, and the rest
    **{f"16 rows, start {units}": (16, DecodeTuning(start_units=units)) for units in (0, 4, 8, 12, 16, 24)},
    "32 rows, start 12": (32, DecodeTuning(num_warps=4, blocks_per_sm=2, start_units=12)),
    "32 rows, 64 tokens, start 12": (
        32,
        DecodeTuning(block_tokens=64, num_warps=4, blocks_per_sm=2, min_slice_units=4, start_units=12),
    ),
}


class SharedCase:
    """Decodes in shuffled order, then ``padding``, over shuffled pages, with two copies of the cache, each larger than
    the L2."""

    def __init__(self, num_groups: int, size: int, prefix_len: int, least: int, most: int, padding: int = 0):
        rng = np.random.default_rng(0)
        self.num_live = num_live = num_groups * size
        self.num_seqs = num_live + padding
        own = rng.integers(least, most + 1, num_live)
        order = rng.permutation(num_live).reshape(num_groups, size)
        self.kv_lens = (own + prefix_len).astype(np.int32)
        num_cols, num_prefix = -(-int(self.kv_lens.max()) // PAGE), prefix_len // PAGE
        pages = rng.permutation(num_live * (num_cols - num_prefix) + num_groups * num_prefix).astype(np.int32)
        prefix_pages, own_pages = np.split(pages, [num_groups * num_prefix])
        table = np.empty((num_live, num_cols), np.int32)
        table[:, num_prefix:] = own_pages.reshape(num_live, -1)
        table[order, :num_prefix] = prefix_pages.reshape(num_groups, 1, num_prefix)
        self.is_shared = shared = size > 1
        self.groups = PrefixGroups(
            order.reshape(-1).astype(np.int32)[: num_live * shared],
            np.arange(0, num_live * shared + 1, size, dtype=np.int32),
            np.full(num_groups * shared, prefix_len, np.int32),
        )
        self.tokens = int(own.sum()) + num_groups * prefix_len
        shape = (2, len(pages), PAGE, KV_HEADS, DIM)
        self.caches = [torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(2)]
        self.q = torch.randn(self.num_seqs, Q_HEADS, DIM, device=DEVICE, dtype=BF16)
        self.shape = AttentionShape(Q_HEADS, KV_HEADS, DIM, PAGE, BF16)
        self.plain = TritonDecodeAttention(self.shape, self.num_seqs, DEVICE)
        self.layout = decode_layout(np.pad(self.kv_lens, (0, padding)), table, PAGE)

    def measure_plain(self, tuning: DecodeTuning) -> tuple[float, torch.Tensor]:
        kernel = TritonDecodeAttention(self.shape, self.num_seqs, DEVICE, tuning=tuning)
        return self._measure(kernel, lambda: kernel.plan_decode(self.layout, self.num_seqs))

    def measure_shared(self, tile_rows: int, tuning: DecodeTuning) -> tuple[float, torch.Tensor]:
        kernel = TritonSharedAttention(self.plain, self.num_seqs, DEVICE, tile_rows, tuning)
        members = kernel.rule.tile_members
        packed = pack_tiles(self.groups, self.kv_lens, self.num_seqs, members)
        tiles = unpack_tiles(torch.from_numpy(packed).to(DEVICE), self.num_seqs, members)
        return self._measure(kernel, lambda: kernel.plan_decode(self.layout, tiles, self.num_seqs))

    def _measure(self, kernel: Any, plan: Callable[[], None]) -> tuple[float, torch.Tensor]:
        us, out = attention_us(kernel, plan, self.q, self.caches, rounds=4)
        return us, out[: self.num_live]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    results = []
    for name in options.cases:
        case = SharedCase(*CASES[name])
        floor = case.tokens * TOKEN_BYTES / BYTES_PER_US
        print(f"{name}: each byte once {floor:.1f} us", flush=True)
        measures: dict[str, Callable[[], tuple[float, torch.Tensor]]] = {
            f"plain, {label}": partial(case.measure_plain, tuning) for label, tuning in PLAIN_TUNINGS.items()
        }
        if case.is_shared:
            measures |= {label: partial(case.measure_shared, *tuning) for label, tuning in TUNINGS.items()}
        expected = None
        for label, measure in measures.items():
            us, out = measure()
            expected = out if expected is None else expected
            error = relative_error(out, expected)
            print(f"  {label}: {us:.1f} us, apart by {error:.1e}", flush=True)
            results.append({"case": name, "kernel": label, "us": us, "floor_us": floor, "error": error})
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

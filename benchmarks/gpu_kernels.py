"""Sweeps of the decode kernels on one GPU: `python benchmarks/gpu_kernels.py attention|linear|sampling [--out FILE]`.

Each candidate is compared with plain torch and timed in graph replays over more data than the L2 cache holds. Products
are timed with the kernel that the library's product needs beside it: the activation, or the norm that sums its parts.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from gpu_timing import DEVICE, Job, attention_us, decode_layout, graph_us, precompile, relative_error
from numpy.typing import NDArray
from torch import Tensor

from radixserve.kernels import cuda_ops, triton_linear, triton_ops, triton_sampling
from radixserve.kernels.interface import AttentionShape, Norm
from radixserve.kernels.triton_attention import DecodeTuning, TritonDecodeAttention

BF16 = torch.bfloat16
L2_BYTES = 60e6
KV_HEADS, DIM = 8, 128

Result = dict[str, Any]


class AttentionCase:
    """One layer's decode over shuffled pages, with enough copies of the cache to rotate over."""

    def __init__(self, q_heads: int, kv_lens: NDArray[np.int64], page_size: int):
        rng = np.random.default_rng(0)
        self.num_seqs, self.lens = len(kv_lens), kv_lens.tolist()
        counts = -(-kv_lens // page_size)
        table = np.zeros((self.num_seqs, counts.max()), np.int32)
        table[np.arange(counts.max()) < counts[:, None]] = rng.permutation(counts.sum())
        self.bytes = float(kv_lens.sum()) * KV_HEADS * DIM * 4
        shape = (2, int(counts.sum()), page_size, KV_HEADS, DIM)
        copies = max(2, int(3 * L2_BYTES / self.bytes) + 1)
        self.caches = [torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(copies)]
        self.q = torch.randn(self.num_seqs, q_heads, DIM, device=DEVICE, dtype=BF16)
        self.layout = decode_layout(kv_lens, table, page_size)

    def reference(self) -> Tensor:
        """Of the first copy, one sequence at a time in fp32."""
        out = torch.empty_like(self.q)
        for s, length in enumerate(self.lens):
            pages = self.layout.page_table[s].long()
            k, v = (cache[pages].flatten(0, 1)[:length].float().transpose(0, 1) for cache in self.caches[0])
            q = self.q[s].float()[:, None]
            out[s] = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0, :, 0]
        return out

    def measure(self, tuning: DecodeTuning, reference: Tensor) -> Result:
        shape = AttentionShape(self.q.shape[1], KV_HEADS, DIM, self.layout.page_size, BF16)
        kernel = TritonDecodeAttention(shape, self.num_seqs, DEVICE, tuning=tuning)
        plan = partial(kernel.plan_decode, self.layout, self.num_seqs)
        us, out = attention_us(kernel, plan, self.q, self.caches, rounds=2)
        return {"us": us, "gbs": self.bytes / us / 1e3, "error": relative_error(out, reference), **asdict(tuning)}


TUNINGS = [
    DecodeTuning(),
    DecodeTuning(blocks_per_sm=3),
    DecodeTuning(blocks_per_sm=8),
    DecodeTuning(num_stages=3, blocks_per_sm=6),
    DecodeTuning(block_tokens=16, num_warps=1, blocks_per_sm=8),
    DecodeTuning(block_tokens=64, blocks_per_sm=3, min_slice_units=4),
    DecodeTuning(block_tokens=64, num_warps=4, blocks_per_sm=2, min_slice_units=4),
]


def attention_cases() -> Iterator[tuple[str, AttentionCase]]:
    rng = np.random.default_rng(1)
    for heads, (batch, mean) in itertools.product((16, 32), ((1, 256), (1, 8000), (8, 900), (64, 900), (256, 900))):
        lens = rng.integers(int(0.6 * mean), int(1.4 * mean) + 1, batch) if batch > 1 else np.array([mean])
        yield f"{heads} heads, {batch} x {mean} tokens", AttentionCase(heads, lens, 16)
    ragged = rng.integers(100, 1900, 256)
    for page_size in (16, 1):
        yield f"16 heads, 256 x 100..1900 tokens, page size {page_size}", AttentionCase(16, ragged, page_size)


def sweep_attention() -> list[Result]:
    results = []
    for name, case in attention_cases():
        reference = case.reference()
        rows = [{"case": name, **case.measure(tuning, reference)} for tuning in TUNINGS]
        results += rows
        show(name, rows)
    return results


@dataclass(frozen=True, slots=True)
class Shape:
    """A linear layer: ``n`` outputs (twice the weights if ``gated``), ``k`` inputs, and what is fused around it."""

    n: int
    k: int
    gated: bool = False
    add: bool = False

    @property
    def weights(self) -> int:
        return self.n * self.k * (2 if self.gated else 1)


SHAPES = {
    "0.6B qkv": Shape(4096, 1024),
    "0.6B o": Shape(1024, 2048, add=True),
    "0.6B gate_up": Shape(3072, 1024, gated=True),
    "0.6B down": Shape(1024, 3072, add=True),
    "0.6B head": Shape(151936, 1024),
    "8B qkv": Shape(6144, 4096),
    "8B o": Shape(4096, 4096, add=True),
    "8B gate_up": Shape(12288, 4096, gated=True),
    "8B down": Shape(4096, 12288, add=True),
    "8B head": Shape(151936, 4096),
}
BATCHES = (1, 2, 16, 32, 64, 128, 256)


def configs(shape: Shape, m: int) -> list[dict[str, int]]:
    """Tiles worth trying; those of one token have no BLOCK_M."""
    if m == 1:
        width = min(triton.next_power_of_2(shape.k), 4096)
        rows = [size // width // (2 if shape.gated else 1) for size in (4096, 8192, 16384)]
        pairs = itertools.product(sorted({r for r in rows if r}), (4, 8))
        return [{"BLOCK_N": n, "BLOCK_K": width, "num_warps": warps} for n, warps in pairs]
    heights = (16,) if m <= 16 else (32, 64) if m <= 32 else (64,) if m <= 64 else (64, 128)
    tiles = itertools.product(heights, (16, 32, 64, 128), (64, 128, 256, 512), (3, 4))
    return [
        {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "STAGES": stages, "num_warps": warps}
        for bm, bn, bk, stages in tiles
        for warps in ((2, 4) if bm * bn <= 512 else (8,) if bm * bn >= 16384 else (4,))
        if 6_000 < (bm + bn) * bk < 28_000 and shape.k % bk == 0
    ]


def launch(
    shape: Shape, m: int, config: dict[str, int], tensors: tuple[Any, ...]
) -> tuple[str, tuple[Any, ...], Result]:
    """Kernel, arguments and options; ``tensors`` are x, weight, added and out, or their types."""
    x, weight, added, out = tensors
    options: Result = {"GATED": shape.gated, "ADD": shape.add, "PDL": True, "launch_pdl": True, **config}
    if m == 1:
        return "_gemv", (x, weight, x, added, out, 1e-6, shape.n), {**options, "K": shape.k, "NORM": False}
    options["BLOCK_N"] //= 2 if shape.gated else 1
    options["LINES"] = triton.next_power_of_2(shape.k // 64)
    return "_matmul", (x, weight, added, out, m, shape.n, shape.k), options


def sweep_linear(names: list[str], batches: list[int]) -> list[Result]:
    jobs: dict[str, Job] = {}
    for name, m in itertools.product(names, batches):
        for config in configs(SHAPES[name], m):
            kernel, args, options = launch(SHAPES[name], m, config, (BF16,) * 4)
            jobs[f"{kernel} {options}"] = (triton_linear.__name__, kernel, args, options)
    precompile(list(jobs.values()))
    results = []
    for name in names:
        layer = LinearCase(SHAPES[name])
        for m in batches:
            rows = [{"case": f"{name}, {m} tokens", **row} for row in layer.measure(m)]
            results += rows
            show(rows[0]["case"], rows)
    return results


class LinearCase:
    """One linear layer with enough copies of its weights to rotate over."""

    def __init__(self, shape: Shape):
        self.shape = shape
        rows = shape.weights // shape.k
        copies = max(2, min(28, int(4 * L2_BYTES / (2 * shape.weights)) + 1))
        self.weights = [torch.randn(rows, shape.k, device=DEVICE, dtype=BF16) / shape.k**0.5 for _ in range(copies)]
        self.norm = Norm(torch.ones(shape.n, device=DEVICE, dtype=BF16), 1e-6)

    def measure(self, m: int) -> list[Result]:
        shape = self.shape
        x, added = (torch.randn(m, width, device=DEVICE, dtype=BF16) for width in (shape.k, shape.n))
        reference = F.linear(x.float(), self.weights[-1].float())
        if shape.gated:
            reference = F.silu(reference[:, : shape.n]) * reference[:, shape.n :]
        if shape.add:
            reference += added.float()

        stream = added.clone()

        def library() -> None:
            for weight in self.weights:
                parts = cuda_ops.num_parts(m, weight) if shape.add else 1
                product = F.linear(x, weight) if parts == 1 else cuda_ops.linear_in_parts(x, weight, parts)
                if shape.gated:
                    triton_ops.silu_mul(product, pdl=False)
                if shape.add:
                    triton_ops.rms_norm(product, self.norm, stream, pdl=False)

        results = [{"us": graph_us(library, len(self.weights)), "config": "library", "error": 0.0}]
        for config in configs(shape, m):
            out = torch.full((m, shape.n), float("nan"), device=DEVICE, dtype=BF16)
            us = self.time(m, config, x, added, out)
            results.append({"us": us, "config": config, "error": relative_error(out, reference)})
        return results

    def time(self, m: int, config: dict[str, int], x: Tensor, added: Tensor, out: Tensor) -> float:
        def body() -> None:
            for weight in self.weights:
                kernel, args, options = launch(self.shape, m, config, (x, weight, added, out))
                grid = (triton.cdiv(m, config.get("BLOCK_M", 1)), triton.cdiv(self.shape.n, options["BLOCK_N"]))
                getattr(triton_linear, kernel)[grid[1:] if m == 1 else grid](*args, **options)
                if self.shape.add and m > 1:  # of one token it is part of the next product
                    triton_ops.rms_norm(out, self.norm, None, pdl=True)

        return graph_us(body, len(self.weights))


# temperature, top-k (0: off), top-p, min-p
RULES = {
    "no filter": (0.6, 0, 1.0, 0.0),
    "top-k 20, top-p 0.95": (0.6, 20, 0.95, 0.0),
    "top-k 50": (1.0, 50, 1.0, 0.0),
    "top-p 0.95": (0.6, 0, 0.95, 0.0),
    "min-p 0.1": (1.0, 0, 1.0, 0.1),
}


def time_sampling(vocab: int = 151_936) -> list[Result]:
    """Draws from logits like a model's: normal, with a deviation of 3."""
    results = []
    for (name, (temperature, top_k, top_p, min_p)), rows in itertools.product(RULES.items(), (1, 16, 256)):
        logits = 3 * torch.randn(rows, vocab, device=DEVICE)
        floats = torch.tensor([[temperature, top_p, min_p]] * rows, device=DEVICE)
        ints = torch.tensor([[seed, top_k or vocab] for seed in range(rows)], device=DEVICE)
        row, last = torch.arange(rows, dtype=torch.int32, device=DEVICE), torch.zeros(rows, device=DEVICE).long()
        us = graph_us(partial(triton_sampling.sample, logits, row, floats, ints, row, last), 1)
        results.append({"case": f"{rows} rows, {name}", "us": us})
        print(f"{results[-1]['case']}: {us:.1f} us", flush=True)
    return results


def show(case: str, rows: list[Result]) -> None:
    """The three fastest, the library where there is one, and anything that is wrong."""
    ranked = sorted(rows, key=lambda row: row["us"])
    hidden = ("case", "us", "error", "gbs", "config")
    for row in [*ranked[:3], *(row for row in ranked[3:] if not row["error"] < 1e-2 or "library" in str(row))]:
        config = row.get("config") or {key: value for key, value in row.items() if key not in hidden}
        print(f"{case}: {row['us']:.2f} us, error {row['error']:.1e}, {config}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("attention", "linear", "sampling"))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="tokens of products")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    match options.what:
        case "attention":
            results = sweep_attention()
        case "linear":
            results = sweep_linear(options.shapes, options.batches)
        case _:
            results = time_sampling()
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

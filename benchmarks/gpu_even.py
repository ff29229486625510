"""Products cut evenly on one GPU: `python benchmarks/gpu_even.py [--out FILE]`, about two minutes.

First each product of Qwen3-8B and 0.6B with many tiles, between norms as in a layer, beside what is chosen now. Then,
with the tiles that were fastest, decode steps of eight layers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_decode_step import DecodeStep
from gpu_kernels import L2_BYTES, SHAPES, Result, Shape
from gpu_timing import BYTES_PER_US, DEVICE, capture, graph_us, precompile, relative_error, replay_us
from torch import Tensor

from radixserve.kernels import triton_ops
from radixserve.kernels.cuda_ops import CudaOps
from radixserve.kernels.interface import Norm, Weight, norm_of_stream
from radixserve.kernels.triton_even import EvenProducts, EvenTile

BF16 = torch.bfloat16
PRODUCTS = [f"{model} {name}" for model in ("8B", "0.6B") for name in ("qkv", "o", "gate_up", "down")]
SWEPT_TOKENS = (16, 32, 64)  # up to 16 they are the same kernels
STEP_TOKENS = (2, 4, 8, 16, 32, 48, 64)
LAYERS = 8
MODELS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "tie_word_embeddings": False},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
}
EARLY_KIB = (0, 64, 128, 256)
# columns, depth, stages, warps, blocks
CUTS = (
    (16, 256, 5, 4, 2),
    (32, 128, 5, 4, 2),
    (32, 256, 5, 4, 1),
    (64, 64, 4, 4, 2),
    (64, 64, 6, 4, 2),
    (64, 128, 3, 4, 2),
    (64, 128, 4, 4, 2),
    (64, 128, 4, 4, 1),
    (64, 128, 6, 4, 1),
    (64, 256, 3, 4, 1),
    (64, 256, 4, 4, 1),
    (128, 64, 3, 4, 2),
    (128, 64, 4, 4, 2),
    (128, 64, 6, 4, 1),
    (128, 128, 3, 4, 1),
    (128, 128, 4, 8, 1),
    (256, 64, 3, 8, 1),
    (256, 64, 4, 8, 1),
)
SHARED_BYTES = 227 << 10


def tiles(shape: Shape, tokens: int, kinds: Sequence[bool]) -> list[EvenTile]:
    """That fit into shared memory. Columns of a gated product weigh twice. ``kinds``: with tensor maps, without."""
    rows = max(16, 1 << (tokens - 1).bit_length())
    found = []
    for (columns, depth, stages, warps, blocks), tma in itertools.product(CUTS, kinds):
        columns //= 2 if shape.gated else 1
        stage_bytes = 2 * depth * (columns * (2 if shape.gated else 1) + rows)
        fits = blocks * (stages * stage_bytes + 4 * columns * rows + 2048) <= SHARED_BYTES
        if fits and 16 <= columns <= 2048 * warps // rows and shape.k % depth == 0:
            found.append(EvenTile(columns, depth, stages, warps, blocks, 128, tma))
    return found


def compile_all(kinds: Sequence[bool]) -> None:
    jobs = [
        ("gpu_even", _Warmup.__name__, (shape.gated, tokens, tuple(tile)), {})
        for shape in (SHAPES["8B qkv"], SHAPES["8B gate_up"])  # of other sizes they are the same kernels
        for tokens in SWEPT_TOKENS
        for tile in tiles(shape, tokens, kinds)
    ]
    precompile(jobs)


class _Warmup:
    """Compiles one kernel in a process of its own; what ``precompile`` calls."""

    @staticmethod
    def warmup(gated: bool, tokens: int, tile: tuple[Any, ...], grid: Any) -> None:
        even = EvenProducts(132, DEVICE, pdl=True)
        cut = EvenTile(*tile)
        x = torch.empty(tokens, cut.depth, device=DEVICE, dtype=BF16)
        weight = torch.empty(cut.columns * (2 if gated else 1), cut.depth, device=DEVICE, dtype=BF16)
        even.linear(x, weight, cut, gated=gated)
        torch.cuda.synchronize()


class Product:
    """A product of a layer, with copies of its weights to rotate over, and the norm that comes next or before."""

    def __init__(self, name: str):
        self.name, self.shape = name, SHAPES[name]
        shape = self.shape
        copies = max(4, min(16, int(4 * L2_BYTES / (2 * shape.weights)) + 1))
        rows = shape.weights // shape.k
        self.weights = [torch.randn(rows, shape.k, device=DEVICE, dtype=BF16) / shape.k**0.5 for _ in range(copies)]
        width = shape.n if shape.add else shape.k
        self.norm = Norm(torch.ones(width, device=DEVICE, dtype=BF16), 1e-6)

    def measure(self, tokens: int, even: EvenProducts, kinds: Sequence[bool]) -> list[Result]:
        """What is chosen now, then the tiles; then the fastest tiles with other early loads."""
        shape = self.shape
        x, stream = (torch.randn(tokens, width, device=DEVICE, dtype=BF16) for width in (shape.k, shape.n))
        reference = x.float() @ self.weights[-1].float().T
        if shape.gated:
            reference = F.silu(reference[:, : shape.n]) * reference[:, shape.n :]
        rows = [{"case": f"{self.name}, {tokens} tokens", "us": self.time_now(x, stream), "tile": None, "error": 0.0}]

        def add(tile: EvenTile) -> None:
            try:
                us = self.time(x, stream, partial(even.linear, tile=tile, gated=shape.gated))
                error = relative_error(even.linear(x, self.weights[-1], tile, gated=shape.gated), reference)
            except Exception as problem:  # a tile that does not fit is a result of the sweep
                print(f"{self.name}, {tokens} tokens, {tile}: {str(problem)[:200]}", flush=True)
                return
            rows.append({"case": rows[0]["case"], "us": us, "tile": list(tile), "error": error})

        for tile in tiles(shape, tokens, kinds):
            add(tile)
        for row in sorted(rows[1:], key=lambda row: row["us"])[:3]:
            for kib in EARLY_KIB:
                if kib != row["tile"][5]:
                    add(EvenTile(*row["tile"])._replace(early_kib=kib))
        return rows

    def time(self, x: Tensor, stream: Tensor, multiply: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Product and norm, each starting early."""
        before = x.clone()

        def body() -> None:
            for weight in self.weights:
                if self.shape.add:
                    triton_ops.rms_norm(multiply(x, weight), self.norm, stream, pdl=True)
                else:
                    multiply(triton_ops.rms_norm(before, self.norm, None, pdl=True), weight)

        return graph_us(body, len(self.weights))

    def time_now(self, x: Tensor, stream: Tensor) -> float:
        ops, shape = CudaOps(pdl=True), self.shape

        def body() -> None:
            pending: Tensor | None = None
            for weight in self.weights:
                if shape.add:
                    added, pending = ops.add_linear(stream, x, weight)
                    norm_of_stream(ops, added, pending, self.norm)
                else:
                    ops.project(x, None, self.norm, weight, None, gated=shape.gated)

        return graph_us(body, len(self.weights))


class EvenOps(CudaOps):
    """Products by the tiles that were fastest; ``tiles``: by the weight's shape, for each number of rows."""

    def __init__(self, even: EvenProducts, best: dict[tuple[int, ...], dict[int, EvenTile]]):
        super().__init__(pdl=True)
        self._even, self._best = even, best

    def _multiply(self, x: Tensor, weight: Tensor, gated: bool) -> Tensor:
        tile = next(tile for tokens, tile in self._best[tuple(weight.shape)].items() if len(x) <= tokens)
        return self._even.linear(x, weight, tile, gated=gated)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        return triton_ops.rms_norm(x, norm, residual, pdl=True), residual

    def project(
        self, stream: Tensor, pending: Tensor | None, norm: Norm, weight: Weight, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        assert isinstance(weight, Tensor)
        normed, stream = norm_of_stream(self, stream, pending, norm)
        return stream, self._multiply(normed, weight, gated)

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(weight, Tensor)
        return stream, self._multiply(y, weight, False)


def time_steps(model: str, ops: EvenOps) -> list[Result]:
    config = {"num_hidden_layers": LAYERS, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    results = []
    for tokens in STEP_TOKENS:
        row: Result = {"case": f"{model}, {LAYERS} layers, {tokens} sequences of 256 tokens"}
        logits = []
        for name, chosen in (("now", CudaOps(pdl=True)), ("even", ops)):
            step = DecodeStep({**config, **MODELS[model]}, tokens, 256, True, True)
            step.ops = chosen
            graph = capture(step.run)
            step.last_tokens.zero_()
            graph.replay()
            logits.append(step.logits.clone())
            row[name] = statistics.median(replay_us(graph, 20))
            row["floor"] = step.floor_us()
            del step, graph
        row["error"] = relative_error(logits[1], logits[0])
        results.append(row)
        print(
            f"{row['case']}: now {row['now']:.0f} us, even {row['even']:.0f} ({row['even'] / row['now'] - 1:+.1%}), "
            f"floor {row['floor']:.0f}, logits off by {row['error']:.1e}",
            flush=True,
        )
    return results


def show(rows: Sequence[Result], weights: int) -> None:
    """What is chosen now, the three fastest of either kind, and anything that is wrong."""
    now, *others = rows
    print(f"{now['case']}: now {now['us']:.2f} us, floor {2 * weights / BYTES_PER_US:.2f}", flush=True)
    ranked = sorted(others, key=lambda row: row["us"])
    best = [row for tma in (True, False) for row in [row for row in ranked if row["tile"][6] == tma][:3]]
    for row in [*best, *(row for row in ranked if not row["error"] < 1e-2 and row not in best)]:
        print(f"    {row['us']:.2f} us, error {row['error']:.1e}, {row['tile']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pointers", action="store_true", help="no tensor maps")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    kinds = (False,) if options.pointers else (True, False)
    compile_all(kinds)
    even = EvenProducts(torch.cuda.get_device_properties(DEVICE).multi_processor_count, DEVICE, pdl=True)
    results, best = [], {}
    for name in PRODUCTS:
        product, by_tokens = Product(name), {}
        for tokens in SWEPT_TOKENS:
            rows = product.measure(tokens, even, kinds)
            show(rows, product.shape.weights)
            results += rows
            right = [row for row in rows[1:] if row["error"] < 1e-2]
            by_tokens[tokens] = EvenTile(*min(right, key=lambda row: row["us"])["tile"])
        best[tuple(product.weights[0].shape)] = by_tokens
        del product
        torch.cuda.empty_cache()
    for model in MODELS:
        results += time_steps(model, EvenOps(even, best))
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""Products cut evenly on one GPU: `python benchmarks/gpu_even.py [--out FILE]`, about a minute.

First the products of Qwen3-8B and 0.6B in many tiles, with a norm as in a layer, beside what else there is. Then
decode steps of eight layers with and without those products that ``choose_tile`` has for them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
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
from radixserve.kernels.interface import Norm, norm_of_stream
from radixserve.kernels.triton_even import EvenProducts, EvenTile

BF16 = torch.bfloat16
PRODUCTS = [f"{model} {name}" for model in ("8B", "0.6B") for name in ("qkv", "o", "gate_up", "down")]
SWEPT_TOKENS = (16, 32, 64)  # up to 16 they are the same kernels
STEP_TOKENS = (2, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
LAYERS = 8
MODELS = {
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "tie_word_embeddings": False},
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "tie_word_embeddings": True},
}
TILES = [
    EvenTile(32, 256, 4),
    EvenTile(32, 256, 5),
    EvenTile(64, 128, 4),
    EvenTile(64, 128, 6),
    EvenTile(64, 128, 9),
    EvenTile(64, 256, 3),
    EvenTile(64, 256, 4),
    EvenTile(64, 256, 5),
    EvenTile(128, 128, 3),
    EvenTile(128, 128, 4),
]
SHARED_BYTES = 227 << 10


def tiles(shape: Shape, tokens: int) -> list[EvenTile]:
    """That fit into shared memory."""
    rows = max(16, 1 << (tokens - 1).bit_length())
    wide = 2 if shape.gated else 1
    return [
        tile
        for tile in TILES
        if 2 * tile.stages * tile.depth * (wide * tile.columns + rows) + 4 * tile.columns * rows + 2048 <= SHARED_BYTES
        and tile.columns * rows * wide <= 8192
    ]


class Warmup:
    """Compiles one kernel in a process of its own; what ``precompile`` calls."""

    @staticmethod
    def warmup(gated: bool, tokens: int, tile: tuple[int, ...], grid: Any) -> None:
        cut = EvenTile(*tile)
        x = torch.empty(tokens, cut.depth, device=DEVICE, dtype=BF16)
        weight = torch.empty(cut.columns * (2 if gated else 1), cut.depth, device=DEVICE, dtype=BF16)
        EvenProducts(1, DEVICE).linear(x, weight, cut, gated=gated)
        torch.cuda.synchronize()


def compile_all() -> None:
    # Those of other sizes are the same kernels.
    shapes = [SHAPES["8B qkv"], SHAPES["8B gate_up"]]
    cases = [
        (shape.gated, tokens, tuple(tile))
        for shape, tokens in itertools.product(shapes, SWEPT_TOKENS)
        for tile in tiles(shape, tokens)
    ]
    precompile([("gpu_even", Warmup.__name__, case, {}) for case in cases])


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

    def measure(self, tokens: int, even: EvenProducts) -> list[Result]:
        """What there is without ``even``, then its tiles."""
        shape = self.shape
        x, stream = (torch.randn(tokens, width, device=DEVICE, dtype=BF16) for width in (shape.k, shape.n))
        reference = x.float() @ self.weights[-1].float().T
        if shape.gated:
            reference = F.silu(reference[:, : shape.n]) * reference[:, shape.n :]
        case = f"{self.name}, {tokens} tokens"
        rows = [{"case": case, "us": self.time_others(x, stream), "tile": None, "error": 0.0}]
        for tile in tiles(shape, tokens):
            multiply = partial(even.linear, tile=tile, gated=shape.gated)
            error = relative_error(multiply(x, self.weights[-1]), reference)
            rows.append({"case": case, "us": self.time(x, stream, multiply), "tile": list(tile), "error": error})
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

    def time_others(self, x: Tensor, stream: Tensor) -> float:
        ops, shape = CudaOps(pdl=True), self.shape

        def body() -> None:
            for weight in self.weights:
                if shape.add:
                    norm_of_stream(ops, *ops.add_linear(stream, x, weight), self.norm)
                else:
                    ops.project(x, None, self.norm, weight, None, gated=shape.gated)

        return graph_us(body, len(self.weights))


def time_steps(model: str, tokens: int, even: EvenProducts) -> Result:
    config = {"num_hidden_layers": LAYERS, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936}
    row: Result = {"case": f"{model}, {LAYERS} layers, {tokens} sequences of 256 tokens"}
    logits = []
    for name, ops in (("without", CudaOps(pdl=True)), ("with", CudaOps(pdl=True, even=even))):
        step = DecodeStep({**config, **MODELS[model]}, tokens, 256, True, True)
        step.ops = ops
        graph = capture(step.run)
        step.last_tokens.zero_()
        graph.replay()
        logits.append(step.logits.clone())
        row |= {name: statistics.median(replay_us(graph, 20)), "floor": step.floor_us()}
        del step, graph
    row["error"] = relative_error(logits[1], logits[0])
    change = row["with"] / row["without"] - 1
    print(
        f"{row['case']}: {row['without']:.0f} us without, {row['with']:.0f} with ({change:+.1%}), "
        f"floor {row['floor']:.0f}, logits off by {row['error']:.1e}",
        flush=True,
    )
    return row


def show(rows: list[Result], weights: int) -> None:
    """What else there is, the four fastest, and anything that is wrong."""
    others, *cut = rows
    print(f"{others['case']}: {others['us']:.2f} us without, floor {2 * weights / BYTES_PER_US:.2f}", flush=True)
    ranked = sorted(cut, key=lambda row: row["us"])
    for row in ranked[:4] + [row for row in ranked[4:] if not row["error"] < 1e-2]:
        print(f"    {row['us']:.2f} us, error {row['error']:.1e}, {row['tile']}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    compile_all()
    even = EvenProducts(torch.cuda.get_device_properties(DEVICE).multi_processor_count, DEVICE)
    results = []
    for name in PRODUCTS:
        case = Product(name)
        for tokens in SWEPT_TOKENS:
            rows = case.measure(tokens, even)
            show(rows, case.shape.weights)
            results += rows
        del case
        torch.cuda.empty_cache()
    results += [time_steps(model, tokens, even) for model, tokens in itertools.product(MODELS, STEP_TOKENS)]
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

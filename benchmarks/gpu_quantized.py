"""Products with quantized weights on one GPU: `python benchmarks/gpu_quantized.py [--out FILE]`.

Each way of multiplying (``kernels/quantized.py``) for the matrices of Qwen3-8B and several numbers of tokens, beside
the bf16 product, in graph replays over more data than the L2 cache holds. The floor: weights read once.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import BYTES_PER_US, DEVICE, graph_us, relative_error
from torch import Tensor

from radixserve.kernels.cuda_ops import CudaOps
from radixserve.kernels.quantized import Form, QuantizedMatrix, choose_product, quantize
from radixserve.kernels.triton_linear import Tile
from radixserve.kernels.triton_quantized import dequantize, narrow_linear, scaled_linear
from radixserve.kernels.triton_quantized_vector import vector_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
FORMS = (Form(8, None), Form(8, 128), Form(4, 128))
TOKENS = (1, 2, 8, 16, 32, 64, 128, 256, 1024, 4096)
L2_BYTES = 60e6
TILES = {
    16: [Tile(16, 16, 512, 4, 2), Tile(16, 16, 256, 4, 2), Tile(16, 32, 256, 3, 2), Tile(16, 64, 128, 4, 4)],
    32: [Tile(32, 16, 256, 4, 2), Tile(32, 32, 128, 4, 2), Tile(32, 64, 128, 4, 4)],
    64: [Tile(64, 32, 128, 4, 2), Tile(64, 32, 128, 4, 4), Tile(64, 64, 128, 4, 8)],
}

Multiply = Callable[[Tensor, QuantizedMatrix], Tensor]


def candidates(tokens: int, form: Form, ops: CudaOps) -> dict[str, Multiply]:
    ways: dict[str, Multiply] = {"wide": lambda x, matrix: ops.linear(x, dequantize(matrix, x.dtype))}
    if tokens == 1:
        ways["vector"] = vector_linear
    if tokens <= 128:
        ways["narrow"] = partial(narrow_linear, bias=None, pdl=True)
        for tile in TILES[max(16, min(64, 1 << (tokens - 1).bit_length()))]:
            ways[f"narrow {'x'.join(map(str, tile))}"] = partial(narrow_linear, bias=None, pdl=True, tile=tile)
    if form.bits == 8:
        ways["scaled"] = partial(scaled_linear, bias=None, pdl=True)
    return ways


def measure(name: str, form: Form) -> list[dict[str, Any]]:
    n, k = SHAPES[name]
    ops = CudaOps(pdl=True, multiplies_fp8=True)
    copies = 2 + int(3 * L2_BYTES / (n * k * form.bits / 8))
    matrices = [quantize(torch.randn(n, k, device=DEVICE), form) for _ in range(copies)]
    wide = [matrix.dequantized(torch.bfloat16) for matrix in matrices]
    results = []
    for tokens in TOKENS:
        x = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
        exact = x.float() @ matrices[0].dequantized(torch.float32).T
        chosen = choose_product(tokens, form, (n, k), has_scaled=True).value
        row: dict[str, Any] = {
            "matrix": name,
            "bits": form.bits,
            "group": form.group,
            "tokens": tokens,
            "chosen": chosen,
        }
        row["bf16"] = _time(partial(ops.linear, x), wide)
        for way, multiply in candidates(tokens, form, ops).items():
            row[way] = _time(partial(multiply, x), matrices)
            row[f"{way} error"] = relative_error(multiply(x, matrices[0]), exact)
        row["floor"] = n * k * form.bits / 8 / BYTES_PER_US
        results.append(row)
        ways = ", ".join(f"{way} {row[way]:.1f}" for way in ("bf16", *candidates(tokens, form, ops)))
        worst = max(value for key, value in row.items() if key.endswith("error"))
        print(
            f"{name} {form.bits}/{form.group} {tokens}: {ways}, floor {row['floor']:.1f}; {chosen}; error {worst:.1e}",
            flush=True,
        )
    return results


def _time(multiply: Callable[[Any], Tensor], weights: Sequence[Any]) -> float:
    """Microseconds of one of the products."""

    def body() -> None:
        for weight in weights:
            multiply(weight)

    return graph_us(body, len(weights))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = [row for form in FORMS for name in SHAPES for row in measure(name, form)]
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

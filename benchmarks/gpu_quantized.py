"""Products with quantized weights on one GPU: `python benchmarks/gpu_quantized.py [--out FILE]`.

Each way of multiplying (``kernels/quantized.py``), and the tiles that it might have, for the matrices of Qwen3-8B and
several numbers of tokens, beside the bf16 product, in graph replays over more data than the L2 cache holds. The floor:
weights read once, or all multiplied, whichever takes longer. It ends with the sums over the four matrices.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import BYTES_PER_US, DEVICE, graph_us, relative_error
from torch import Tensor

from radixserve.kernels.cuda_ops import CudaOps
from radixserve.kernels.quantized import Form, Product, QuantizedMatrix, choose_product, quantize
from radixserve.kernels.triton_linear import Tile
from radixserve.kernels.triton_quantized import dequantize, narrow_linear
from radixserve.kernels.triton_quantized_vector import vector_linear
from radixserve.kernels.triton_rounding import round_tokens
from radixserve.kernels.triton_scaled import multiply_scaled, scaled_linear

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
FORMS = (Form(8, None), Form(8, 128, height=128), Form(4, 128))
TOKENS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192)
MORE_AT = (16, 64)  # tokens for which narrow products are tried with other tiles
L2_BYTES = 60e6
FLOP_PER_US = {8: 1576e6, 4: 788e6}  # of an H200: e4m3, and bf16

Multiply = Callable[[Tensor, QuantizedMatrix], Tensor]


def candidates(tokens: int, form: Form, ops: CudaOps) -> dict[str, Multiply]:
    ways: dict[str, Multiply] = {}
    if tokens in (64, 128, 256, 1024):
        ways["wide"] = lambda x, matrix: ops.linear(x, dequantize(matrix, x.dtype))
    if tokens == 1:
        ways["vector"] = vector_linear
        ways |= {f"vector {size}": partial(vector_linear, block_bytes=size) for size in (8192, 32768)}
    if tokens <= (256 if form.bits == 4 else 128):
        ways["narrow"] = partial(narrow_linear, bias=None, pdl=True)
        for tile, parts in narrow_tiles(tokens, form) if tokens in MORE_AT else ():
            name = f"narrow {'x'.join(map(str, tile))} in {parts or 'some'}"
            ways[name] = partial(narrow_linear, bias=None, pdl=True, tile=tile, parts=parts)
    return ways if form.bits == 4 else ways | scaled_candidates(tokens, form)


def scaled_candidates(tokens: int, form: Form) -> dict[str, Multiply]:
    ways: dict[str, Multiply] = {"scaled": partial(scaled_linear, bias=None, pdl=True)}
    if form.group is not None:
        ways |= {f"scaled {'x'.join(map(str, tile))}": partial(scaled, tile=tile) for tile in scaled_tiles(tokens)}
    if 16 <= tokens <= 512:
        ways |= {f"parts {parts}": partial(scaled, parts=parts) for parts in (1, 2, 4, 8)}
    return ways


def narrow_tiles(tokens: int, form: Form) -> list[tuple[Tile, int | None]]:
    """Of rows of weights and columns of tokens, and how many parts of the inner dimension."""
    columns = min(64, max(16, 1 << (tokens - 1).bit_length()))
    few, many = Tile(64, columns, 128, 4, 4), Tile(128, columns, 128, 4, 4)
    tiles: list[tuple[Tile, int | None]] = [(many if form.bits == 4 else few, parts) for parts in (2, 4, 8)]
    tiles += [(few if form.bits == 4 else many, None), (many._replace(stages=6 if columns < 64 else 3), None)]
    return tiles + [(many._replace(columns=32), None)] * (columns == 64)


def scaled_tiles(tokens: int) -> list[Tile]:
    """Of rows of tokens and columns of weights."""
    if tokens > 64:
        tiles = (64, 128, 128, 3, 4), (64, 128, 128, 4, 4), (128, 128, 128, 4, 8), (128, 64, 128, 4, 4)
        return [Tile(*sizes) for sizes in tiles]
    columns = max(16, 1 << (tokens - 1).bit_length())
    return [Tile(columns, 64, 128, 6, 4), Tile(columns, 128, 128, 4, 8), Tile(columns, 128, 128, 4, 4)]


def scaled(x: Tensor, matrix: QuantizedMatrix, tile: Tile | None = None, parts: int = 1) -> Tensor:
    narrow, scales = round_tokens(x, matrix.form.group, pdl=True)
    return multiply_scaled(narrow, scales, matrix, None, x.dtype, pdl=True, tile=tile, parts=parts)


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
        row: dict[str, Any] = {"matrix": name, "form": str(form), "tokens": tokens, "chosen": chosen}
        row["bf16"] = _time(partial(ops.linear, x), wide)
        ways, errors = candidates(tokens, form, ops), [0.0]
        for way, multiply in ways.items():
            try:
                product = multiply(x, matrices[0])
                errors.append(relative_error(product if product.dim() == 2 else product.float().sum(0), exact))
                row[way] = _time(partial(multiply, x), matrices)
            except Exception as error:  # a tile that does not fit is a result too
                print(f"{way}: {str(error)[:200]}")
        row["floor"] = max(n * k * form.bits / 8 / BYTES_PER_US, 2 * n * k * tokens / FLOP_PER_US[form.bits])
        results.append(row)
        told = ", ".join(f"{way} {row[way]:.1f}" for way in ("bf16", *ways, "floor") if way in row)
        print(f"{name} {form.bits}/{form.group} {tokens}: {told}; {chosen}; error {max(errors):.1e}", flush=True)
    return results


def _time(multiply: Callable[[Any], Tensor], weights: Sequence[Any]) -> float:
    """Microseconds of one of the products."""

    def body() -> None:
        for weight in weights:
            multiply(weight)

    return graph_us(body, len(weights))


def print_sums(results: list[dict[str, Any]]) -> None:
    """Microseconds of all matrices together, by form and tokens: bf16, what is chosen, each way, and the best of it."""
    for form in map(str, FORMS):
        for tokens in TOKENS:
            rows = [row for row in results if row["form"] == form and row["tokens"] == tokens]
            sums: dict[str, float] = defaultdict(float)
            for row in rows:
                for kind in ("bf16", "floor", "parts", *(product.value for product in Product)):
                    times = [us for way, us in row.items() if way.split()[0] == kind and isinstance(us, float)]
                    if times:
                        sums[kind] += row.get(kind, times[0])
                        sums[f"best {kind}"] += min(times)
            chosen = sum(row[row["chosen"]] for row in rows if row["chosen"] in row)
            told = ", ".join(f"{kind} {us:.1f}" for kind, us in sums.items() if kind not in ("best bf16", "best floor"))
            print(f"all of {form}, {tokens}: chosen {chosen:.1f}; {told}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    results = [row for form in FORMS for name in SHAPES for row in measure(name, form)]
    print_sums(results)
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

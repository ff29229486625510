"""Sweeps of the decode kernels on one GPU: `python benchmarks/gpu_kernels.py attention|linear [--out FILE]`."""

from __future__ import annotations

import argparse
import json
import types
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from gpu_timing import Job, graph_us, precompile, relative_error

from radixserve.kernels import triton_attention, triton_linear
from radixserve.kernels.triton_attention import TritonDecodeAttention

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
L2_BYTES = 60e6


class Attention:
    """One layer's decode over shuffled pages; rotates over several copies of the cache."""

    def __init__(self, q_heads: int, kv_lens: np.ndarray[Any, Any], page_size: int, seed: int = 0):
        kv_heads, dim = 8, 128
        rng = np.random.default_rng(seed)
        batch, columns = len(kv_lens), -(-int(kv_lens.max()) // page_size)
        num_pages = int((-(-kv_lens // page_size)).sum())
        table = np.zeros((batch, columns), np.int32)
        ids = rng.permutation(num_pages).astype(np.int32)
        for row, length in enumerate(kv_lens):
            count = -(-int(length) // page_size)
            table[row, :count], ids = ids[:count], ids[count:]
        self.bytes = float(kv_lens.sum()) * kv_heads * dim * 4
        copies = max(2, int(3 * L2_BYTES / (num_pages * page_size * kv_heads * dim * 4)) + 1)
        self.caches = [
            torch.randn(2, num_pages, page_size, kv_heads, dim, device=DEVICE, dtype=BF16) for _ in range(copies)
        ]
        self.q = torch.randn(batch, q_heads, dim, device=DEVICE, dtype=BF16)
        self.layout: Any = types.SimpleNamespace(
            kv_lens=torch.from_numpy(kv_lens.astype(np.int32)).to(DEVICE),
            rows=torch.arange(batch, dtype=torch.int32, device=DEVICE),
            page_table=torch.from_numpy(table).to(DEVICE),
            page_size=page_size,
        )
        self.lens = kv_lens

    def reference(self, cache: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(self.q)
        size = self.layout.page_size
        for s, length in enumerate(self.lens):
            slots = self.layout.page_table[s].long()[:, None] * size + torch.arange(size, device=DEVICE)
            k, v = cache.flatten(1, 2)[:, slots.flatten()[: int(length)]].float().transpose(1, 2)
            q = self.q[s].float()[:, None]
            out[s] = F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0, :, 0].to(BF16)
        return out


def attention_cases() -> list[tuple[str, int, np.ndarray[Any, Any], int]]:
    rng = np.random.default_rng(1)
    cases = []
    for heads in (16, 32):
        for batch, mean in ((1, 256), (1, 8000), (8, 900), (64, 900), (256, 900)):
            lens = rng.integers(int(0.6 * mean), int(1.4 * mean) + 1, batch)
            lens = np.array([mean]) if batch == 1 else lens
            cases += [(f"{heads}x{batch}x{mean}p16", heads, lens, 16)]
    wide = rng.integers(100, 1900, 256)
    return [*cases, ("16x256x1000w p16", 16, wide, 16), ("16x256x1000w p1", 16, wide, 1)]


# block tokens, stages, warps, blocks per SM, smallest slice in units
ATTENTION = [
    (32, 5, 2, 4, 2),
    (32, 5, 2, 8, 2),
    (32, 5, 2, 12, 2),
    (32, 5, 2, 16, 4),
    (32, 3, 2, 6, 2),
    (32, 3, 2, 12, 2),
    (16, 7, 1, 6, 2),
    (16, 5, 1, 8, 2),
    (64, 5, 4, 4, 4),
    (64, 5, 2, 3, 4),
]


def make_attention(case: Attention, config: tuple[int, ...], pdl: bool) -> TritonDecodeAttention:
    kernel = TritonDecodeAttention(case.q.shape[1], 8, 128, 256, DEVICE, pdl=pdl)
    kernel.block_tokens, kernel.num_stages, kernel.num_warps, kernel.blocks_per_sm, kernel.min_units = config
    kernel.allocate(DEVICE)
    return kernel


def attention_jobs() -> list[Job]:
    jobs: list[Job] = []
    ints, floats = torch.int32, torch.float32
    for group in (2, 4):
        for block, stages, warps, _, units in ATTENTION:
            for page in (16, 1) if group == 2 else (16,):
                args = (BF16, BF16, BF16, BF16, ints, ints, ints, ints, ints, floats, floats, ints, 256, 33, 80, 0.1)
                consts = {"KV_HEADS": 8, "GROUP": group, "GROUP_ROWS": group, "D": 128, "PAGE": page, "UNIT": 16}
                consts |= {
                    "MIN_UNITS": units,
                    "ROWS": 16,
                    "BLOCK": block,
                    "STAGES": stages,
                    "PARTS": 8,
                    "PREFETCH": True,
                }
                options = {**consts, "PDL": True, "num_warps": warps, "launch_pdl": True}
                jobs.append((triton_attention.__name__, "_decode", args, options))
    return jobs


def sweep_attention() -> list[dict[str, Any]]:
    precompile(attention_jobs())
    results = []
    for name, heads, lens, page_size in attention_cases():
        case = Attention(heads, lens, page_size)
        reference = case.reference(case.caches[0])
        for config in ATTENTION:
            kernel = make_attention(case, config, pdl=True)
            out = torch.full_like(case.q, float("nan"))

            def body(case: Attention = case, kernel: Any = kernel, out: Any = out) -> None:
                kernel.plan_decode(case.layout, len(case.lens))
                case.q.mul_(1)
                for _ in range(2):
                    for cache in reversed(case.caches):
                        kernel.run_decode(case.q, cache[0], cache[1], out)

            us = graph_us(body, 2 * len(case.caches))
            row = {"case": name, "config": config, "us": round(us, 1), "gbs": round(case.bytes / us / 1e3)}
            row["error"] = relative_error(out, reference)
            results.append(row)
        best = sorted((r for r in results if r["case"] == name), key=lambda r: r["us"])
        worst_error = max(r["error"] for r in best)
        print(name, *(f"{r['config']}:{r['us']}us/{r['gbs']}" for r in best[:5]), f"err {worst_error:.1e}")
    return results


# name: N, K, gated, norm, add
SHAPES = {
    "0.6B": {
        "qkv": (4096, 1024, False, False, False),
        "o": (1024, 2048, False, False, True),
        "gate_up": (3072, 1024, True, False, False),
        "down": (1024, 3072, False, False, True),
        "head": (151936, 1024, False, False, False),
    },
    "8B": {
        "qkv": (6144, 4096, False, True, False),
        "o": (4096, 4096, False, False, True),
        "gate_up": (12288, 4096, True, True, False),
        "head": (151936, 4096, False, False, False),
        "down": (4096, 12288, False, False, True),
    },
}


def gemv_configs(k: int, gated: bool) -> list[dict[str, int]]:
    width = min(triton.next_power_of_2(k), 4096)
    sizes = [s for s in (4096, 8192, 16384) if s >= width]
    return [
        {"BLOCK_N": max(1, size // width // (1 + gated)), "BLOCK_K": width, "num_warps": warps}
        for size in sizes
        for warps in (4, 8)
        if size // width // (1 + gated) >= 1
    ]


def matmul_configs(m: int, gated: bool) -> list[dict[str, int]]:
    if m <= 16:
        tiles = [
            *(() if gated else ((16, 8, 256), (16, 8, 512))),
            (16, 16, 256),
            (16, 16, 512),
            (16, 32, 128),
            (16, 32, 256),
            (16, 64, 128),
            (16, 128, 64),
        ]
    elif m <= 32:
        tiles = [
            (32, 16, 128),
            (32, 16, 256),
            (32, 32, 128),
            (32, 32, 256),
            (32, 64, 64),
            (32, 64, 128),
            (64, 16, 128),
            (64, 16, 256),
            (64, 32, 128),
        ]
    elif m <= 64:
        tiles = [
            (64, 16, 128),
            (64, 16, 256),
            (64, 32, 64),
            (64, 32, 128),
            (64, 32, 256),
            (64, 64, 64),
            (64, 64, 128),
            (64, 128, 64),
        ]
    else:
        tiles = [
            (64, 32, 128),
            (64, 64, 64),
            (64, 128, 64),
            (128, 32, 64),
            (128, 64, 64),
            (128, 128, 64),
            (128, 256, 64),
            (128, 64, 128),
            (128, 32, 128),
            (64, 64, 128),
        ]
    return [
        {"BLOCK_M": bm, "BLOCK_N": bn, "BLOCK_K": bk, "STAGES": stages, "num_warps": warps}
        for bm, bn, bk in tiles
        for stages in (3, 4)
        for warps in ((8,) if bm * bn >= 128 * 128 else (2, 4) if bm * bn <= 512 else (4,))
        if (bm + bn) * bk * 2 * stages < 200_000
    ]


def fused(kernel: str, shape: tuple[int, int, bool, bool, bool], m: int, config: dict[str, int], tensors: Any) -> Job:
    """Arguments and options of one launch; ``tensors``: x, weight, norm, add, out or their dtypes."""
    n, k, gated, norm, add = shape
    consts: dict[str, Any] = {
        "K": k,
        "NORM": norm,
        "GATED": gated,
        "ADD": add,
        "PDL": True,
        "launch_pdl": True,
        **config,
    }
    consts.pop("per_sm", None)
    x, weight, norm_weight, added, out = tensors
    args = (x, weight, norm_weight, added, out, 1e-6, n)
    if kernel == "_matmul":
        args = (x, weight, added, out, m, n, k)
        del consts["NORM"], consts["K"]
        consts["LINES"] = triton.next_power_of_2(k // 64)
        consts["BLOCK_N"] //= 1 + gated
    return triton_linear.__name__, kernel, args, consts


def candidates(k: int, gated: bool, m: int) -> list[tuple[str, dict[str, int]]]:
    gemv = [("_gemv", config) for config in gemv_configs(k, gated)] if m == 1 else []
    if m == 1 and k in (1024, 2048, 4096):
        gemv += [
            ("_gemv_rows", {"BLOCK_N": rows, "BLOCK_K": k, "STAGES": stages, "num_warps": warps, "per_sm": per_sm})
            for rows in (1, 2, 4)
            for stages in (3, 5)
            for warps in (4, 8)
            for per_sm in (2, 4, 6)
            if rows * k <= 8192 and not (gated and rows > 2)
        ]
    if m == 1:
        return gemv
    return gemv + [("_matmul", config) for config in matmul_configs(m, gated)]


BATCHES = (1,)


def linear_jobs(models: list[str]) -> list[Job]:
    dtypes = (BF16, BF16, BF16, BF16, BF16)
    seen: dict[str, Job] = {}
    for model in models:
        for shape in SHAPES[model].values():
            for m in BATCHES:
                for kernel, config in candidates(shape[1], shape[2], m):
                    job = fused(kernel, shape, m, config, dtypes)
                    seen[repr((job[1], m == 1, m % 16 == 0, job[3]))] = job
    return list(seen.values())


def sweep_linear(models: list[str]) -> list[dict[str, Any]]:
    precompile(linear_jobs(models))
    results: list[dict[str, Any]] = []
    for model in models:
        for name, shape in SHAPES[model].items():
            results += sweep_shape(f"{model} {name}", shape)
    return results


def sweep_shape(name: str, shape: tuple[int, int, bool, bool, bool]) -> list[dict[str, Any]]:
    n, k, gated, norm, add = shape
    rows = n * (1 + gated)
    copies = max(2, min(28, int(4 * L2_BYTES / (rows * k * 2)) + 1))
    weights = [torch.randn(rows, k, device=DEVICE, dtype=BF16) / k**0.5 for _ in range(copies)]
    norm_weight = torch.randn(k, device=DEVICE, dtype=BF16)
    results: list[dict[str, Any]] = []
    for m in BATCHES:
        x = torch.randn(m, k, device=DEVICE, dtype=BF16)
        added = torch.randn(m, n, device=DEVICE, dtype=BF16)
        out = torch.empty(m, n, device=DEVICE, dtype=BF16)

        def plain(x: Any = x, added: Any = added, out: Any = out) -> None:
            for weight in weights:
                F.linear(x, weight)

        cublas = graph_us(plain, copies)
        normed = F.rms_norm(x.float(), (k,), norm_weight.float(), 1e-6) if norm else x.float()
        reference = F.linear(normed, weights[-1].float())
        reference = F.silu(reference[:, :n]) * reference[:, n:] if gated else reference
        reference = reference + added.float() if add else reference
        trials = []
        for kernel, config in candidates(k, gated, m):
            try:
                out.fill_(float("nan"))

                def body(
                    kernel: str = kernel, config: Any = config, x: Any = x, added: Any = added, out: Any = out
                ) -> None:
                    for weight in weights:
                        _, _, args, options = fused(kernel, shape, m, config, (x, weight, norm_weight, added, out))
                        block_m, block_n = options.get("BLOCK_M", 1), options["BLOCK_N"]
                        grid = (
                            (triton.cdiv(n, block_n),)
                            if kernel == "_gemv"
                            else (132 * config["per_sm"],)
                            if kernel == "_gemv_rows"
                            else (triton.cdiv(m, block_m), triton.cdiv(n, block_n))
                        )
                        getattr(triton_linear, kernel)[grid](*args, **options)

                us = graph_us(body, copies)
            except Exception as error:
                print(name, m, kernel, config, str(error)[:150])
                continue
            trials.append(
                {"us": round(us, 2), "kernel": kernel, "config": config, "error": relative_error(out, reference)}
            )
        trials.sort(key=lambda t: t["us"])
        for trial in trials:
            if not trial["error"] < 1e-2:
                print("WRONG", name, m, trial)
        show = " | ".join(f"{t['us']} {t['kernel']} {[*t['config'].values()]}" for t in trials[:3])
        print(f"{name} M={m} floor {rows * k * 2 / 4.29e6:.1f} cublas {cublas:.2f}: {show}", flush=True)
        results.append({"shape": name, "m": m, "cublas": cublas, "trials": trials})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("attention", "linear"))
    parser.add_argument("--models", nargs="+", default=["0.6B", "8B"])
    parser.add_argument("--out", default="")
    options = parser.parse_args()
    results = sweep_attention() if options.what == "attention" else sweep_linear(options.models)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()

"""One decode step of a Qwen3-shaped model with random weights in a CUDA graph: milliseconds, floor and breakdown.

`python benchmarks/gpu_decode_step.py CONFIG.json [--batches 1 8 64 256] [--context 600] [--profile]`
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import BYTES_PER_US, DEVICE, capture, decode_layout, relative_error, replay_us
from torch import Tensor

from radixserve.kernels.cuda_ops import CudaOps
from radixserve.kernels.interface import AttentionShape, HeadPlaces, Norm, norm_of_stream
from radixserve.kernels.triton_attention import TritonDecodeAttention
from radixserve.kernels.triton_even import EvenProducts
from radixserve.kernels.triton_ops import decode_inputs
from radixserve.kernels.triton_sampling import sample

BF16 = torch.bfloat16
PAGE_SIZE = 16
EPS = 1e-6
# Fused linear layers, programmatic dependent launch.
VARIANTS = {"fused": (True, True), "fused without PDL": (True, False), "plain": (False, True)}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16).mul_(0.02)


class Layer:
    def __init__(self, config: dict[str, Any], num_pages: int):
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.qkv, self.o = randn((heads + 2 * kv_heads) * dim, hidden), randn(hidden, heads * dim)
        self.gate_up, self.down = randn(2 * inner, hidden), randn(hidden, inner)
        self.norms = [Norm(torch.ones(hidden, device=DEVICE, dtype=BF16), EPS) for _ in range(2)]
        self.head_norms = [Norm(torch.ones(dim, device=DEVICE, dtype=BF16), EPS) for _ in range(2)]
        self.k_cache, self.v_cache = (randn(num_pages, PAGE_SIZE, kv_heads, dim) for _ in range(2))


class DecodeStep:
    """Weights, caches and static buffers; ``run`` is what a graph captures."""

    def __init__(self, config: dict[str, Any], batch: int, context: int, fused: bool, pdl: bool):
        torch.manual_seed(0)
        self.config, self.fused, self.batch, self.pdl = config, fused, batch, pdl
        multiprocessors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
        self.ops = CudaOps(pdl, even=EvenProducts(multiprocessors, DEVICE) if pdl else None)
        spread = torch.linspace(0.5, 1.5, batch)[torch.randperm(batch)] if batch > 1 else torch.ones(1)
        lens = (spread * context).int()
        columns = int(lens.max()) // PAGE_SIZE + 1
        table = torch.randperm(batch * columns).int().view(batch, columns)
        self.layout = decode_layout(lens.numpy(), table.numpy(), PAGE_SIZE)
        self.kv_tokens = int(lens.sum())
        self.layers = [Layer(config, batch * columns) for _ in range(config["num_hidden_layers"])]
        self.embedding = randn(config["vocab_size"], config["hidden_size"])
        self.head = self.embedding if config["tie_word_embeddings"] else randn(*self.embedding.shape)
        self.norm = Norm(torch.ones(config["hidden_size"], device=DEVICE, dtype=BF16), EPS)
        self.cos_sin = torch.rand(4096, config["head_dim"], device=DEVICE)
        self.last_tokens = torch.zeros(batch, dtype=torch.int64, device=DEVICE)
        self.floats = torch.tensor([[0.6 if batch > 1 else 0.0, 1.0, 0.0]] * batch, device=DEVICE)
        self.ints = torch.tensor([[row, config["vocab_size"]] for row in range(batch)], device=DEVICE)
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.attention = TritonDecodeAttention(
            AttentionShape(heads, kv_heads, dim, PAGE_SIZE, BF16), batch, DEVICE, pdl
        )

    def floor_us(self) -> float:
        """Each weight and each key and value read once."""
        weights = sum(t.numel() for layer in self.layers for t in (layer.qkv, layer.o, layer.gate_up, layer.down))
        kv = 2 * self.kv_tokens * self.layers[0].k_cache[0, 0].numel() * len(self.layers)
        return 2 * (weights + self.head.numel() + kv) / BYTES_PER_US

    def run(self) -> None:
        layout, ops = self.layout, self.ops
        ids, positions, slots = decode_inputs(
            layout.rows, layout.kv_lens, layout.page_table, self.last_tokens, PAGE_SIZE
        )
        self.attention.plan_decode(layout, self.batch)
        x, pending = F.embedding(ids, self.embedding), None
        for layer in self.layers:
            x, qkv = self.project(x, pending, layer.norms[0], layer.qkv, gated=False)
            x, pending = self.add(x, self.attend(layer, qkv, positions, slots), layer.o)
            x, inner = self.project(x, pending, layer.norms[1], layer.gate_up, gated=True)
            x, pending = self.add(x, inner, layer.down)
        normed, _ = norm_of_stream(ops, x, pending, self.norm)
        self.logits = ops.logits(normed, self.head)
        self.drawn = sample(
            self.logits, layout.rows, self.floats, self.ints, layout.kv_lens, self.last_tokens, self.pdl
        )

    def project(
        self, x: Tensor, pending: Tensor | None, norm: Norm, weight: Tensor, gated: bool
    ) -> tuple[Tensor, Tensor]:
        if self.fused:
            return self.ops.project(x, pending, norm, weight, None, gated=gated)
        normed, x = norm_of_stream(self.ops, x, pending, norm)
        product = F.linear(normed, weight)
        return x, self.ops.silu_mul(product) if gated else product

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.ops.add_linear(x, y, weight) if self.fused else (x, F.linear(y, weight))

    def attend(self, layer: Layer, qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        caches = (layer.k_cache, layer.v_cache)
        q = self.ops.rope_store(qkv, HeadPlaces(positions, self.cos_sin, slots, *caches, *layer.head_norms))
        out = torch.empty_like(q)
        self.attention.run_decode(q, *caches, out)
        return out.flatten(1)


def breakdown(graph: torch.cuda.CUDAGraph) -> str:
    """Microseconds of device time by kernel name. Overlapped launches count twice where they overlap."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        graph.replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        times[event.name[:60]].append(event.device_time)
    ranked = sorted(times.items(), key=lambda item: -sum(item[1]))[:12]
    return "\n".join(f"  {sum(t):9.1f} us  {len(t):4d} x {statistics.median(t):7.2f}  {name}" for name, t in ranked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    for batch in options.batches:
        reference: Tensor | None = None
        for name, flags in VARIANTS.items():
            step = DecodeStep(config, batch, options.context, *flags)
            graph = capture(step.run)
            step.last_tokens.zero_()
            graph.replay()
            reference = step.logits.clone() if reference is None else reference
            error = relative_error(step.logits, reference)
            us = statistics.median(replay_us(graph, 20))
            floor = step.floor_us()
            share = f"floor {floor / 1e3:.3f} ms ({floor / us:.0%})"
            case = f"{options.config.stem} batch {batch} context {options.context} {name}"
            print(f"{case}: {us / 1e3:.3f} ms, {share}, logits off by {error:.1e}")
            assert not step.drawn[1].any()
            if options.profile:
                print(breakdown(graph), flush=True)
            del step, graph
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

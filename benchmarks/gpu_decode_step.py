"""One decode step of a Qwen3-shaped model with random weights in a CUDA graph: milliseconds, floor and breakdown.

`python benchmarks/gpu_decode_step.py CONFIG.json [--batches 1 8 64 256] [--context 600] [--profile]`
"""

from __future__ import annotations

import argparse
import json
import statistics
import types
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import capture, relative_error, replay_us
from torch import Tensor

from radixserve.kernels.triton_attention import TritonDecodeAttention
from radixserve.kernels.triton_linear import fused_linear, is_fused
from radixserve.kernels.triton_ops import rms_norm, rope_store, silu_mul
from radixserve.kernels.triton_sampling import sample

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
BYTES_PER_US = 4.29e6
PAGE_SIZE = 16
# fused, programmatic dependent launch, prefetch
VARIANTS = {
    "fused without PDL": (True, False, False),
    "fused": (True, True, True),
    "fused without prefetch": (True, True, False),
    "plain": (False, True, True),
}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=BF16).mul_(0.02)


class Layer:
    def __init__(self, config: dict[str, Any], num_pages: int):
        hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.qkv, self.o = randn((heads + 2 * kv_heads) * dim, hidden), randn(hidden, heads * dim)
        self.gate_up, self.down = randn(2 * inner, hidden), randn(hidden, inner)
        self.norms = [torch.ones(hidden, device=DEVICE, dtype=BF16) for _ in range(2)]
        self.q_norm, self.k_norm = (torch.ones(dim, device=DEVICE, dtype=BF16) for _ in range(2))
        self.k_cache, self.v_cache = (randn(num_pages, PAGE_SIZE, kv_heads, dim) for _ in range(2))


class DecodeStep:
    """Weights, caches and static buffers; ``run`` is what a graph captures."""

    def __init__(self, config: dict[str, Any], batch: int, context: int, fused: bool, pdl: bool, prefetch: bool):
        self.config, self.fused, self.batch, self.pdl = config, fused, batch, pdl
        num_parts = 1
        torch.manual_seed(0)
        spread = torch.linspace(0.5, 1.5, batch) if batch > 1 else torch.ones(1)
        lens = (spread[torch.randperm(batch)] * context).int()
        columns = int(lens.max()) // PAGE_SIZE + 1
        table = torch.randperm(batch * columns).int().view(batch, columns)
        self.layout: Any = types.SimpleNamespace(
            kv_lens=lens.to(DEVICE),
            rows=torch.arange(batch, dtype=torch.int32, device=DEVICE),
            page_table=table.to(DEVICE),
            page_size=PAGE_SIZE,
        )
        self.kv_tokens = int(lens.sum())
        self.layers = [Layer(config, batch * columns) for _ in range(config["num_hidden_layers"])]
        self.embedding = randn(config["vocab_size"], config["hidden_size"])
        self.head = self.embedding if config["tie_word_embeddings"] else randn(*self.embedding.shape)
        self.norm = torch.ones(config["hidden_size"], device=DEVICE, dtype=BF16)
        self.cos_sin = torch.rand(4096, config["head_dim"], device=DEVICE)
        self.last_tokens = torch.zeros(batch, dtype=torch.int32, device=DEVICE)
        self.temperatures = torch.full((batch,), 0.6 if batch > 1 else 0.0, device=DEVICE)
        self.seeds = torch.arange(batch, device=DEVICE)
        heads, kv_heads, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        self.parts = [
            types.SimpleNamespace(
                begin=batch * i // num_parts,
                end=batch * (i + 1) // num_parts,
                size=batch * (i + 1) // num_parts - batch * i // num_parts,
                stream=torch.cuda.Stream(),
                attention=TritonDecodeAttention(heads, kv_heads, dim, batch, DEVICE, pdl=pdl),
            )
            for i in range(num_parts)
        ]
        for part in self.parts:
            cut = slice(part.begin, part.end)
            part.attention.prefetch = prefetch
            part.layout = types.SimpleNamespace(
                kv_lens=self.layout.kv_lens[cut],
                rows=self.layout.rows[cut],
                page_table=self.layout.page_table,
                page_size=PAGE_SIZE,
            )

    def floor_us(self) -> float:
        weights = sum(t.numel() for layer in self.layers for t in (layer.qkv, layer.o, layer.gate_up, layer.down))
        kv = 2 * self.kv_tokens * self.layers[0].k_cache[0, 0].numel() * len(self.layers)
        return 2 * (weights + self.head.numel() + kv) / BYTES_PER_US

    def run(self) -> None:
        layout = self.layout
        positions = layout.kv_lens - 1
        pages = layout.page_table[layout.rows.long(), (positions // PAGE_SIZE).long()].long()
        slots = pages * PAGE_SIZE + positions % PAGE_SIZE
        for part in self.parts:
            part.attention.plan_decode(part.layout, part.size)
        hidden = F.embedding(self.last_tokens, self.embedding)
        normed = self.trunk(hidden, positions, slots)
        if self.fused and is_fused(self.batch, self.head):
            logits = fused_linear(normed, self.head, dtype=torch.float32, pdl=self.pdl)
        else:
            logits = torch.mm(normed, self.head.t(), out_dtype=torch.float32)
        self.logits = logits
        tokens, self.failed = sample(logits, self.temperatures, self.seeds, positions, self.pdl)
        self.last_tokens.copy_(tokens)

    def trunk(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        """All layers; each part of the batch on a stream of its own."""
        main = torch.cuda.current_stream()
        outs = []
        for part in self.parts:
            part.stream.wait_stream(main)
            with torch.cuda.stream(part.stream if len(self.parts) > 1 else main):
                x, pending = hidden[part.begin : part.end].clone(), None
                for layer in self.layers:
                    x, pending = self.layer(
                        part, layer, x, pending, positions[part.begin : part.end], slots[part.begin : part.end]
                    )
                outs.append(settle(x, pending, self.norm, self.pdl))
        for part in self.parts:
            main.wait_stream(part.stream)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def layer(
        self, part: Any, layer: Layer, x: Tensor, pending: Any, positions: Tensor, slots: Tensor
    ) -> tuple[Tensor, Any]:
        x, qkv = self.project(x, pending, layer.norms[0], layer.qkv, gated=False)
        x, pending = self.add(x, self.attend(part, layer, qkv, positions, slots), layer.o)
        x, inner = self.project(x, pending, layer.norms[1], layer.gate_up, gated=True)
        return self.add(x, inner, layer.down)

    def project(
        self, x: Tensor, pending: Tensor | None, norm: Tensor, weight: Tensor, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """Norm of the residual stream ``x`` (+ ``pending``) times ``weight``; returns the stream and the product."""
        fused = self.fused and is_fused(x.shape[0], weight)
        if fused and x.shape[0] == 1:
            return x, fused_linear(x, weight, norm=norm, eps=1e-6, gated=gated, pdl=self.pdl)
        normed = settle(x, pending, norm, self.pdl)
        if fused:
            return x, fused_linear(normed, weight, gated=gated, pdl=self.pdl)
        out = F.linear(normed, weight)
        return x, silu_mul(out, self.pdl) if gated else out

    def add(self, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Add y times ``weight`` to the stream, at once or by whoever reads it next."""
        if self.fused and is_fused(x.shape[0], weight):
            return fused_linear(y, weight, residual=x, pdl=self.pdl), None
        return x, F.linear(y, weight)

    def attend(self, part: Any, layer: Layer, qkv: Tensor, positions: Tensor, slots: Tensor) -> Tensor:
        caches = (layer.k_cache, layer.v_cache)
        q = rope_store(qkv, positions, self.cos_sin, slots, *caches, layer.q_norm, layer.k_norm, 1e-6, self.pdl)
        out = torch.empty_like(q)
        part.attention.run_decode(q, *caches, out)
        return out.flatten(1)


def settle(x: Tensor, pending: Tensor | None, norm: Tensor, pdl: bool) -> Tensor:
    """Add what is pending to the stream in place, and return its norm."""
    return rms_norm(x, norm, 1e-6, None, pdl) if pending is None else rms_norm(pending, norm, 1e-6, x, pdl)


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
            print(
                f"{options.config.stem} batch {batch} context {options.context} {name}: {us / 1e3:.3f} ms, {share} error {error:.1e}"
            )
            assert not step.failed.any()
            if options.profile:
                print(breakdown(graph), flush=True)
            del step, graph
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

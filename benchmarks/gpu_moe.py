"""Qwen3-30B-A3B's shape on one GPU beside its floor: `python benchmarks/gpu_moe.py engine|layer [--out FILE]`.

``engine``: W1 and W2, `radixserve bench offline` and `latency` with random weights. ``layer``: the experts of one layer
for several numbers of tokens, each candidate of tiles compared with plain torch. ``--tiny`` tries both out on a CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from gpu_timing import graph_us, relative_error
from torch import Tensor

from radixserve.engine.decoder import create_model
from radixserve.engine.layers.experts import Experts
from radixserve.engine.model_config import spec_from_config
from radixserve.engine.model_spec import ExpertsSpec, ModelSpec
from radixserve.kernels.select import select_ops

BYTES_PER_S = 4.29e12  # of an H200, and what it multiplies in bf16
FLOP_PER_S = 788e12
VALUE_BYTES = 2
TOKENS = (1, 4, 16, 17, 64, 256, 1024, 4096)
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "vocab_size": 10000, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip
TINY_FLAGS = ["--device=cpu", "--cpu-threads=1", "--num-pages=64", "--max-model-len=256"]

Result = dict[str, Any]


class Floor:
    """What a step must at least read, and a prompt compute: seconds from a model's shape."""

    def __init__(self, spec: ModelSpec):
        self._layers = [layer.experts for layer in spec.layers if layer.experts]
        model = create_model(spec, torch.bfloat16, torch.device("meta"), 1)
        whole = sum(weight.numel() for weight in model.parameters())
        experts = [module for module in model.modules() if isinstance(module, Experts)]
        in_experts = sum(weight.numel() for module in experts for weight in module.parameters())
        embedding = 0 if spec.tie_embeddings else spec.vocab_size * spec.hidden_size
        self._dense = whole - in_experts - embedding
        self._per_expert = in_experts // sum(layer.count for layer in self._layers)
        self._kv = 2 * spec.num_kv_heads * spec.head_dim * spec.num_layers

    def weight_bytes(self, tokens: float) -> float:
        """Read by a step of so many tokens, each of which chooses its experts evenly and by itself."""
        reached = sum(layer.count * (1 - (1 - layer.per_token / layer.count) ** tokens) for layer in self._layers)
        return VALUE_BYTES * (self._dense + reached * self._per_expert)

    def decode_s(self, sequences: int, kv_tokens: float) -> float:
        return (self.weight_bytes(sequences) + VALUE_BYTES * self._kv * kv_tokens) / BYTES_PER_S

    def prefill_s(self, tokens: int) -> float:
        """Two operations for each weight that a token is multiplied with; attention not counted."""
        active = self._dense + sum(layer.per_token for layer in self._layers) * self._per_expert
        return 2 * active * tokens / FLOP_PER_S

    def offline_s(self, prompt_lens: list[int], output_lens: list[int]) -> float:
        """All prompts first, then all decodes at once, until the last has ended."""
        seconds = self.prefill_s(sum(prompt_lens))
        for step in range(1, max(output_lens)):
            lens = [prompt + step for prompt, output in zip(prompt_lens, output_lens, strict=True) if output > step]
            seconds += self.decode_s(len(lens), sum(lens))
        return seconds


def in_a_process(arguments: list[str]) -> None:
    """Run ``radixserve``; no memory of it is left for the next one to miss."""
    subprocess.run([sys.executable, "-m", "radixserve.server.cli", *arguments], check=True)


def run_engine(tiny: bool, run: Callable[[list[str]], object]) -> Result:
    """W1 and W2; ``run`` runs the command ``radixserve``."""
    config = {**QWEN3_30B_A3B, **(TINY if tiny else {})}
    floor = Floor(spec_from_config(config))
    low, high, requests, length = (4, 8, 3, 6) if tiny else (100, 1024, 256, 257)
    rng = random.Random(0)  # as of `bench offline`
    prompt_lens, output_lens = ([rng.randint(low, high) for _ in range(requests)] for _ in range(2))
    flags = ["--load-format=dummy", *(TINY_FLAGS if tiny else [])]
    sizes = [f"--input-len={low}:{high}", f"--output-len={low}:{high}", f"--requests={requests}"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        path, flags = Path(folder) / "figures.json", [f"--model={folder}", f"--json={folder}/figures.json", *flags]
        run(["bench", "offline", *flags, *sizes])
        offline = json.loads(path.read_text())
        run(["bench", "latency", *flags, f"--output-len={length}"])
        latency = json.loads(path.read_text())
    assert offline["prompt_tokens"] == sum(prompt_lens) and offline["generated_tokens"] == sum(output_lens)
    w1_s = floor.offline_s(prompt_lens, output_lens)
    w2_ms = 1e3 * floor.decode_s(1, latency["prompt_tokens"] + length / 2)
    w1_rate = sum(output_lens) / w1_s
    print(f"W1: {max(offline['tokens_per_s']):,.0f} tokens/s; floor {w1_rate:,.0f}")
    print(f"W2: {latency['ms_per_token']:.3f} ms a token; floor {w2_ms:.3f}, {floor.weight_bytes(1) / 1e9:.2f} GB each")
    return {"offline": offline, "latency": latency, "floor_tokens_per_s": w1_rate, "floor_ms_per_token": w2_ms}


class LayerCase:
    """The experts of two layers with random weights, more than the L2 cache holds, and their router."""

    def __init__(self, hidden: int, experts: ExpertsSpec, device: torch.device):
        self.experts, self.device = experts, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        inner, count = experts.intermediate_size, experts.count
        self.hidden, self.router = hidden, self._randn(count, hidden)
        self.layers = [(self._randn(count, 2 * inner, hidden), self._randn(count, hidden, inner)) for _ in range(2)]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) / shape[-1] ** 0.5

    def measure(self, num_tokens: int) -> list[Result]:
        inputs = [torch.randn(num_tokens, self.hidden, device=self.device, dtype=self.dtype) for _ in range(4)]
        slots = torch.arange(num_tokens, device=self.device)
        per_token, normalized = self.experts.per_token, self.experts.normalized
        by_torch = select_ops(self.device, torch.float32)

        def plain(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
            return by_torch.experts(x, self.router.to(x.dtype), gate_up, down, per_token, normalized, slots)

        expected = plain(*(each.float() for each in (inputs[-1], *self.layers[-1])))
        floor_us = self._floor_us(inputs[-1])
        results = []
        for name, answer in {"torch": plain, **self._candidates(num_tokens, slots)}.items():
            found = answer(inputs[-1], *self.layers[-1])
            parts = found.float().sum(0) if found.dim() == 3 else found
            us = self._time(answer, inputs, captured=name != "torch")
            results.append({"case": f"{num_tokens} tokens", "config": name, "us": us, "floor_us": floor_us})
            results[-1]["error"] = relative_error(parts, expected)
        return results

    def _candidates(self, num_tokens: int, slots: Tensor) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
        """Ours with the tiles that it chooses, and with those of fewer and more tokens."""
        if self.device.type != "cuda":
            return {}
        from radixserve.kernels import triton_experts  # only where there is a GPU

        per_token, normalized, count = self.experts.per_token, self.experts.normalized, self.experts.count

        def with_tiles(tiles: triton_experts.Tiles) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
            def answer(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
                scores = torch.mm(x, self.router.t(), out_dtype=torch.float32)
                routing = triton_experts.route(scores, slots, per_token, normalized, tiles)
                return triton_experts.experts(x, gate_up, down, routing, tiles)

            return answer

        def tiles_for(tokens: int) -> triton_experts.Tiles:
            shared_bytes = torch.cuda.get_device_properties(self.device).shared_memory_per_multiprocessor
            return triton_experts.choose_tiles(tokens, per_token, count, shared_bytes)

        chosen, others = tiles_for(num_tokens), map(tiles_for, (1, 17, 256, 1024, 16384))
        fitting = {tiles for tiles in others if tiles.sorts or num_tokens <= tiles.gate_up.rows}
        if not chosen.sorts:
            fitting.add(replace(chosen, sorts=True))
        return {"chosen": with_tiles(chosen), **{str(asdict(tiles)): with_tiles(tiles) for tiles in fitting - {chosen}}}

    def _time(self, answer: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: list[Tensor], captured: bool) -> float:
        calls = [(x, *layer) for x in inputs for layer in self.layers]

        def body() -> None:
            for call in calls:
                answer(*call)

        if captured:
            return graph_us(body, len(calls))
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            body()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return 1e6 * statistics.median(seconds[1:]) / len(calls)

    def _floor_us(self, x: Tensor) -> float:
        """The experts that tokens choose read once, or all pairs multiplied, whichever takes longer."""
        chosen = (x.float() @ self.router.float().t()).topk(self.experts.per_token).indices
        weights_each = 3 * self.hidden * self.experts.intermediate_size
        read_s = VALUE_BYTES * weights_each * len(chosen.unique()) / BYTES_PER_S
        return 1e6 * max(read_s, 2 * weights_each * chosen.numel() / FLOP_PER_S)


def run_layer(tiny: bool) -> list[Result]:
    spec = spec_from_config({**QWEN3_30B_A3B, **(TINY if tiny else {})})
    experts = spec.layers[0].experts
    assert experts is not None
    torch.manual_seed(0)
    case = LayerCase(spec.hidden_size, experts, torch.device("cpu" if tiny else "cuda"))
    results = []
    for num_tokens in TOKENS[:3] if tiny else TOKENS:
        rows = sorted(case.measure(num_tokens), key=lambda row: float(row["us"]))
        results += rows
        for row in rows:
            print("{case}: {us:.1f} us, floor {floor_us:.1f}, error {error:.1e}, {config}".format(**row), flush=True)
    return results


def main(arguments: list[str] | None = None, run: Callable[[list[str]], object] = in_a_process) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("engine", "layer"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    results = run_engine(options.tiny, run) if options.what == "engine" else run_layer(options.tiny)
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

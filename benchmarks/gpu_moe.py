"""Qwen3-30B-A3B's shape on one GPU beside its floor: `python benchmarks/gpu_moe.py engine|layer [--out FILE]`.

``engine``: W1 and W2, `radixserve bench offline` and `latency` with random weights. ``layer``: the experts of one layer
for several numbers of tokens, the chosen tiles and the best three candidates, compared with plain torch; --out gets
all. ``--quantization fp8``: engine with `--quantization fp8`, layer with e4m3 weights by row and by blocks of 128
rows and columns; ``int4``: layer only. ``--tiny`` tries all out on a CPU.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_timing import graph_us, relative_error
from torch import Tensor

from radixserve.engine.decoder import create_model
from radixserve.engine.layers.experts import Experts, QuantizedExperts
from radixserve.engine.model_config import spec_from_config
from radixserve.engine.model_spec import ExpertsSpec, ModelSpec
from radixserve.engine.quantized_model import quantize_model
from radixserve.engine.weight_packing import model_bytes
from radixserve.kernels.quantized import Form, Stack, quantize
from radixserve.kernels.select import select_ops

BYTES_PER_S = 4.29e12  # of an H200, and what it multiplies in bf16
FLOP_PER_S = 788e12
VALUE_BYTES = 2  # of activations, keys and values
TOKENS = (1, 2, 4, 8, 16, 17, 64, 256, 1024, 4096)
QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
TINY = {
    "vocab_size": 10000, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 4,
    "num_experts_per_tok": 2, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": 512, "torch_dtype": "float32",
}  # fmt: skip
TINY_FLAGS = ["--device=cpu", "--cpu-threads=1", "--num-pages=64", "--max-model-len=256"]

# Candidates beside those of other numbers of tokens, for shares of 4 to 64 rows an expert: tiles of both products.
MORE_AT = (64, 256, 1024)
MORE = {
    16: (
        ((16, 32, 128, 4, 4), (16, 64, 128, 4, 4)), ((16, 64, 64, 4, 4), (16, 128, 64, 4, 4)),
        ((32, 32, 64, 5, 4), (32, 64, 64, 5, 4)), ((32, 64, 64, 4, 4), (32, 128, 64, 4, 4)),
        ((64, 64, 64, 3, 4), (64, 64, 64, 4, 4)),
    ),
    8: (
        ((16, 32, 128, 4, 2), (16, 64, 128, 4, 4)), ((16, 64, 128, 4, 4), (16, 128, 128, 4, 4)),
        ((32, 32, 128, 4, 4), (32, 64, 128, 4, 4)), ((32, 64, 128, 3, 8), (32, 128, 128, 3, 8)),
    ),
    4: (((16, 64, 128, 4, 4), (16, 64, 128, 4, 4)), ((32, 64, 128, 4, 4), (32, 128, 128, 4, 4))),
}  # fmt: skip

Result = dict[str, Any]


class Floor:
    """What a step must at least read, and a prompt compute: seconds from a model's shape."""

    def __init__(self, spec: ModelSpec, *, is_fp8: bool = False):
        self._layers = [layer.experts for layer in spec.layers if layer.experts]
        quantized = partial(quantize_model, form=Form(8, None)) if is_fp8 else None
        model = create_model(spec, torch.bfloat16, torch.device("meta"), 1, quantized)
        experts = [module for module in model.modules() if isinstance(module, Experts | QuantizedExperts)]
        embedding = 0 if spec.tie_embeddings else VALUE_BYTES * spec.vocab_size * spec.hidden_size
        in_experts = sum(map(model_bytes, experts))
        self._dense_bytes = model_bytes(model) - in_experts - embedding
        self._expert_bytes = in_experts / sum(layer.count for layer in self._layers)
        self._kv = 2 * spec.num_kv_heads * spec.head_dim * spec.num_layers
        self._value_bytes, self._flop_per_s = (1, 2 * FLOP_PER_S) if is_fp8 else (2, FLOP_PER_S)

    def weight_bytes(self, tokens: float) -> float:
        """Read by a step of so many tokens, each of which chooses its experts evenly and by itself."""
        reached = sum(layer.count * (1 - (1 - layer.per_token / layer.count) ** tokens) for layer in self._layers)
        return self._dense_bytes + reached * self._expert_bytes

    def decode_s(self, sequences: int, kv_tokens: float) -> float:
        return (self.weight_bytes(sequences) + VALUE_BYTES * self._kv * kv_tokens) / BYTES_PER_S

    def prefill_s(self, tokens: int) -> float:
        """Two operations for each weight that a token is multiplied with; attention not counted."""
        active_bytes = self._dense_bytes + sum(layer.per_token for layer in self._layers) * self._expert_bytes
        return 2 * active_bytes / self._value_bytes * tokens / self._flop_per_s

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


def run_engine(tiny: bool, quantization: str, run: Callable[[list[str]], object]) -> Result:
    """W1 and W2; ``run`` runs the command ``radixserve``."""
    config = {**QWEN3_30B_A3B, **(TINY if tiny else {})}
    floor = Floor(spec_from_config(config), is_fp8=quantization == "fp8")
    low, high, requests, length = (4, 8, 3, 6) if tiny else (100, 1024, 256, 257)
    rng = random.Random(0)  # as of `bench offline`
    prompt_lens, output_lens = ([rng.randint(low, high) for _ in range(requests)] for _ in range(2))
    flags = ["--load-format=dummy", f"--quantization={quantization}", *(TINY_FLAGS if tiny else [])]
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


def short(tiles: Any) -> str:
    """Of both products rows x columns x depth x stages x warps."""
    if tiles is None:
        return "pair by pair"
    products = "/".join("x".join(map(str, tile)) for tile in (tiles.gate_up, tiles.down))
    return " ".join([products, *["scaled"] * tiles.scaled, f"group {tiles.group}"])


class LayerCase:
    """The experts of two layers with random weights, more than the L2 cache holds, and their router. ``form``: of
    quantized weights."""

    def __init__(self, hidden: int, experts: ExpertsSpec, device: torch.device, form: Form | None):
        self.experts, self.device, self.form = experts, device, form
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        inner, count = experts.intermediate_size, experts.count
        self.hidden, self.router = hidden, self._randn(count, hidden)
        shapes = (2 * inner, hidden), (hidden, inner)
        self.layers = [tuple(self._stack(count, *shape) for shape in shapes) for _ in range(2)]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype) / shape[-1] ** 0.5

    def _stack(self, *shape: int) -> Stack:
        values = self._randn(*shape)
        return values if self.form is None else quantize(values.flatten(0, 1), self.form)

    def measure(self, num_tokens: int) -> list[Result]:
        inputs = [torch.randn(num_tokens, self.hidden, device=self.device, dtype=self.dtype) for _ in range(4)]
        slots = torch.arange(num_tokens, device=self.device)
        per_token, normalized = self.experts.per_token, self.experts.normalized
        by_torch = select_ops(self.device, torch.float32)

        def plain(x: Tensor, gate_up: Stack, down: Stack) -> Tensor:
            return by_torch.experts(x, self.router.to(x.dtype), gate_up, down, per_token, normalized, slots)

        wide = (each.float() if isinstance(each, Tensor) else each for each in self.layers[-1])
        expected = plain(inputs[-1].float(), *wide)
        floor_us = self._floor_us(inputs[-1])
        results = []
        for name, answer in {"torch": plain, **self._candidates(num_tokens, slots)}.items():
            found = answer(inputs[-1], *self.layers[-1])
            parts = found.float().sum(0) if found.dim() == 3 else found
            us = self._time(answer, inputs, captured=name != "torch")
            case = f"{num_tokens} tokens" + (
                f", {self.form.bits} bits by {self.form.group or 'row'}" if self.form else ""
            )
            results.append({"case": case, "config": name, "us": us, "floor_us": floor_us})
            results[-1]["error"] = relative_error(parts, expected)
        return results

    def _candidates(self, num_tokens: int, slots: Tensor) -> dict[str, Callable[..., Tensor]]:
        """Ours with the tiles that it chooses, and with those of fewer and more tokens."""
        if self.device.type != "cuda":
            return {}
        from radixserve.kernels import triton_experts  # only where there is a GPU

        per_token, normalized, count = self.experts.per_token, self.experts.normalized, self.experts.count
        bits = 16 if self.form is None else self.form.bits

        def with_tiles(tiles: triton_experts.Tiles | None, x: Tensor, gate_up: Stack, down: Stack) -> Tensor:
            scores = torch.mm(x, self.router.t(), out_dtype=torch.float32)
            routing = triton_experts.route(scores, slots, per_token, normalized, tiles)
            return triton_experts.experts(x, gate_up, down, routing, tiles)

        def tiles_for(tokens: int, has_scaled: bool = True) -> triton_experts.Tiles | None:
            shared_bytes = torch.cuda.get_device_properties(self.device).shared_memory_per_multiprocessor
            return triton_experts.choose_tiles(tokens, per_token, count, shared_bytes, bits, has_scaled=has_scaled)

        chosen, others = tiles_for(num_tokens), [*map(tiles_for, (1, 16, 64, 256, 1024, 16384)), tiles_for(64, False)]
        if num_tokens in MORE_AT:
            tiles = [tuple(triton_experts.Tile(*sizes) for sizes in pair) for pair in MORE[bits]]
            others += [triton_experts.Tiles(*pair, group=group) for pair in tiles for group in (1, 4)]
        fitting = {tiles for tiles in others if tiles is not None or num_tokens <= 16}
        named = {short(tiles): partial(with_tiles, tiles) for tiles in fitting - {chosen}}
        return {f"chosen {short(chosen)}": partial(with_tiles, chosen), **named}

    def _time(self, answer: Callable[..., Tensor], inputs: list[Tensor], captured: bool) -> float:
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
        weight_bytes = 2.0 if self.form is None else self.form.bits / 8
        flop_per_s = 2 * FLOP_PER_S if weight_bytes == 1 else FLOP_PER_S
        read_s = weight_bytes * weights_each * len(chosen.unique()) / BYTES_PER_S
        return 1e6 * max(read_s, 2 * weights_each * chosen.numel() / flop_per_s)


def run_layer(tiny: bool, quantization: str) -> list[Result]:
    spec = spec_from_config({**QWEN3_30B_A3B, **(TINY if tiny else {})})
    experts = spec.layers[0].experts
    assert experts is not None
    forms: list[Form | None] = [None]
    if quantization == "fp8":
        forms = [Form(8, None), Form(8, 32) if tiny else Form(8, 128, height=128)]
    elif quantization == "int4":
        forms = [Form(4, 32 if tiny else 128)]
    results = []
    for form in forms:
        torch.manual_seed(0)
        case = LayerCase(spec.hidden_size, experts, torch.device("cpu" if tiny else "cuda"), form)
        for num_tokens in TOKENS[:3] if tiny else TOKENS:
            rows = case.measure(num_tokens)
            results += rows
            print_best(rows)
    return results


def print_best(rows: list[Result]) -> None:
    """What was chosen, if anything was, and the best three."""
    ranked = sorted(rows, key=lambda row: float(row["us"]))
    kept = [row for row in ranked if row in ranked[:3] or row["config"].startswith("chosen")]
    print("{case}: floor {floor_us:.1f} us".format(**rows[0]))
    for row in kept:
        print("  {us:8.1f} us, error {error:.0e}, {config}".format(**row), flush=True)


def main(arguments: list[str] | None = None, run: Callable[[list[str]], object] = in_a_process) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("engine", "layer"))
    parser.add_argument("--quantization", choices=("auto", "fp8", "int4"), default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.what == "engine" and options.quantization == "int4":
        parser.error("the engine does not round to int4 itself")
    if options.what == "engine":
        results: Any = run_engine(options.tiny, options.quantization, run)
    else:
        results = run_layer(options.tiny, options.quantization)
    if options.out:
        options.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()

"""Mixtures of experts through the whole engine, as in transformers, and the benchmark of their kernels."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from radixserve.engine.errors import ModelError
from radixserve.engine.llm import LLM, Completion
from radixserve.engine.model_config import spec_from_config
from radixserve.engine.sampling_params import SamplingParams
from radixserve.server.cli import main
from radixserve.tests.engine import tiny_models

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NUM_TOKENS = 6
RULES = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


# The second one does not make the weights of a token's experts sum up to 1, and has a layer without experts.
@pytest.mark.parametrize("variant", ["qwen3moe", "qwen3moe-mixed"])
def test_answers_equal_transformers_however_prompts_are_cut_and_cached(variant: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant)
    assert oracle.config.norm_topk_prob is (variant == "qwen3moe")
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "page_size": 4}
    with LLM(str(tiny_models.save(oracle, tmp_path)), **options, num_pages=512, max_num_batched_tokens=48) as llm:
        cold = llm.generate(tiny_models.PROMPTS, RULES)
        warm = llm.generate(tiny_models.PROMPTS[::-1], RULES)
    for completion in cold:
        _check(completion, oracle)
    assert [one.token_ids for one in warm[::-1]] == [one.token_ids for one in cold]
    assert all(one.cached_tokens >= len(one.prompt_token_ids) - 8 for one in warm)
    for completion in warm:
        _check(completion, oracle)


def _check(completion: Completion, oracle: Any) -> None:
    assert len(completion.token_ids) == NUM_TOKENS, completion.error
    logits = tiny_models.logits(oracle, completion.prompt_token_ids + completion.token_ids)[-NUM_TOKENS - 1 : -1]
    assert completion.token_ids == logits.argmax(-1).tolist()
    found = [entry.logprob for entry in completion.logprobs]
    assert found == pytest.approx(logits.log_softmax(-1).amax(-1).tolist(), abs=1e-4)


@pytest.mark.parametrize("key", ["shared_expert_intermediate_size", "n_shared_experts"])
def test_experts_that_all_tokens_share_are_refused_by_name(key: str) -> None:
    config = tiny_models.make("qwen3moe").config.to_dict()
    with pytest.raises(ModelError, match=f"{key} is not supported"):
        spec_from_config({**config, "architectures": ["Qwen3MoeForCausalLM"], key: 2})


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("gpu_moe", BENCHMARKS / "gpu_moe.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_moe", module)
    spec.loader.exec_module(module)
    return module


def test_the_floor_of_a_step_is_the_weights_that_its_tokens_reach(benchmark: Any) -> None:
    floor = benchmark.Floor(spec_from_config(benchmark.QWEN3_30B_A3B))
    attention = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128 + 2 * 2048
    dense, expert = 48 * (attention + 128 * 2048) + 151936 * 2048 + 2048, 3 * 768 * 2048
    assert floor.weight_bytes(1) == pytest.approx(2 * (dense + 48 * 8 * expert))
    assert floor.weight_bytes(10_000) == pytest.approx(2 * (dense + 48 * 128 * expert))
    narrow = benchmark.Floor(spec_from_config(benchmark.QWEN3_30B_A3B), is_fp8=True)
    kept = 48 * 128 * 2048 + 151936 * 2048  # routers and the head
    assert narrow.weight_bytes(10_000) == pytest.approx(dense + kept + 48 * 128 * expert, rel=0.01)


@pytest.mark.parametrize(("what", "quantization"), [("engine", "auto"), ("engine", "fp8"), ("layer", "auto")])
def test_the_benchmark_of_mixtures_runs_without_a_gpu(
    benchmark: Any, what: str, quantization: str, tmp_path: Path
) -> None:
    benchmark.main([what, "--tiny", f"--quantization={quantization}", f"--out={tmp_path / 'out.json'}"], main)
    found = json.loads((tmp_path / "out.json").read_text())
    if what == "engine":
        assert found["offline"]["tokens_per_s"][0] < found["floor_tokens_per_s"]
        assert found["latency"]["ms_per_token"] > found["floor_ms_per_token"] > 0
    else:
        assert [row["case"] for row in found] == ["1 tokens", "2 tokens", "4 tokens"]
        assert all(row["error"] < 1e-5 and row["us"] > row["floor_us"] > 0 for row in found)

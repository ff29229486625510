"""An fp8 KV cache: nothing is cut off, the error is small, twice the tokens fit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve.configs.schema import ServeConfig
from radixserve.engine.build import build_engine
from radixserve.engine.errors import ConfigError
from radixserve.engine.kv_scales import scale_kv
from radixserve.engine.llm import LLM
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.sizing import choose_kv_dtype
from radixserve.kvcache.mha import KVShape
from radixserve.tests.engine import tiny_models
from radixserve.tests.engine.quantized_checkpoints import gptq_in_another_order, save_quantized
from radixserve.tests.engine.test_models import Paged

IDS = tiny_models.random_ids(90, seed=7)
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}


def logits(model: Paged) -> torch.Tensor:
    """A chunk and what follows it."""
    return torch.cat((model.logits([], [(0, IDS[:50], 0)])[0], model.logits([], [(0, IDS[50:], 50)])[0]))


def largest_stored(model: Paged) -> float:
    pairs = (torch.stack(layers).nan_to_num().abs().amax() for layers in (model.k, model.v))
    return float(max(pairs))


@pytest.mark.parametrize("variant", ["llama-bias", "qwen2", "qwen3", "gemma2", "gemma3", "phi3-long", "qwen3-yarn"])
def test_factors_in_the_weights_change_no_result_and_bound_what_is_stored(variant: str, tmp_path: Path) -> None:
    oracle = tiny_models.make(variant)
    with torch.no_grad():
        for name, bias in oracle.named_parameters():
            if name.endswith(("k_proj.bias", "k_norm.weight")):
                bias.mul_(3000)  # as some models have it, if not quite so large
            if name.endswith("q_norm.weight"):
                bias.div_(3000)
    model = Paged(tiny_models.save(oracle, tmp_path))
    before = logits(model)
    scale_kv(model.model)
    torch.testing.assert_close(logits(model), before, atol=1e-6, rtol=1e-6)
    assert 8 < largest_stored(model) < 448


def test_factors_go_into_the_scales_of_quantized_weights(tmp_path: Path) -> None:
    save_quantized("qwen2", tmp_path, gptq_in_another_order, GPTQ)
    model = Paged(tmp_path)
    before = logits(model)
    scale_kv(model.model)
    torch.testing.assert_close(logits(model), before, atol=1e-6, rtol=1e-6)
    assert 8 < largest_stored(model) < 448


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.make("qwen3"), tmp_path_factory.mktemp("tiny"))


def logprobs(folder: Path, **options: Any) -> torch.Tensor:
    """Of the tokens of a prompt computed in chunks, and of the best ones behind it, which are decoded."""
    fixed = {"device": "cpu", "cpu_threads": 1, "cpu_weights": "fp32", "num_pages": 64, "max_num_batched_tokens": 32}
    with LLM(str(folder), max_model_len=256, **fixed, **options) as llm:
        rules = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, logprobs=1)
        (answer,) = llm.generate([IDS], rules)
    assert answer.prompt_logprobs is not None
    return torch.tensor([entry.logprob for entry in answer.prompt_logprobs if entry is not None])


def test_the_error_is_small_and_not_zero(folder: Path) -> None:
    exact, narrow = logprobs(folder), logprobs(folder, kv_cache_dtype="fp8")
    assert 0 < float((exact - narrow).abs().mean()) < 0.1 * float(exact.std())


def test_steps_of_any_cut_give_the_same_answers(folder: Path) -> None:
    """Also what lies in the cache from before."""
    options = {"device": "cpu", "cpu_threads": 1, "cpu_weights": "fp32", "num_pages": 256, "kv_cache_dtype": "fp8"}
    rules = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(folder), max_model_len=256, max_num_batched_tokens=48, **options) as llm:
        first = [answer.token_ids for answer in llm.generate(tiny_models.PROMPTS, rules)]
        again = [llm.generate(prompt, rules)[0].token_ids for prompt in tiny_models.PROMPTS]
    assert first == again


def test_twice_the_tokens_fit_and_the_start_up_block_says_so(folder: Path) -> None:
    dtype = choose_kv_dtype(ServeConfig(kv_cache_dtype="fp8"), torch.bfloat16)
    assert 2 * KVShape(3, 16, 2, 32, dtype).page_bytes == KVShape(3, 16, 2, 32, torch.bfloat16).page_bytes
    config = ServeConfig(model=str(folder), device="cpu", cpu_weights="fp32", kv_cache_dtype="fp8", num_pages=64)
    assert "KV cache of 1,024 tokens in fp8 (64 pages of 16)" in build_engine(config).description


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float16"}, "dtype float16.*bfloat16"),
        ({}, "native CPU kernels.*fp32"),
        ({"attention_backend": "flashinfer"}, "flashinfer.*--attention-backend auto"),
    ],
)
def test_what_an_fp8_cache_does_not_go_with_is_named(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_dtype fp8 does not go with .*{message}"):
        build_engine(ServeConfig(model=str(folder), device="cpu", kv_cache_dtype="fp8", num_pages=64, **options))

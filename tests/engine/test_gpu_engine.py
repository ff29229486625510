"""The whole engine on a CUDA device against transformers: graphs, mixed steps, caching and cutting change no answer.

bf16 on the device and fp32 in transformers round differently, so a token counts as right when transformers' logit for
it is at most ``TIE`` standard deviations of the logits below the best one; nearly all must be the best one itself.
"""

from __future__ import annotations

import faulthandler
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from radixserve.configs.schema import DEFAULT_MODEL
from radixserve.engine.errors import ModelError
from radixserve.engine.llm import LLM, Completion
from radixserve.engine.model_files import resolve_model
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.structured import regex, structural_tag
from radixserve.kernels.interface import AttentionShape
from radixserve.kernels.select import select_attention
from radixserve.kernels.shared_prefix import PrefixGroups
from radixserve.tests.engine import tiny_models
from radixserve.tests.engine.oracle import load_default_model, recorded_answers
from radixserve.tests.engine.quantized_checkpoints import (
    BLOCK,
    Writer,
    awq,
    fp8_by_block,
    fp8_by_row,
    gptq_in_another_order,
    save_quantized,
)

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

TIE = 0.25
MOST = 0.9
NUM_TOKENS = 24
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 128,
    "initializer_range": 0.08,
}
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 4}
SMALL_HEADS: dict[str, Any] = {
    "hidden_size": 576,
    "head_dim": 64,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


class Model:
    """A model as the engine finds it by name, and transformers' view of its bf16 weights."""

    def __init__(self, name: str, oracle: Any):
        self.name, self.oracle = name, oracle
        for parameter in oracle.parameters():  # and not the buffers: the angles of RoPE stay exact
            parameter.data = parameter.data.bfloat16().float()

    @classmethod
    def random(cls, variant: str, folder: Path, **sizes: Any) -> Model:
        model = cls(str(folder), tiny_models.make(variant, **{**SIZES, **sizes}))
        tiny_models.save(model.oracle, folder)
        return model

    def open(self, **options: Any) -> LLM:
        return LLM(self.name, **{"device": "cuda", "num_pages": 2048, "max_num_seqs": 12, **options})

    def check(self, completions: list[Completion], tie: float = TIE) -> None:
        exact: list[torch.Tensor] = []
        for completion in completions:
            assert len(completion.token_ids) == NUM_TOKENS, completion.error
            ids = completion.prompt_token_ids + completion.token_ids
            logits = tiny_models.logits(self.oracle, ids)[-NUM_TOKENS - 1 : -1]
            chosen = logits.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            gaps = (logits.amax(1) - chosen) / logits.std(1)
            assert float(gaps.max()) < tie
            exact.append(gaps == 0)
        assert float(torch.cat(exact).float().mean()) > MOST


@pytest.fixture(scope="module", params=["llama", "qwen3", "llama-bias"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.random(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model.random("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def default_model() -> Model:
    """The real weights of the default model."""
    try:
        resolve_model(DEFAULT_MODEL)
    except ModelError as error:
        pytest.skip(str(error))
    return Model(DEFAULT_MODEL, load_default_model().cuda())


def greedy(**rules: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, **rules)


LOSES_THE_CONTEXT = """
import os, sys, torch
from radixserve import LLM, SamplingParams
from radixserve.engine.errors import EngineLost
llm = LLM(sys.argv[1], device="cuda", num_pages=64, max_num_seqs=2)
llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.long, device="cuda")]  # asserts on the device, later
try:
    llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
except EngineLost as error:
    print(error, flush=True)
os._exit(0)  # nothing can be given back
"""


def test_a_lost_context_ends_the_engine_with_the_first_step_that_meets_it(llama: Model) -> None:
    command = [sys.executable, "-c", LOSES_THE_CONTEXT, llama.name]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert "the CUDA context is lost" in found.stdout, found.stderr[-2000:]


def test_memory_that_was_set_aside_is_enough_for_a_full_step_with_every_rule(tmp_path: Path) -> None:
    """KV takes all the rest, and of 128,000 logits a row sampling takes more than everything else of this model."""
    sizes: dict[str, Any] = {"vocab_size": 128_000, "hidden_size": 64, "max_position_embeddings": 32_768}
    model = Model.random("llama", tmp_path, **sizes)
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 6 * 2**30) / total
    options = {"max_num_seqs": 512, "gpu_memory_utilization": share}
    with LLM(model.name, device="cuda", **options) as llm:
        torch.cuda.set_per_process_memory_fraction(share)
        try:
            done = llm.generate([[5, 6, 7]] * 512, greedy(frequency_penalty=0.5, logprobs=20))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert {completion.finish_reason for completion in done} == {"length"}, done[0].error


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 16, "max_num_batched_tokens": 48},
        {"page_size": 64, "enforce_eager": True},
        {"page_size": 16, "enforce_eager": True, "max_num_batched_tokens": 48},
        {"page_size": 16, "attention_backend": "flashinfer"},
        {"page_size": 4, "num_pages": 70},  # somebody is retracted
    ],
    ids=str,
)
def test_greedy_answers_are_those_of_transformers(model: Model, options: dict[str, Any]) -> None:
    with model.open(**options) as llm:
        model.check(llm.generate(tiny_models.PROMPTS, greedy()))
        warm = llm.generate(tiny_models.PROMPTS[::-1], greedy())
        model.check(warm)
        assert sum(completion.cached_tokens for completion in warm) > 0
        model.check([llm.generate(prompt, greedy())[0] for prompt in tiny_models.PROMPTS[::3]])


@pytest.fixture
def bounded() -> Iterator[None]:
    """Ranks that wait for each other in vain say where, and end the run."""
    faulthandler.dump_traceback_later(150, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.usefixtures("bounded")
@needs_two
@pytest.mark.parametrize(
    "options", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48, "num_pages": None}], ids=str
)
def test_two_ranks_give_the_answers_of_transformers_and_part(
    llama: Model, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with llama.open(tensor_parallel_size=2, **options) as llm:
        assert "2 x " in llm.description
        llama.check(llm.generate(tiny_models.PROMPTS, greedy()))
        # Of filters that leave the best token only, with and without all logits, and of what else needs all.
        limits: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
        filtered = [SamplingParams(temperature=1.0, top_p=1e-3, top_k=top_k, **limits) for top_k in (0, 20)]
        for others in (*filtered, greedy(logprobs=1)):
            rules = [others if i % 2 else greedy() for i in range(len(tiny_models.PROMPTS))]
            llama.check(llm.generate(tiny_models.PROMPTS, rules))
    assert "not let go" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [{}, {"page_size": 4, "max_num_batched_tokens": 48}, {"enforce_eager": True, "max_num_batched_tokens": 128}],
    ids=str,
)
def test_the_default_model_answers_as_in_transformers(default_model: Model, options: dict[str, Any]) -> None:
    prompts = [answer.prompt for answer in recorded_answers()][::4]
    with default_model.open(max_model_len=1024, **options) as llm:
        default_model.check(llm.generate(prompts, greedy()))
        warm = llm.generate(prompts[::-1], greedy())
        default_model.check(warm)
        assert sum(completion.cached_tokens for completion in warm) > 0


@pytest.mark.parametrize("pattern", ["[a-z]{4} [0-9]{3}", "[a-z]{4} and, as has to be said at once, [0-9]{3}"])
def test_grammars_hold_in_graphs_beside_free_requests(pattern: str, default_model: Model) -> None:
    """What a pattern forces is appended while the step after it is in flight."""
    prompts = [answer.prompt for answer in recorded_answers()][:10]
    limited = SamplingParams(
        temperature=0, max_tokens=40, repetition_penalty=1.1, grammar=structural_tag(regex(pattern))
    )
    with default_model.open(max_model_len=1024) as llm:
        completions = llm.generate(prompts, [limited if i % 2 else greedy() for i in range(len(prompts))])
    default_model.check(completions[::2])
    assert all(re.fullmatch(pattern, completion.text) for completion in completions[1::2])


def test_three_query_heads_of_64_values_share_a_key_head(tmp_path: Path) -> None:
    """The shape of the default model."""
    model = Model.random("llama", tmp_path, **SMALL_HEADS)
    for options in ({}, {"enforce_eager": True, "max_num_batched_tokens": 48}):
        with model.open(**options) as llm:
            model.check(llm.generate(tiny_models.PROMPTS, greedy()))


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 48}, {"enforce_eager": True}], ids=str)
def test_heads_of_96_values_are_captured_too(options: dict[str, Any], tmp_path: Path) -> None:
    """As Phi-3 mini has them, for which FlashInfer has no kernels."""
    model = Model.random("phi3", tmp_path, hidden_size=384, num_attention_heads=4, num_key_value_heads=4, head_dim=96)
    with model.open(**options) as llm:
        model.check(llm.generate(tiny_models.PROMPTS, greedy()))


@pytest.mark.parametrize("variant", ["gemma2", "gemma3", "mistral-window", "phi3", "qwen2-window", "smollm3"])
def test_what_other_families_do_differently_works_on_a_gpu(variant: str, tmp_path: Path) -> None:
    model = Model.random(variant, tmp_path)
    for options in ({}, {"attention_backend": "flashinfer", "max_num_batched_tokens": 48}):
        with model.open(**options) as llm:
            model.check(llm.generate(tiny_models.PROMPTS, greedy()))


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 48}, {"enforce_eager": True}, {"moe_backend": "torch"}, {"dtype": "float32"}],
    ids=str,
)
def test_mixtures_of_experts_are_captured_and_answer_as_in_transformers(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Rounding may send a token to another expert where two are nearly as good, which moves its logits further."""
    model = Model.random("qwen3moe", tmp_path, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64)
    with model.open(page_size=4, **options) as llm:
        for prompts in (tiny_models.PROMPTS, tiny_models.PROMPTS[::-1]):
            model.check(llm.generate(prompts, greedy()), tie=4 * TIE)


@pytest.mark.parametrize("options", [{"attention_backend": "torch"}, {"dtype": "float32"}], ids=str)
def test_plain_torch_kernels_work_on_a_gpu(llama: Model, options: dict[str, Any]) -> None:
    with llama.open(**options) as llm:
        llama.check(llm.generate(tiny_models.PROMPTS, greedy()))


def test_overlap_and_repetition_change_no_token(llama: Model) -> None:
    rules = [
        SamplingParams(seed=i, temperature=0.8, max_tokens=30 + i, ignore_eos=True)
        for i in range(len(tiny_models.PROMPTS))
    ]
    found = []
    for disabled in (True, False, False):
        with llama.open(disable_overlap_schedule=disabled, disable_radix_cache=True) as llm:
            found.append([completion.token_ids for completion in llm.generate(tiny_models.PROMPTS, rules)])
    assert found[0] == found[1] == found[2]


def test_special_rules_in_a_replayed_step_leave_the_others_alone(llama: Model) -> None:
    rules = [
        greedy(), greedy(logprobs=3), greedy(logit_bias={9: 100.0}), greedy(),
        SamplingParams(temperature=1.0, top_k=1, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0.9, top_p=1e-6, max_tokens=NUM_TOKENS, ignore_eos=True),
        greedy(frequency_penalty=2.0),
    ]  # fmt: skip
    with llama.open() as llm:
        completions = llm.generate(tiny_models.PROMPTS, rules)
    biased, penalized = completions.pop(2), completions.pop(-1)
    llama.check(completions)
    assert biased.token_ids == [9] * NUM_TOKENS
    assert len(penalized.token_ids) == NUM_TOKENS and max(map(penalized.token_ids.count, penalized.token_ids)) <= 6
    asking = completions[1]
    ids = asking.prompt_token_ids + asking.token_ids
    expected = tiny_models.logits(llama.oracle, ids)[-NUM_TOKENS - 1 : -1].log_softmax(-1)
    for position, entry in enumerate(asking.logprobs):
        assert entry.token_id == asking.token_ids[position] and len(entry.top) == 3
        assert entry.logprob == pytest.approx(float(expected[position, entry.token_id]), abs=0.15)


def test_request_with_non_finite_logits_fails_alone(tmp_path: Path, llama: Model) -> None:
    poisoned = tiny_models.make("llama", **SIZES)
    poison = 150
    poisoned.model.embed_tokens.weight.data[poison] = torch.nan
    healthy = [[token for token in prompt if token != poison] for prompt in tiny_models.PROMPTS]
    tiny_models.save(poisoned, tmp_path)
    with LLM(str(tmp_path), device="cuda", num_pages=64, max_num_seqs=12) as llm:
        for _ in range(2):
            bad, *good = llm.generate([[5, poison, 6] * 20, *healthy], greedy())
            assert bad.finish_reason == "error" and bad.error is not None and "finite" in bad.error
            llama.check([completion for completion in good if poison not in completion.token_ids])


@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 1024}, {"enforce_eager": True, "max_num_batched_tokens": 1024}, {"page_size": 1}],
    ids=str,
)
def test_reading_shared_prefixes_once_changes_no_answer(llama: Model, options: dict[str, Any]) -> None:
    """Enough requests with a long enough prefix that it pays; two groups, and some who share nothing."""
    shape = AttentionShape(4, 2, 128, 16, torch.bfloat16)
    rule = select_attention("auto", shape, torch.device("cuda"), 64, reads_shared=True).shared_prefixes
    assert rule is not None and rule.pays(
        PrefixGroups(*(np.array(v, np.int32) for v in (range(56), (0, 56), (384,)))), 0
    )
    bases = [tiny_models.random_ids(400, seed=seed) for seed in (7, 8)]
    prompts = [bases[i % 8 == 0] + tiny_models.random_ids(1 + i, seed=100 + i) for i in range(64)]
    prompts += [tiny_models.random_ids(50, seed=200 + i) for i in range(4)]
    with llama.open(max_num_seqs=72, num_pages=65536 // options.get("page_size", 16), **options) as llm:
        llama.check(llm.generate(prompts, greedy()))


@pytest.mark.parametrize(
    ("write", "config", "options"),
    [
        (fp8_by_row, FP8, {}),
        (fp8_by_block, {**FP8, "weight_block_size": BLOCK}, {}),
        (gptq_in_another_order, GPTQ, {}),
        (awq, AWQ, {"enforce_eager": True, "kv_cache_dtype": "fp8"}),
        (fp8_by_row, FP8, {"kv_cache_dtype": "fp8", "max_num_batched_tokens": 48}),
        (gptq_in_another_order, GPTQ, {"deterministic": True, "kv_cache_dtype": "fp8"}),
    ],
)
def test_quantized_weights_and_caches_are_near_what_they_stand_for(
    write: Writer, config: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts of one and of many tokens, and decodes that continue them, so each product gets its turn."""
    oracle = save_quantized("llama", tmp_path, write, config, **SIZES)
    check_logprobs(Model(str(tmp_path), oracle), **options)


@pytest.mark.parametrize(
    ("write", "config", "options"),
    [
        (fp8_by_row, FP8, {}),
        (fp8_by_block, {**FP8, "weight_block_size": BLOCK}, {}),
        (fp8_by_row, FP8, {"deterministic": True}),
        (fp8_by_block, {**FP8, "weight_block_size": BLOCK}, {"moe_backend": "torch"}),
        (awq, AWQ, {"max_num_batched_tokens": 48}),
        pytest.param(fp8_by_row, FP8, {"tensor_parallel_size": 2}, marks=needs_two),
        pytest.param(awq, AWQ, {"tensor_parallel_size": 2}, marks=needs_two),
    ],
)
def test_quantized_experts_are_near_what_they_stand_for(
    write: Writer, config: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """With few tokens an expert weights are widened, with many the tokens are rounded, where the form allows it."""
    oracle = save_quantized("qwen3moe", tmp_path, write, config, **SIZES, **EXPERTS)
    check_logprobs(Model(str(tmp_path), oracle), **options)


def check_logprobs(model: Model, **options: Any) -> None:
    """Of prompts and answers: those of the oracle, but for the rounding of activations and caches."""
    with model.open(**options) as llm:
        rules = greedy(prompt_logprobs=0, logprobs=0)
        for completion in llm.generate(tiny_models.PROMPTS[1:], rules):
            assert completion.prompt_logprobs is not None and completion.logprobs is not None
            ids = completion.prompt_token_ids + completion.token_ids
            exact = tiny_models.logits(model.oracle, ids).log_softmax(-1)[:-1]
            found = [entry.logprob for entry in (*completion.prompt_logprobs[1:], *completion.logprobs) if entry]
            expected = exact.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
            assert float((torch.tensor(found) - expected).abs().mean()) < 0.15 * float(exact.std())

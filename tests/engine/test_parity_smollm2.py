"""Greedy tokens of the default model in fp32 equal those of transformers, however the work is cut and batched."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from radixserve.engine.llm import LLM, Completion
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.oracle import Answer, generate, load_default_model, recorded_answers

ANSWERS = recorded_answers()

NUM_COMPARED = 10  # tokens, of each prompt


def greedy(max_tokens: int = NUM_COMPARED) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


@contextmanager
def fp32(**options: Any) -> Iterator[LLM]:
    # One thread: with more, a busy machine makes threads wait for each other.
    with LLM(dtype="float32", device="cpu", cpu_threads=1, **options) as llm:
        yield llm


def check(completions: list[Completion], answers: list[Answer], num_tokens: int = NUM_COMPARED) -> None:
    for completion, answer in zip(completions, answers, strict=True):
        expected = answer.tokens[:num_tokens]
        assert completion.token_ids[: len(expected)] == expected, f"prompt {answer.prompt}"


@pytest.mark.parametrize(("chunk", "page_size", "every"), [(16, 4, 5), (128, 1, 2), (2048, 16, 1)])
def test_mixed_batches_with_cold_and_warm_cache(chunk: int, page_size: int, every: int) -> None:
    answers = ANSWERS[::every]  # steps of 16 tokens are slow
    prompts = [answer.prompt for answer in answers]
    with fp32(max_num_batched_tokens=chunk, page_size=page_size) as llm:
        check(llm.generate(prompts, greedy()), answers)
        warm = llm.generate(prompts[::-1], greedy())
        check(warm, answers[::-1])
        for completion in warm:
            reusable = (len(completion.prompt_token_ids) - 1) // page_size * page_size
            assert completion.cached_tokens == reusable


def test_each_prompt_alone_without_a_cache() -> None:
    num_tokens = 5
    with fp32(disable_radix_cache=True) as llm:
        answers = ANSWERS[1::5]
        completions = [llm.generate(answer.prompt, greedy(num_tokens))[0] for answer in answers]
        check(completions, answers, num_tokens)
        assert not any(completion.cached_tokens for completion in completions)


def test_the_record_is_what_transformers_computes() -> None:
    model = load_default_model()
    for answer in ANSWERS[::20]:
        tokens = generate(model, answer.prompt, num_tokens=4)
        assert tokens == answer.tokens[: len(tokens)]


def test_default_model_answers_in_its_own_type() -> None:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    with LLM(device="cpu", cpu_threads=1) as llm:
        completion = llm.chat(question, SamplingParams(temperature=0, max_tokens=20))
        cut = llm.chat(question, SamplingParams(temperature=0, max_tokens=20, stop=(" France",)))
    assert completion.text == "The capital of France is Paris." and completion.finish_reason == "stop"
    assert cut.text == "The capital of" and cut.finish_reason == "stop"


def test_quantized_weights_tell_nearly_the_same_as_fp32() -> None:
    """In many tokens a step and in few, which take different ways through the kernels."""
    text = "The capital of France is Paris, the capital of Italy is Rome, and the longest river of Africa is the Nile."
    exact, many, few = (
        prompt_logprobs(text, **options) for options in ({"cpu_weights": "fp32"}, {}, {"max_num_batched_tokens": 5})
    )
    for found in (many, few):
        differences = [abs(ours - theirs) for ours, theirs in zip(found, exact, strict=True)]
        assert max(differences) < 0.2 and sum(differences) / len(differences) < 0.04


def prompt_logprobs(text: str, **options: Any) -> list[float]:
    with LLM(device="cpu", cpu_threads=1, **options) as llm:
        (completion,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    assert completion.prompt_logprobs is not None
    return [entry.logprob for entry in completion.prompt_logprobs if entry is not None]

"""--deterministic: a request's tokens, and even its log-probabilities, do not depend on anything around it."""

from collections.abc import Iterator
from typing import Any

import pytest

from radixserve.engine.llm import LLM, Completion
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine import tiny_models
from radixserve.tests.engine.tiny_models import BASE, random_ids

# Short, long, and with a shared beginning.
PROMPTS = [random_ids(1, seed=1), random_ids(33, seed=2), BASE[:40], BASE + random_ids(50, seed=3)]

DRAWS = (
    SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=1.5, seed=3, top_p=0.9, max_tokens=10, ignore_eos=True, logprobs=3),
)
Trace = tuple[list[int], list[Any]]


@pytest.fixture(scope="module", params=["llama float32", "qwen3 bfloat16"])
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    variant, dtype = request.param.split()
    folder = tiny_models.save(tiny_models.make(variant), tmp_path_factory.mktemp("tiny"))
    return {"model": str(folder), "dtype": dtype, "device": "cpu", "num_pages": 2048, "deterministic": True}


def traces(llm: LLM, prompts: list[list[int]], sampling: SamplingParams) -> list[Trace]:
    answers: list[Completion] = llm.generate(prompts, sampling)
    return [(answer.token_ids, answer.logprobs) for answer in answers]


def noise(number: int) -> list[list[int]]:
    return [random_ids(3 + 17 * i % 150, seed=100 + i) for i in range(number)]


@pytest.fixture(scope="module")
def alone(options: dict[str, Any]) -> Iterator[list[list[Trace]]]:
    """Of each kind of draw, what each prompt is answered by itself, with an empty cache."""
    with LLM(**options, disable_radix_cache=True, cpu_threads=1) as llm:
        yield [[traces(llm, [prompt], sampling)[0] for prompt in PROMPTS] for sampling in DRAWS]


@pytest.mark.parametrize("changes", [{"max_num_batched_tokens": 17}, {"num_pages": 50, "page_size": 4}])
def test_nothing_around_a_request_changes_a_bit_of_it(
    options: dict[str, Any], alone: list[list[Trace]], changes: dict[str, Any]
) -> None:
    with LLM(**{**options, "cpu_threads": 2, **changes}) as llm:
        for expected, sampling in zip(alone, DRAWS, strict=True):
            found = traces(llm, PROMPTS + noise(6), sampling)[: len(PROMPTS)]
            assert found == expected, "in a batch"
            again = traces(llm, noise(3) + PROMPTS[::-1], sampling)[3:]
            assert again[::-1] == expected, "in another batch, with a warm cache"


def test_what_was_decoded_serves_as_a_prefix_without_a_difference(options: dict[str, Any]) -> None:
    """KV of an answer, computed token by token, against KV of the same text as a prompt."""
    sampling = DRAWS[0]
    with LLM(**options, page_size=1) as warm, LLM(**options, disable_radix_cache=True) as cold:
        ((answer, _),) = traces(warm, [BASE], sampling)
        longer = BASE + answer + random_ids(5, seed=9)
        assert traces(warm, [longer], sampling) == traces(cold, [longer], sampling)

"""--deterministic: a request's tokens, and even its log-probabilities, do not depend on anything around it."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from radixserve.engine.errors import ConfigError
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


ON_GPU = "qwen3 bfloat16 cuda"
GPU_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "initializer_range": 0.08}


@pytest.fixture(
    scope="module",
    params=[
        "llama float32 cpu",
        "qwen3moe-mixed bfloat16 cpu",
        *(pytest.param(model, marks=pytest.mark.gpu) for model in (ON_GPU, "qwen3moe bfloat16 cuda")),
    ],
)
def options(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    variant, dtype, device = request.param.split()
    model = tiny_models.make(variant, **(GPU_SIZES if device == "cuda" else {}))
    folder = tiny_models.save(model, tmp_path_factory.mktemp("tiny"))
    shared = {"model": str(folder), "num_pages": 2048, "max_num_seqs": 40, "deterministic": True}
    return {**shared, "dtype": dtype, "device": device}


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


@pytest.mark.gpu
@pytest.mark.parametrize("options", [ON_GPU], indirect=True)
@pytest.mark.parametrize("changes", [{}, {"enforce_eager": True}], ids=str)
def test_on_a_gpu_neither_graphs_nor_a_large_batch_change_a_bit(
    options: dict[str, Any], alone: list[list[Trace]], changes: dict[str, Any]
) -> None:
    with LLM(**options, **changes) as llm:
        for expected, sampling in zip(alone, DRAWS, strict=True):
            plain = msgspec.structs.replace(sampling, logprobs=None)  # sampled inside of the graph
            for answers in (traces(llm, noise(28) + PROMPTS, sampling), traces(llm, noise(28) + PROMPTS, plain)):
                assert [tokens for tokens, _ in answers[28:]] == [tokens for tokens, _ in expected]
            assert traces(llm, PROMPTS[-1:], sampling) == expected[-1:], "alone, with a warm cache"


@pytest.mark.gpu
@pytest.mark.parametrize("options", [ON_GPU], indirect=True)
def test_on_a_gpu_other_attention_is_refused_with_the_remedy(options: dict[str, Any]) -> None:
    for changes in ({"attention_backend": "flashinfer"}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match="--attention-backend auto .* --dtype bfloat16"):
            LLM(**{**options, **changes})

"""The whole engine in one process, on tiny random models: batching, caching and cutting never change an answer."""

import json
import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from radixserve.configs.errors import OptionError
from radixserve.engine import llm as llm_module
from radixserve.engine.errors import ConfigError, InvalidRequest, ModelError
from radixserve.engine.llm import LLM
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.structured import regex, structural_tag
from radixserve.kernels.interface import AttentionKernel, BatchLayout
from radixserve.kernels.native_ops import NativeAttention
from radixserve.kernels.torch_attention import TorchAttention
from radixserve.tests.engine import tiny_models
from radixserve.tests.server.byte_model import write_byte_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.save(tiny_models.make("llama"), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def answers() -> list[list[int]]:
    """What transformers generates greedily."""
    oracle = tiny_models.make("llama")
    return [tiny_models.generate(oracle, prompt, 12) for prompt in tiny_models.PROMPTS]


def open_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **{"dtype": "float32", "device": "cpu", "cpu_threads": 1, "num_pages": 2048, **options})


def greedy(max_tokens: int = 12, **rules: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **rules)


def tokens(llm: LLM, prompts: Any, sampling: Any) -> list[list[int]]:
    return [completion.token_ids for completion in llm.generate(prompts, sampling)]


@pytest.mark.parametrize("chunk", [16, 128, 2048])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_greedy_answers_equal_transformers(
    folder: Path, answers: list[list[int]], chunk: int, page_size: int, overlap: bool
) -> None:
    options = {"max_num_batched_tokens": chunk, "page_size": page_size, "disable_overlap_schedule": not overlap}
    with open_llm(folder, **options) as llm:
        assert tokens(llm, tiny_models.PROMPTS, greedy()) == answers
        assert tokens(llm, tiny_models.PROMPTS, greedy()) == answers
        assert [tokens(llm, prompt, greedy())[0] for prompt in tiny_models.PROMPTS] == answers


@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_hold_beside_free_requests(
    folder: Path, tmp_path: Path, answers: list[list[int]], overlap: bool
) -> None:
    options = {"tokenizer": str(write_byte_model(tmp_path / "bytes")), "disable_overlap_schedule": not overlap}
    limited = SamplingParams(temperature=0, max_tokens=12, grammar=structural_tag(regex("[a-c]{4}(x|y)")))
    with open_llm(folder, **options) as llm:
        rules = [limited if i % 2 else greedy() for i in range(len(tiny_models.PROMPTS))]
        completions = llm.generate(tiny_models.PROMPTS, rules)
        assert [completion.token_ids for completion in completions[::2]] == answers[::2]
        assert all(re.fullmatch("[a-c]{4}[xy]", completion.text) for completion in completions[1::2])
        assert {completion.finish_reason for completion in completions[1::2]} == {"stop"}
        with pytest.raises(InvalidRequest, match="cannot be compiled: Invalid structural tag"):  # no C++ before that
            llm.generate("a", SamplingParams(grammar="{}"))


def test_answers_survive_retraction(folder: Path, answers: list[list[int]]) -> None:
    with open_llm(folder, page_size=4, num_pages=66) as llm:  # the longest request needs 55 of them
        for _ in range(2):
            assert tokens(llm, tiny_models.PROMPTS, greedy()) == answers


def test_seeded_draws_do_not_depend_on_batch_chunk_cache_or_retraction(folder: Path) -> None:
    rules = [
        SamplingParams(seed=i, max_tokens=12, ignore_eos=True, temperature=0.8, top_k=20)
        for i in range(len(tiny_models.PROMPTS))
    ]
    with open_llm(folder, disable_radix_cache=True) as llm:
        alone = [tokens(llm, prompt, rule)[0] for prompt, rule in zip(tiny_models.PROMPTS, rules, strict=True)]
    for options in ({"max_num_batched_tokens": 32}, {"page_size": 4, "num_pages": 66}):
        with open_llm(folder, **options) as llm:
            assert tokens(llm, tiny_models.PROMPTS, rules) == alone
            assert tokens(llm, tiny_models.PROMPTS[::-1], rules[::-1]) == alone[::-1]


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (TorchAttention, {"disable_overlap_schedule": False}),
        (TorchAttention, {"disable_overlap_schedule": True}),
        (NativeAttention, {"cpu_weights": "bf16"}),
    ],
)
def test_reading_a_long_common_prefix_once_changes_no_token(
    folder: Path, kernel: type[AttentionKernel], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_steps: list[int] = []
    plan = kernel.plan

    def spied(self: AttentionKernel, layout: BatchLayout) -> None:
        if layout.shared is not None:
            shared_steps.append(layout.num_decodes)
        plan(self, layout)

    monkeypatch.setattr(kernel, "plan", spied)
    base = tiny_models.random_ids(180, seed=20)
    prompts = [base + tiny_models.random_ids(5 + 9 * i, seed=21 + i) for i in range(6)]
    prompts += [base[:150] + [7, 8, 9], *tiny_models.PROMPTS]  # one shares a shorter prefix
    found = {}
    for choice in ("off", "auto"):
        assert not shared_steps
        with open_llm(folder, shared_prefix_attention=choice, **options) as llm:
            if kernel is NativeAttention and "native" not in llm.description:
                pytest.skip(llm.description)
            found[choice] = tokens(llm, prompts, greedy(20))
    assert found["auto"] == found["off"]
    assert len(shared_steps) > 10 and max(shared_steps) >= 7


def test_second_time_the_prompt_comes_from_the_cache(folder: Path) -> None:
    with open_llm(folder, page_size=16) as llm:
        first, second = (llm.generate(tiny_models.PROMPTS[6], greedy())[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 192)


def test_prompt_logprobs_do_not_depend_on_chunks(folder: Path) -> None:
    prompt = tiny_models.PROMPTS[4]
    expected = tiny_models.logits(tiny_models.make("llama"), prompt).log_softmax(-1)
    for chunk in (16, 2048):
        with open_llm(folder, max_num_batched_tokens=chunk) as llm:
            for _ in range(2):  # what is cached must not take logprobs away
                found = llm.generate(prompt, greedy(1, prompt_logprobs=2))[0].prompt_logprobs
                assert found[0] is None and len(found) == len(prompt)
                for position, entry in enumerate(found[1:], start=1):
                    assert entry is not None and entry.token_id == prompt[position]
                    assert entry.logprob == pytest.approx(float(expected[position - 1, prompt[position]]), abs=1e-3)
                    assert entry.top[0][1] == pytest.approx(float(expected[position - 1].max()), abs=1e-3)


def test_logprobs_come_with_each_token(folder: Path) -> None:
    with open_llm(folder) as llm:
        plain, asking = llm.generate(tiny_models.PROMPTS[:2], [greedy(), greedy(logprobs=3)])
    assert plain.logprobs == []
    assert [entry.token_id for entry in asking.logprobs] == asking.token_ids
    assert all(entry.top[0][0] == entry.token_id and len(entry.top) == 3 for entry in asking.logprobs)


def test_request_with_non_finite_logits_fails_alone(tmp_path: Path) -> None:
    oracle = tiny_models.make("llama")
    poison = 150
    oracle.model.embed_tokens.weight.data[poison] = torch.nan
    healthy = [[token for token in prompt if token != poison] for prompt in tiny_models.PROMPTS]
    with open_llm(tiny_models.save(oracle, tmp_path), num_pages=64) as llm:
        expected = tokens(llm, healthy, greedy(6))
        for _ in range(3):  # poisoned pages are given to others
            bad, *good = llm.generate([[5, poison, 6] * 20, *healthy], greedy(6))
            assert bad.finish_reason == "error" and bad.error is not None and "finite" in bad.error
            assert [completion.token_ids for completion in good if completion.finish_reason == "length"] == [
                ids for ids in expected if poison not in ids
            ]


def test_mixed_rules_share_a_batch(folder: Path) -> None:
    rules = [
        greedy(), greedy(logit_bias={9: 100.0}), greedy(repetition_penalty=1.8), greedy(frequency_penalty=2.0),
        SamplingParams(temperature=1.1, top_p=0.8, seed=4, max_tokens=12, ignore_eos=True),
    ]  # fmt: skip
    with open_llm(folder) as llm:
        alone = [tokens(llm, tiny_models.PROMPTS[1], rule)[0] for rule in rules]
        assert tokens(llm, [tiny_models.PROMPTS[1]] * 5, rules) == alone
    assert alone[1] == [9] * 12


def test_stop_ids_end_an_answer(folder: Path, answers: list[list[int]]) -> None:
    with open_llm(folder) as llm:
        stop = answers[0][3]
        completion = llm.generate(tiny_models.PROMPTS[0], greedy(stop_token_ids=(stop,)))[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == answers[0][: answers[0].index(stop) + 1]


# ---- mistakes ----


def test_unknown_option_is_an_error_with_a_suggestion(folder: Path) -> None:
    with pytest.raises(OptionError, match="page_sise; did you mean page_size"):
        LLM(str(folder), page_sise=4)


def test_one_hopeless_prompt_is_refused_before_any_is_computed(folder: Path) -> None:
    with open_llm(folder) as llm:
        with pytest.raises(InvalidRequest, match="512"):
            llm.generate([tiny_models.PROMPTS[0], [5] * 600], greedy())
        assert tokens(llm, tiny_models.PROMPTS[0], greedy(2))[0]


@pytest.mark.parametrize("prompt", [[1, 2.5], [1, "2"], [1, -2], [1, 1 << 31], 7], ids=str)
def test_what_is_no_list_of_token_ids_is_refused_with_all_prompts(folder: Path, prompt: Any) -> None:
    with open_llm(folder) as llm:
        with pytest.raises(InvalidRequest, match="prompt"):
            llm.generate([[1, 2], prompt], greedy(1))
        assert len(llm.generate([[1, 2]], greedy(1))) == 1


@pytest.mark.parametrize("stop", ["END", ["END"], ("END",)], ids=str)
def test_one_stop_string_is_not_taken_for_its_letters(stop: Any) -> None:
    assert SamplingParams(stop=stop).stop == ("END",)


def test_arguments_may_be_anything_that_yields_prompts_and_rules(folder: Path) -> None:
    with open_llm(folder) as llm:
        listed = tokens(llm, tiny_models.PROMPTS, greedy(2))
        assert tokens(llm, iter(tiny_models.PROMPTS), (greedy(2) for _ in tiny_models.PROMPTS)) == listed


def test_arguments_that_are_no_prompts_or_rules_are_refused_by_name(folder: Path) -> None:
    with open_llm(folder) as llm:
        for prompts in (None, 7, {"a": 1}, b"abc"):
            with pytest.raises(InvalidRequest, match="prompts: a text, a list of token ids"):
                llm.generate(prompts, greedy())  # type: ignore[arg-type]
        for rules in ("x", 7, {"temperature": 0}, [greedy(), None]):
            with pytest.raises(InvalidRequest, match="sampling_params: a SamplingParams, or a list"):
                llm.generate(tiny_models.PROMPTS[:2], rules)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="sampling_params: "):
            next(llm.stream([1, 2], {"temperature": 0}))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="2 sampling_params for 1 prompts"):
            llm.generate(tiny_models.PROMPTS[0], [greedy(), greedy()])


def test_text_needs_a_tokenizer(folder: Path) -> None:
    with open_llm(folder) as llm, pytest.raises(ModelError, match="no tokenizer"):
        llm.generate("Hello")


def test_closed_llm_says_so(folder: Path) -> None:
    llm = open_llm(folder)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate(tiny_models.PROMPTS[0])


@pytest.mark.parametrize("prompt", [[1.5], ["a"], [1 << 40], [-1], [None]])
def test_a_prompt_that_is_neither_text_nor_token_ids_is_refused(folder: Path, prompt: Any) -> None:
    with open_llm(folder) as llm, pytest.raises(InvalidRequest, match="token ids"):
        llm.generate([prompt], greedy())


@pytest.mark.parametrize("overlap", [False, True])
def test_ctrl_c_ends_a_call_and_the_next_one_works(folder: Path, answers: list[list[int]], overlap: bool) -> None:
    with open_llm(folder, disable_overlap_schedule=not overlap, num_pages=64, page_size=4) as llm:
        for seconds in (0.005, 0.011, 0.02, 0.04, 0.08):
            with pytest.raises(KeyboardInterrupt):
                threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT]).start()
                while True:
                    llm.generate(tiny_models.PROMPTS, greedy(40))
        assert tokens(llm, tiny_models.PROMPTS, greedy()) == answers


def test_no_ctrl_c_can_fall_into_the_end_of_the_progress_bar(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python ignores what is raised while it destroys an object."""
    handlers: list[object] = []

    class Bar(llm_module.tqdm):  # type: ignore[misc, name-defined]
        def __del__(self) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))
            super().__del__()

    monkeypatch.setattr(llm_module, "tqdm", Bar)
    before = signal.getsignal(signal.SIGINT)
    with open_llm(folder) as llm:
        llm.generate(tiny_models.PROMPTS[:2], greedy())
    assert handlers and before not in handlers


def test_context_longer_than_the_model_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="max_model_len 1024 is more than the 512"):
        open_llm(folder, max_model_len=1024)


def test_cache_too_small_for_a_short_chat_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="--num-pages 8 or more"):
        open_llm(folder, page_size=16, num_pages=7)


def test_backend_that_is_not_here_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="flashinfer"):
        open_llm(folder, attention_backend="flashinfer")


def test_random_weights_need_no_weight_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match="no weights"):
        open_llm(tmp_path)
    with open_llm(tmp_path, load_format="dummy") as llm:
        assert len(tokens(llm, [5, 6, 7], greedy(4))[0]) == 4


def test_a_model_larger_than_memory_is_an_error_with_a_remedy(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="the weights take .* GiB.* smaller model"):
        open_llm(tmp_path, load_format="dummy")


def test_a_stream_gives_the_same_text_in_pieces_whatever_runs_beside_it(tmp_path: Path) -> None:
    with open_llm(write_byte_model(tmp_path), load_format="dummy") as llm:
        (whole,) = llm.generate("hello", greedy())
        pieces = list(llm.stream("hello", greedy()))
        assert "".join(pieces) == whole.text and len(pieces) > 1
        stream = llm.stream("hello", greedy())
        first = next(stream)
        (beside,) = llm.generate("hello", greedy())
        assert first + "".join(stream) == beside.text == whole.text


def test_a_stream_that_is_left_or_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    with open_llm(write_byte_model(tmp_path), load_format="dummy") as llm:
        (whole,) = llm.generate("hello", greedy())
        for piece in llm.stream("hello", greedy(200)):
            assert piece
            break
        with pytest.raises(InvalidRequest, match="token"):
            next(llm.stream("hello" * 1000, greedy()))
        assert llm.generate("hello", greedy())[0].text == whole.text

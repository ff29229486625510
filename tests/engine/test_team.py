"""Real ranks, tied by gloo: they give the tokens of one rank, and when one dies nobody hangs and nothing stays."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from radixserve.engine.errors import ConfigError, EngineLost
from radixserve.engine.llm import LLM, Completion
from radixserve.engine.ranks import TorchRanks
from radixserve.engine.runner import ModelRunner
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.structured import regex, structural_tag
from radixserve.tests.engine import tiny_models
from radixserve.tests.server.byte_model import write_byte_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with two KV heads."""
    return tiny_models.save(tiny_models.make("llama", vocab_size=163), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_byte_model(tmp_path_factory.mktemp("bytes") / "model"))


@pytest.fixture(autouse=True)
def meetings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the ranks of a test meet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def open_llm(folder: Path, ranks: int, **options: Any) -> LLM:
    sizes = {"max_num_batched_tokens": 32, "page_size": 4, "num_pages": 66}  # chunks, and too few pages for all
    given = {"dtype": "float32", "device": "cpu", "cpu_threads": 1, "disable_overlap_schedule": False, **sizes}
    return LLM(str(folder), tensor_parallel_size=ranks, **{**given, **options})


def greedy(**rules: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, **rules)


RULES = [
    greedy(),
    SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=4, top_p=0.9, max_tokens=8, frequency_penalty=1.0),
    greedy(grammar=structural_tag(regex("[a-c]{4}(x|y)"))),
    greedy(prompt_logprobs=0),
    greedy(min_tokens=4, logit_bias={1: 100.0}),
    greedy(repetition_penalty=1.5),
]


def answers(llm: LLM) -> list[Completion]:
    """Twice, so that prompts are cached; without what depends on rounding and time."""
    found = [completion for _ in range(2) for completion in llm.generate(tiny_models.PROMPTS, RULES)]
    return [replace(completion, ttft_s=0.0, prompt_logprobs=[]) for completion in found]


def follower_pids() -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [child.pid for child in children if "radixserve.engine.follower" in child.cmdline()]


def test_four_ranks_give_the_tokens_of_one_and_end_with_any_of_them(
    folder: Path, tokenizer: str, meetings: Path
) -> None:
    with open_llm(folder, 1, tokenizer=tokenizer) as llm:
        expected = answers(llm)
    with open_llm(folder, 4, tokenizer=tokenizer) as llm:
        assert "4 x cpu" in llm.description
        assert answers(llm) == expected
        with pytest.raises(ConfigError, match="close the other LLM"):
            open_llm(folder, 2)
        *_, last = follower_pids()
        os.kill(last, signal.SIGSTOP)  # so that the others wait for it within a collective when it dies
        threading.Timer(0.5, os.kill, (last, signal.SIGKILL)).start()
        for _ in range(2):
            with pytest.raises(EngineLost, match=rf"rank \d \(process {last}\) was killed by signal 9"):
                llm.generate(tiny_models.PROMPTS, greedy())
    assert follower_pids() == []
    assert list(meetings.glob("radixserve-*")) == []


def test_graphs_are_released_before_the_ranks_part_and_others_may_meet_then(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL waits for the graphs that contain its sums. Nor does the closed object keep the weights."""
    done: list[str] = []
    runners: list[weakref.ref[ModelRunner]] = []
    leave = TorchRanks.leave

    def release(runner: ModelRunner) -> None:
        runners.append(weakref.ref(runner))
        done.append("released")

    monkeypatch.setattr(ModelRunner, "release_graphs", release)
    monkeypatch.setattr(TorchRanks, "leave", lambda ranks: (done.append("left"), leave(ranks)))
    first = open_llm(folder, 2)
    first.generate(tiny_models.PROMPTS[0], greedy())
    first.close()
    assert done == ["released", "left"]
    gc.collect()
    assert [runner() for runner in runners] == [None]
    with open_llm(folder, 2) as second:
        first.close()  # once more, which is not for the second
        assert len(second.generate(tiny_models.PROMPTS[0], greedy())[0].token_ids) == 8


def test_taking_down_that_never_ends_holds_up_neither_a_caller_nor_the_end_of_the_process() -> None:
    """As NCCL's does while a graph contains its sums."""
    script = """
import atexit, threading
from radixserve.engine.ranks import Background
background = Background()
atexit.register(lambda: print(background.submit(print).wait(0.1)))
print(background.submit(threading.Event().wait).wait(0.1))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_a_rank_that_cannot_start_is_named(folder: Path, meetings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "no number")
    with pytest.raises(EngineLost, match=r"rank 1 \(process \d+\) ended with exit status 1"):
        open_llm(folder, 2)
    assert list(meetings.glob("radixserve-*")) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deterministic": True}, "deterministic does not go with tensor_parallel_size 2"),
        ({"cpu_weights": "int8", "dtype": "auto"}, "int8 needs the native kernels: .* --tensor-parallel-size"),
    ],
)
def test_what_does_not_go_with_ranks_is_refused_by_name(folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_llm(folder, 2, **options)

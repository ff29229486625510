"""Grammars that would hang, flood or crash the compiler do so in a process of their own, which ends with the engine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.structured import json_object, json_schema, regex, structural_tag
from radixserve.engine.trials import GrammarTrials, TrialSetup

SETUP = TrialSetup([*(bytes([byte]) for byte in range(256)), b""], [256])


def half_of(num_properties: int) -> str:
    """xgrammar takes the third power of their number: 100 cost about a second, 600 hundreds of MB and minutes."""
    properties = {f"p{i}": {"type": "string"} for i in range(num_properties)}
    return structural_tag(
        json_schema({"type": "object", "properties": properties, "minProperties": num_properties // 2})
    )


ENDLESS = half_of(600)


def helpers(of_process: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(of_process).children()
    return [child for child in children if any("trial_process" in word for word in child.cmdline())]


@pytest.fixture
def running() -> Callable[[], list[psutil.Process]]:
    """The processes that a test has started."""
    others = helpers()
    return lambda: [process for process in helpers() if process not in others]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        (TrialSetup(SETUP.vocabulary, [256], cpu_s=0.2), "takes more than 0.2 s to compile"),
        (TrialSetup(SETUP.vocabulary, [256], memory_bytes=32 << 20), "takes more than 32 MiB of memory"),
    ],
)
def test_grammars_without_an_end_are_refused_once_tried_and_the_next_ones_are_tried(
    running: Callable[[], list[psutil.Process]], setup: TrialSetup, reason: str
) -> None:
    trials = GrammarTrials(setup)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=f"{reason}.*simpler") as refused:
            trials.check(ENDLESS)
        assert (refused.value.param, refused.value.code) == ("grammar", "grammar_too_complex")
        assert not running(), "the second time nobody tries it"
    trials.check(structural_tag(json_object()))


def test_masks_that_are_slow_are_found_before_the_engine_makes_any() -> None:
    vocabulary = [b"", *(bytes([ord("a") + i % 26]) * (i % 200 + 1) for i in range(1000))]
    with pytest.raises(InvalidRequest, match="takes too long at each token: .* repetitions$"):
        GrammarTrials(TrialSetup(vocabulary, [0])).check(structural_tag(regex(r"(\w+ ?){0,100}")))


@pytest.mark.parametrize(
    ("stop_signals", "told"),
    [
        ([signal.SIGKILL], None),
        ([signal.SIGKILL, signal.SIGKILL], "ended with exit status -9, twice"),
        ([signal.SIGSEGV], "crashes the compiler"),
    ],
)
def test_a_compilation_is_tried_once_again_if_its_end_was_not_its_own_fault(
    running: Callable[[], list[psutil.Process]], stop_signals: list[signal.Signals], told: str | None
) -> None:
    trials = GrammarTrials(SETUP)
    with ThreadPoolExecutor() as threads:
        compilation = threads.submit(trials.check, half_of(100))
        killed: list[psutil.Process] = []
        for stop_signal in stop_signals:
            wait_until(lambda: running() not in ([], killed))  # noqa: B023
            killed = running()
            wait_until(lambda: killed[0].cpu_times().user > 0.5)  # noqa: B023  # it compiles
            killed[0].send_signal(stop_signal)
        error = compilation.exception()
    assert told is None if error is None else told is not None and told in str(error)
    assert isinstance(error, InvalidRequest) == (signal.SIGSEGV in stop_signals)


def test_a_compiler_that_sleeps_is_given_up(running: Callable[[], list[psutil.Process]]) -> None:
    trials = GrammarTrials(SETUP, timeout_s=0.2)
    (process,) = running()
    process.suspend()
    with pytest.raises(InvalidRequest, match="takes more than"):
        trials.check(structural_tag(json_object()))
    assert not psutil.pid_exists(process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it ends when its grammar has used its time")
def test_no_process_outlives_a_killed_engine() -> None:
    script = (
        "import sys, threading\n"
        "from radixserve.engine.trials import GrammarTrials, TrialSetup\n"
        "trials, grammar = GrammarTrials(TrialSetup([b'a', b''], [1])), sys.stdin.read()\n"
        "threading.Thread(target=trials.check, args=(grammar,)).start()\n"
    )
    engine = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, text=True)
    assert engine.stdin is not None
    with engine, engine.stdin as grammar:
        grammar.write(ENDLESS)
        grammar.close()
        wait_until(lambda: bool(helpers(engine.pid)))
        (process,) = helpers(engine.pid)
        wait_until(lambda: process.cpu_times().user > 0.5)  # it compiles
        os.kill(engine.pid, signal.SIGKILL)
    process.wait(10)


def test_the_process_loads_no_torch_and_ends_with_its_owner(running: Callable[[], list[psutil.Process]]) -> None:
    trials = GrammarTrials(SETUP)
    trials.check(structural_tag(json_object()))
    (process,) = running()
    assert not [line for line in process.memory_maps() if "libtorch" in line.path]
    trials.close()
    assert not running()

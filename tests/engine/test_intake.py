"""Limits of the compilation of grammars: time, and threads that are taken."""

import time

import numpy as np

from radixserve.engine.constraint import TokenConstraint
from radixserve.engine.errors import InvalidRequest
from radixserve.engine.intake import Intake
from radixserve.engine.messages import Rejected, Submit, ToFrontend
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import FakeGrammars, Harness


class Endless(FakeGrammars):
    def compile(self, grammar: str) -> TokenConstraint:
        while not self.release.is_set():
            pass
        raise InvalidRequest("no more")


def test_compilations_that_use_too_much_of_a_processor_are_refused() -> None:
    grammars = Endless()
    intake = Intake(Harness().scheduler, grammars, cpu_s=0.05)
    try:
        assert intake.submit(b"f", request(1, "endless")) is None
        told: list[ToFrontend] = []
        deadline = time.monotonic() + 20
        while not told and time.monotonic() < deadline:
            told = [news for _, news in intake.advance()]
        (refused,) = told
        assert isinstance(refused, Rejected) and refused.code == "grammar_too_complex"
    finally:
        grammars.release.set()


def request(uid: int, grammar: str) -> Submit:
    return Submit(uid, "", np.array([1, 2], "<i4").tobytes(), SamplingParams(grammar=grammar))


def test_compilations_that_take_too_long_are_refused_and_so_is_who_waits_for_their_thread() -> None:
    grammars = FakeGrammars()
    intake = Intake(Harness().scheduler, grammars, timeout_s=0.05)
    try:
        for uid in range(4):
            assert intake.submit(b"f", request(uid, f"slow {uid + 1}")) is None
        assert intake.num_compiling == 4
        time.sleep(0.1)
        told = [news for _, news in intake.advance()]
        assert [(news.status, news.code) for news in told if isinstance(news, Rejected)] == [
            (400, "grammar_too_complex"),
            (400, "grammar_too_complex"),
            (503, "queue_full"),
            (503, "queue_full"),
        ]
        assert intake.num_compiling == 0 and intake.advance() == []
    finally:
        grammars.release.set()


def test_compilations_that_never_end_take_no_thread_from_those_behind_them() -> None:
    grammars, harness = FakeGrammars(), Harness()
    intake = Intake(harness.scheduler, grammars, timeout_s=0.2)
    try:
        for uid in (1, 2):
            assert intake.submit(b"f", request(uid, f"slow {uid}")) is None
        time.sleep(0.15)
        assert intake.submit(b"f", request(3, "3")) is None, "it waits: both threads are taken"
        told: list[ToFrontend] = []
        deadline = time.monotonic() + 20
        while intake.num_compiling and time.monotonic() < deadline:
            told += [news for _, news in intake.advance()]
        assert [news.code for news in told if isinstance(news, Rejected)] == ["grammar_too_complex"] * 2
        assert grammars.compiled == ["3"] and len(harness.scheduler.requests) == 1
    finally:
        grammars.release.set()

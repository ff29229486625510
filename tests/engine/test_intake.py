"""How long requests wait for the compilation of their grammar."""

import time

import numpy as np

from radixserve.engine.intake import Intake
from radixserve.engine.messages import Rejected, Submit
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.engine.fakes import FakeGrammars, Harness


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

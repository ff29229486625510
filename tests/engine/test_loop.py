"""The engine loop over real sockets, with the fake runner behind it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from radixserve.configs.schema import SchedulerOptions
from radixserve.engine import frontends as frontends_module
from radixserve.engine.built import BuiltEngine
from radixserve.engine.frontends import Frontends
from radixserve.engine.loop import EngineLoop
from radixserve.engine.messages import (
    Abort,
    AbortRequest,
    CacheFlushed,
    EngineStatus,
    FinishReason,
    FlushCache,
    Hello,
    Observation,
    Outputs,
    Ping,
    Rejected,
    Submit,
    ToEngine,
    ToFrontend,
    TokenEvent,
    Unreadable,
    Watch,
)
from radixserve.engine.observation import LEASE_S
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.scheduler import SchedulerLimits
from radixserve.engine.step import PendingStep, Pulse, StepPlan
from radixserve.engine.watch import EngineWatch
from radixserve.tests.engine.fakes import FakeGrammars, Harness, expected_output


class Client:
    """A frontend: sends messages, collects what comes back."""

    def __init__(self, address: str, pid: int | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.send(Hello(os.getpid() if pid is None else pid))

    def send(self, *messages: ToEngine) -> None:
        for message in messages:
            self.socket.send(msgspec.msgpack.encode(message))

    def receive(self, timeout_s: float = 10.0) -> ToFrontend:
        assert self.socket.poll(int(1000 * timeout_s)), "no message"
        return msgspec.msgpack.decode(self.socket.recv(), type=ToFrontend)

    def wait_for(self, wanted: Callable[[ToFrontend], bool]) -> ToFrontend:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            message = self.receive()
            if wanted(message):
                return message
        raise AssertionError("the message did not come")

    def ends(self, uids: set[int]) -> dict[int, list[TokenEvent | Rejected]]:
        """All that is told about ``uids`` until each has its end."""
        told: dict[int, list[TokenEvent | Rejected]] = {uid: [] for uid in uids}
        missing = set(uids)
        while missing:
            match self.receive():
                case Outputs() as outputs:
                    for event in outputs.each():
                        if event.uid not in missing:
                            continue
                        told[event.uid].append(event)
                        if event.finish:
                            missing.remove(event.uid)
                case Rejected() as rejected:
                    told[rejected.uid].append(rejected)
                    missing.remove(rejected.uid)
        return told

    def close(self) -> None:
        self.socket.close()
        self._context.term()


class Engine:
    """An engine loop in a thread; an error in it fails the test."""

    def __init__(self, address: str, **harness_options: object) -> None:
        self.address = address
        self.harness = Harness(**harness_options)  # type: ignore[arg-type]
        self.frontends = Frontends(address)
        self.grammars = FakeGrammars()
        self.pulse = Pulse()
        limits = SchedulerLimits(max_model_len=512, vocab_size=50, step_tokens=64)
        built = BuiltEngine(
            self.harness.runner, self.harness.cache, self.grammars, limits, True, False, "a fake", self.pulse
        )
        self.loop = EngineLoop(self.frontends, self.harness.scheduler, built)
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run(self.stopping.is_set)
        except BaseException as error:
            self.error = error

    def stop(self) -> None:
        self.stopping.set()
        self.grammars.release.set()
        self.thread.join()
        self.frontends.close()
        if self.harness.runner.violation is not None:
            raise self.harness.runner.violation
        if self.error is not None:
            raise self.error


@contextmanager
def running(tmp_path: Path, **harness_options: object) -> Iterator[Engine]:
    engine = Engine(f"ipc://{tmp_path}/engine", **harness_options)
    try:
        yield engine
    finally:
        engine.stop()


@contextmanager
def connected(engine: Engine, pid: int | None = None) -> Iterator[Client]:
    client = Client(engine.address, pid)
    try:
        client.wait_for(lambda message: isinstance(message, EngineStatus))
        yield client
    finally:
        client.close()


def submit(uid: int, prompt: list[int], sampling: SamplingParams | None = None, request_id: str = "") -> Submit:
    sampling = sampling or SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    return Submit(uid, request_id, np.array(prompt, "<i4").tobytes(), sampling)


FOREVER = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def is_quiet(client: Client) -> bool:
    """Whether nothing runs or waits, by the engine's own account."""
    while client.socket.poll(0):
        client.receive()  # what was said before the question
    client.send(Ping())
    status = client.wait_for(lambda message: isinstance(message, EngineStatus))
    assert isinstance(status, EngineStatus)
    stats = status.stats
    held = stats.kv_total_tokens - stats.kv_free_tokens - stats.kv_evictable_tokens
    return stats.running == stats.waiting == held == 0


def test_requests_of_two_frontends_are_answered_each_to_its_own(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as first, connected(engine) as second:
        prompts = {uid: [uid + 1, *range(2, 20)] for uid in range(10)}
        for uid, prompt in prompts.items():
            first.send(submit(uid, prompt))
            second.send(submit(uid, prompt[::-1]))
        for client, order in ((first, 1), (second, -1)):
            for uid, events in client.ends(set(prompts)).items():
                tokens = [token for event in events if isinstance(event, TokenEvent) for token in event.token_ids]
                sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
                assert tokens == expected_output(prompts[uid][::order], sampling, 50, 512)[0]
        assert is_quiet(first)


def test_hello_and_ping_are_answered_and_heartbeats_come_by_themselves(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client:
        client.send(Ping())
        statuses = [client.receive(timeout_s=2.0) for _ in range(3)]
        for status in statuses:
            assert isinstance(status, EngineStatus)
            assert (status.phase, status.pid, status.max_model_len) == ("ready", os.getpid(), 512)


def test_heartbeats_go_on_under_load(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client:
        client.send(*(submit(uid, [uid + 1], FOREVER) for uid in range(8)))
        seen = 0
        while seen < 3:
            seen += isinstance(client.receive(), EngineStatus)
            client.send(Abort(7), submit(100 + seen, [5, 6, 7], FOREVER))


def test_heartbeats_go_on_within_a_step_that_computes_for_long(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client:
        launch, go_on = engine.harness.runner.launch, threading.Event()

        def launch_slowly(plan: StepPlan) -> PendingStep:
            while not go_on.wait(0.01):
                engine.pulse()
            return launch(plan)

        engine.harness.runner.launch = launch_slowly  # type: ignore[method-assign, assignment]
        try:
            client.send(submit(1, [1, 2]))
            client.wait_for(lambda message: isinstance(message, EngineStatus) and message.stats.running == 1)
            for _ in range(2):
                assert isinstance(client.receive(), EngineStatus)
        finally:
            go_on.set()
        assert client.ends({1})


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        b"\xff" * 100,
        msgspec.msgpack.encode({"type": "submit"}),
        msgspec.msgpack.encode({"type": "nonsense", "uid": 1}),
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode({"type": "abort", "uid": "x"}),
    ],
    ids=["empty", "zero", "bytes", "no fields", "unknown type", "no map", "wrong type"],
)
def test_malformed_messages_change_nothing(tmp_path: Path, body: bytes) -> None:
    with running(tmp_path) as engine, connected(engine) as client:
        client.socket.send(body)
        client.wait_for(lambda message: isinstance(message, Unreadable))
        client.socket.send_multipart([body, body])
        client.send(submit(1, [1, 2, 3]))
        assert client.ends({1})


def test_malformed_submits_with_a_uid_are_refused(tmp_path: Path) -> None:
    bodies = [
        {"type": "submit", "uid": 1, "request_id": "", "prompt_ids": "text", "sampling": {}},
        {"type": "submit", "uid": 2, "request_id": "", "prompt_ids": b"\1\0\0\0", "sampling": {"temperature": -1.0}},
        {"type": "submit", "uid": 3, "request_id": "", "prompt_ids": b"\1\0\0", "sampling": {}},
        {"type": "submit", "uid": 4, "request_id": "", "prompt_ids": b"\1\0\0", "sampling": {"grammar": "5"}},
    ]
    with running(tmp_path) as engine, connected(engine) as client:
        for body in bodies:
            client.socket.send(msgspec.msgpack.encode(body))
        told = client.ends({1, 2, 3, 4})
        assert all(isinstance(event, Rejected) for events in told.values() for event in events)
        refused = told[2][0]
        assert isinstance(refused, Rejected) and refused.param == "temperature"


def test_rejections_and_a_full_queue_are_answered(tmp_path: Path) -> None:
    options = SchedulerOptions(max_num_seqs=2, max_num_queued_reqs=8)
    with running(tmp_path, options=options) as engine, connected(engine) as client:
        uids = set(range(300))
        client.send(*(submit(uid, [uid % 49 + 1, 2, 3]) for uid in uids))
        ends = [events[-1] for events in client.ends(uids).values()]
        refused = [end for end in ends if isinstance(end, Rejected)]
        assert len(ends) - len(refused) >= 10
        assert {end.status for end in refused} <= {429}
        assert is_quiet(client)


def test_aborts_by_uid_and_by_request_id(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client, connected(engine) as other:
        client.send(submit(1, [1, 2], FOREVER), submit(2, [3, 4], FOREVER, "x"), submit(3, [5, 6], FOREVER, "y"))
        client.wait_for(lambda message: isinstance(message, Outputs))
        client.send(Abort(1), Abort(99))
        other.send(AbortRequest("x"), AbortRequest("nobody"))
        for events in client.ends({1, 2}).values():
            assert isinstance(events[-1], TokenEvent) and events[-1].finish is FinishReason.ABORT
        other.send(AbortRequest(""))
        assert client.ends({3})
        assert is_quiet(client)


def limited(grammar: str) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=40, grammar=grammar)


def test_a_request_waits_for_its_grammar_and_nobody_for_the_request(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client:
        client.send(submit(1, [1, 2], limited("slow 5")), submit(2, [1, 2], limited("slow 5")))
        client.send(submit(3, [1, 2], limited("4")), submit(4, [1, 2]), submit(5, [1, 2], limited("bad")))
        told = client.ends({3, 4, 5})
        refused = told[5][-1]
        assert isinstance(refused, Rejected) and (refused.param, refused.status) == ("grammar", 400)
        client.send(Ping())
        status = client.wait_for(lambda message: isinstance(message, EngineStatus) and not message.stats.running)
        assert isinstance(status, EngineStatus) and status.stats.waiting == 2
        engine.grammars.release.set()
        ends = [events[-1] for events in client.ends({1, 2}).values()]
        assert [end.finish for end in ends if isinstance(end, TokenEvent)] == [FinishReason.STOP] * 2
        assert sorted(engine.grammars.compiled) == ["4", "slow 5"], "compiled once for both"
        wait_until(lambda: is_quiet(client))


def test_who_watches_is_shown_requests_steps_and_the_tree_and_nobody_else_is(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client, connected(engine) as other:
        client.send(Watch(anew=True))
        first = client.wait_for(lambda message: isinstance(message, Observation))
        assert isinstance(first, Observation) and first.view.tree == []
        client.send(submit(1, list(range(1, 13)), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), "mine"))
        kinds: list[str] = []
        chunks: list[tuple[str, int, int]] = []
        while "unlock" not in kinds or not chunks:
            client.send(Watch())
            message = client.wait_for(lambda message: isinstance(message, Observation))
            assert isinstance(message, Observation)
            assert {event.owner for event in message.view.events} <= {"mine"}
            kinds += [event.kind for event in message.view.events]
            chunks += [chunk for step in message.view.steps for chunk in step.chunks]
        assert kinds[:3] == ["match", "insert", "lock"] and chunks == [("mine", 0, 12)]
        client.send(Watch(anew=True))  # a page that was opened later
        again = client.wait_for(lambda message: isinstance(message, Observation) and message.view.tree is not None)
        assert isinstance(again, Observation) and again.view.tree
        other.send(Ping())
        assert isinstance(other.receive(), EngineStatus)


def test_a_watch_ends_with_its_lease() -> None:
    now = [0.0]
    harness = Harness()
    watch = EngineWatch(harness.scheduler, harness.cache, lambda: now[0])
    watch.renew(b"f", anew=True)
    assert watch.take() is not None
    assert watch.take() is None, "too early for the next"
    now[0] += LEASE_S + 1
    assert watch.take() is None and not watch.watched


def test_requests_that_wait_for_a_grammar_can_be_aborted(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client, connected(engine) as other:
        client.send(submit(1, [1, 2], limited("slow 5")), submit(2, [1, 2], limited("slow 5"), "x"), Ping())
        client.wait_for(lambda message: isinstance(message, EngineStatus) and message.stats.waiting == 2)
        client.send(Abort(1))
        other.send(AbortRequest("x"))
        for events in client.ends({1, 2}).values():
            assert isinstance(events[-1], TokenEvent) and events[-1].finish is FinishReason.ABORT
        assert is_quiet(client)


def test_flush_is_answered_with_its_call_number(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as client:
        client.send(submit(1, list(range(1, 42))))
        client.ends({1})
        client.send(FlushCache(17))
        flushed = client.wait_for(lambda message: isinstance(message, CacheFlushed))
        assert isinstance(flushed, CacheFlushed) and flushed.call == 17 and flushed.num_tokens >= 40


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


@pytest.mark.parametrize("has_pidfd", [True, False])
def test_requests_of_a_dead_frontend_are_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_pidfd: bool
) -> None:
    if not has_pidfd:
        monkeypatch.delattr(frontends_module.os, "pidfd_open")
    process = _sleeper()
    with running(tmp_path) as engine, connected(engine) as witness, connected(engine, process.pid) as doomed:
        doomed.send(Hello(process.pid))  # as one does that heard nothing for a while
        doomed.send(*(submit(uid, [uid + 1, 2], FOREVER) for uid in range(20)))
        doomed.wait_for(lambda message: isinstance(message, Outputs))
        process.kill()
        process.wait()
        wait_until(lambda: is_quiet(witness))
        assert engine.harness.scheduler.stats().aborted >= 16


def test_requests_of_a_frontend_that_closed_its_socket_are_aborted(tmp_path: Path) -> None:
    with running(tmp_path) as engine, connected(engine) as witness:
        with connected(engine) as leaving:
            leaving.send(*(submit(uid, [uid + 1, 2], FOREVER) for uid in range(4)))
            leaving.wait_for(lambda message: isinstance(message, Outputs))
        wait_until(lambda: is_quiet(witness))


def test_a_hello_of_a_process_that_is_gone_harms_nobody(tmp_path: Path) -> None:
    process = _sleeper()
    process.kill()
    process.wait()
    with running(tmp_path) as engine, connected(engine, process.pid), connected(engine) as client:
        client.send(submit(1, [1, 2, 3]))
        assert client.ends({1})


def test_idle_loop_checks_integrity_and_an_error_there_ends_it(tmp_path: Path) -> None:
    engine = Engine(f"ipc://{tmp_path}/engine")
    with connected(engine) as client:
        client.send(submit(1, list(range(1, 20))))
        client.ends({1})
    engine.harness.cache._pool._num_free -= 1  # lose a page: no public door does that
    engine.thread.join(timeout=10)
    with pytest.raises(AssertionError):
        engine.stop()

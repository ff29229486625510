"""``radixserve chat`` and ``complete`` against a running server, through pipes and in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from radixserve.tests.server.service import Service, running_service

RADIXSERVE = [sys.executable, "-m", "radixserve.server.cli"]
READY = "\x1b[?2004h"  # the prompt asks the terminal to mark pasted text


def radixserve(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*RADIXSERVE, *arguments], input=stdin, capture_output=True, text=True, timeout=30)


def last_prompt(service: Service) -> str:
    return bytes(i for i in np.frombuffer(service.engine.submits[-1].prompt_ids, np.int32) if i < 256).decode()


def test_complete_streams_the_continuation_of_its_argument(service: Service) -> None:
    done = radixserve("complete", "say <<hello>>", "--url", service.url, "--stats", "--max-tokens", "9")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    assert "13 prompt tokens (0 cached), 6 generated; TTFT" in done.stderr


def test_complete_reads_standard_input_without_its_last_line_end(service: Service) -> None:
    done = radixserve("complete", "--url", f"{service.url}/v1/", stdin="one\n<<two>>\n")
    assert (done.returncode, done.stdout) == (0, "two\n")
    assert last_prompt(service) == "one\n<<two>>"


def test_sampling_flags_reach_the_engine(service: Service) -> None:
    radixserve("complete", "x", "--url", service.url, "--temperature", "0.5", "--top-p", "0.25", "--seed", "7")
    sampling = service.engine.submits[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.25, 7)


@pytest.mark.parametrize("command", ["complete", "chat"])
def test_a_reader_that_has_enough_is_no_error(service: Service, command: str) -> None:
    line = [*RADIXSERVE, command, "--url", service.url]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        process.stdin.write(b"<<abc>> {slow}\n")
        process.stdin.close()
        assert process.stdout.read(1) == b"a"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait(20) == 0


@pytest.mark.parametrize("command", ["complete x --url URL", "models"])
def test_a_full_disk_is_told_in_one_line(service: Service, command: str) -> None:
    with open("/dev/full", "w") as full:
        line = [*RADIXSERVE, *command.replace("URL", service.url).split()]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30)
        assert (done.returncode, done.stderr) == (2, "radixserve: error: [Errno 28] No space left on device\n")
        assert subprocess.run(line, stdout=full, stderr=full, timeout=30).returncode == 2


def test_who_writes_nothing_needs_no_room(service: Service) -> None:
    with open("/dev/full", "w") as full:
        command = [*RADIXSERVE, "chat", "--url", service.url]
        assert subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, timeout=30).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "URL", "--model", "other"], "--model other is not served at URL; served: tiny"),
        (["--url", "127.0.0.1:9"], "no server at http://127.0.0.1:9"),
        (["--url", "URL", "--", "--port", "1"], "options after -- are for a server that is started here"),
        (["--", "--max-model-len", "none"], "--max-model-len"),
        (["--model", "./no-such-model"], "model './no-such-model' does not exist"),
    ],
)
def test_mistakes_are_one_line_with_the_remedy(service: Service, arguments: list[str], message: str) -> None:
    done = radixserve("complete", "x", *[argument.replace("URL", service.url) for argument in arguments])
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("radixserve: error: ") and done.stderr.count("\n") == 1
    assert message.replace("URL", service.url) in done.stderr


def test_a_key_is_sent_and_a_missing_one_is_told(folder: Path) -> None:
    with running_service(folder, api_key=("secret",)) as guarded:
        refused = radixserve("complete", "<<x>>", "--url", guarded.url)
        assert refused.returncode == 2 and "a valid API key is needed" in refused.stderr
        assert radixserve("complete", "<<x>>", "--url", guarded.url, "--api-key", "secret").stdout == "x\n"


def test_each_line_of_a_pipe_is_a_message_of_one_conversation(service: Service) -> None:
    lines = ["my <<first>>", "", "/nonsense", "<<second>>", "/stats", "/reset", "<<third>>", "/quit", "<<never>>"]
    done = radixserve("chat", "--url", service.url, "--system", "Be brief", stdin="\n".join(lines))
    assert done.returncode == 0, done.stderr
    first, unknown, second, stats, third = done.stdout.splitlines()
    assert (first, second, third) == ("first", "first", "third")  # the fake engine answers the first <<>> it finds
    assert unknown == "there is no command /nonsense; /help lists them"
    assert stats.split()[1:3] == ["prompt", "tokens"] and "tokens/s" in stats
    prompts = [bytes(i for i in np.frombuffer(s.prompt_ids, np.int32) if i < 256).decode() for s in
               service.engine.submits[-3:]]  # fmt: skip
    assert prompts[1].count("my <<first>>") == 1 and "assistant\nfirst" in prompts[1] and "<<second>>" in prompts[1]
    assert "first" not in prompts[2] and "system\nBe brief" in prompts[2]


def test_reasoning_is_shown_on_a_terminal_only_and_forgotten(folder: Path) -> None:
    with running_service(folder, reasoning_parser="qwen3") as thinker:
        first, second = "<<<think>why</think>because>>", "<<so>>"
        done = radixserve("chat", "--url", thinker.url, stdin=f"{first}\n{second}\n")
        assert done.stdout == "because\nbecause\n", done.stderr
        assert "assistant\nbecause" in last_prompt(thinker)
        with terminal(folder, "--url", thinker.url) as screen:
            screen.expect(READY)
            screen.type(f"{first}\r")
            screen.expect("\x1b[2mw\x1b[0m")
            screen.expect("because\r\n")


def test_a_message_that_fails_is_told_and_forgotten(service: Service) -> None:
    done = radixserve("chat", "--url", service.url, stdin="{reject}\n<<fine>>\n")
    assert (done.returncode, done.stdout) == (0, "fine\n")
    assert done.stderr == "error: the queue is full\n"


def test_system_sets_the_prompt_and_forgets(service: Service) -> None:
    radixserve("chat", "--url", service.url, stdin="<<old>>\n/system Speak French\n<<new>>\n")
    assert "Speak French" in last_prompt(service) and "old" not in last_prompt(service)


def test_control_characters_of_a_model_do_not_reach_the_terminal(service: Service) -> None:
    done = radixserve("chat", "--url", service.url, stdin="<<a\x1b[2Jb>>\n")
    assert done.stdout == "a[2Jb\n"


class Terminal:
    """The other side of a terminal in which ``radixserve chat`` runs."""

    def __init__(self, fd: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._fd = fd
        self.seen = ""

    def type(self, text: str) -> None:
        self.seen = ""
        os.write(self._fd, text.encode())

    def expect(self, text: str) -> None:
        deadline = time.monotonic() + 20
        while text not in self.seen:
            ready, _, _ = select.select([self._fd], [], [], max(0, deadline - time.monotonic()))
            assert ready, f"{text!r} did not appear in {self.seen!r}"
            self.seen += os.read(self._fd, 4096).decode(errors="replace")


@contextlib.contextmanager
def terminal(home: Path, *arguments: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*RADIXSERVE, "chat", *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "XDG_STATE_HOME": str(home), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
    )
    os.close(theirs)
    try:
        yield Terminal(ours, process)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_a_terminal_has_many_lines_ctrl_c_history_and_ctrl_d(service: Service, tmp_path: Path) -> None:
    with terminal(tmp_path, "--url", service.url) as screen:
        screen.expect("Ctrl-D leaves")
        screen.expect(READY)
        screen.type("two\x1b\rlines <<hello>>\r")
        screen.expect("hello\r\n")
        assert "two\nlines <<hello>>" in last_prompt(service)
        screen.expect(READY)
        screen.type("/reset\r")
        screen.expect(READY)
        screen.type(f"<<{60 * 'tick '}>> {{slow}}\r")
        screen.expect("\x1b[?2004ltick")
        num_aborted = len(service.engine.aborted)
        os.kill(screen.process.pid, signal.SIGINT)
        screen.expect("(stopped)")
        service.wait_until(lambda: len(service.engine.aborted) == num_aborted + 1)
        screen.expect(READY)
        screen.type("\x04")
        assert screen.process.wait(20) == 0
    assert "two" in (tmp_path / "radixserve" / "chat_history").read_text()


def test_a_chat_needs_no_place_for_its_history(service: Service) -> None:
    with terminal(Path("/proc/none"), "--url", service.url) as screen:
        screen.expect(READY)
        screen.type("<<hello>>\r")
        screen.expect("hello\r\n")
        screen.expect(READY)
        screen.type("\x04")
        assert screen.process.wait(20) == 0

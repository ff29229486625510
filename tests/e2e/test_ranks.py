"""A real server whose model is on two ranks: it answers as one rank does; one is killed, and all are started again; in
the end none is left."""

from __future__ import annotations

import json
import os
import signal
import tempfile
from pathlib import Path

import httpx
import psutil
import pytest

from radixserve.engine.llm import LLM
from radixserve.engine.sampling_params import SamplingParams
from radixserve.tests.e2e.server_process import RunningServer, running_server
from radixserve.tests.e2e.test_faults import SHORT, Client, answers_again
from radixserve.tests.server.byte_model import write_byte_model

SIZES = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32_768}
FLAGS = ("--load-format=dummy", "--dtype=float32", "--device=cpu", "--cpu-threads=1", "--tensor-parallel-size=2")


def follower_of(server: RunningServer) -> int:
    (pid,) = (pid for pid in server.children() if "radixserve.engine.follower" in psutil.Process(pid).cmdline())
    return pid


def greedy_answer(server: RunningServer) -> str:
    answer = httpx.post(f"{server.url}/v1/completions", json={**SHORT, "temperature": 0}, timeout=20)
    return str(answer.json()["choices"][0]["text"])


def test_two_ranks_answer_as_one_and_start_again_when_one_is_killed(tmp_path: Path) -> None:
    folder = write_byte_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text()) | SIZES
    (folder / "config.json").write_text(json.dumps(config))
    with LLM(str(folder), load_format="dummy", dtype="float32", device="cpu", cpu_threads=1, num_pages=64) as llm:
        (completion,) = llm.generate("hello", SamplingParams(temperature=0, ignore_eos=True, max_tokens=4))
        expected = completion.text
    with tempfile.TemporaryDirectory(prefix="rs-") as temporary, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", temporary)
        patch.setenv("XDG_RUNTIME_DIR", temporary)
        with running_server("--model", str(folder), *FLAGS, output=str(tmp_path / "log")) as server:
            assert greedy_answer(server) == expected
            engine, follower = server.engine_pid(), follower_of(server)
            client = Client(server)
            os.kill(follower, signal.SIGKILL)
            client.join(10)
            assert not client.is_alive() and "engine" in client.end
            answers_again(server)
            assert server.engine_pid() != engine and follower_of(server) != follower
            assert f"rank 1 (process {follower}) was killed by signal 9" in server.log()
            assert "Traceback" not in server.log()
            assert greedy_answer(server) == expected
            processes = [psutil.Process(pid) for pid in server.children()]
            Client(server)
            os.kill(server.engine_pid(), signal.SIGKILL)  # now the other way round, in the midst of steps
            server.process.terminate()
            assert server.process.wait(20) == 0
            _, alive = psutil.wait_procs(processes, timeout=5)
            assert alive == []
        assert os.listdir(temporary) == []

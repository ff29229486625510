"""The code of README, docs and examples runs: against one server, or by itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass, fields
from importlib import import_module
from pathlib import Path

import pytest

from radixserve.configs.sources import file_layer, merge
from radixserve.engine.llm import Completion
from radixserve.engine.sampling_params import SamplingParams
from radixserve.server.cli import COMMANDS
from radixserve.server.commands import bench
from radixserve.server.commands.client import split_serve_options
from radixserve.server.commands.serve import parse_flags, read_config
from radixserve.tests.e2e.server_process import RunningServer

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_SERVER = re.compile(r"(?:http://)?(?:localhost|127\.0\.0\.1):8000")


@dataclass(frozen=True)
class Block:
    """Code on a page, in the language that its fence names."""

    page: str
    line: int
    language: str
    code: str


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            if match[1] == language:
                found.append(Block(page.name, text[: match.start()].count("\n") + 1, language, match[2]))
    return found


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def for_server(code: str, server: RunningServer) -> str:
    """With the address of ``server`` in the place of the default one."""
    return _SERVER.sub(lambda found: server.url if found[0].startswith("http") else server.url[7:], code)


def run_python(code: str, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other libraries
        exec(compile(code, name, "exec"), {"__name__": "__main__"})


# Their subjects have tests of their own with the default model, in tests/contract.
_SLOW_PAGES = ("structured_output.md", "tool_calling.md", "python.md")


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.soak] if block.page in _SLOW_PAGES else [], id=name_of(block))
        for block in blocks("python")
    ],
)
def test_python_of_the_pages_runs(block: Block, server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    run_python(for_server(block.code, server), name_of(block))
    assert capsys.readouterr().out.strip()


def test_the_page_about_python_names_every_rule_and_every_part_of_an_answer() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    names = [*SamplingParams.__struct_fields__, *(part.name for part in fields(Completion))]
    assert [name for name in names if f"`{name}`" not in page] == []


CURLS = [block for block in blocks("sh") if block.code.startswith("curl")]


@pytest.mark.parametrize("block", CURLS, ids=name_of)
def test_curls_of_the_pages_get_an_answer(block: Block, server: RunningServer) -> None:
    code = for_server(block.code, server).replace("curl ", "curl -sS --fail-with-body ", 1)
    done = subprocess.run(["sh", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout, done.stderr + done.stdout


@pytest.mark.parametrize("block", blocks("toml"), ids=name_of)
def test_toml_of_the_pages_is_a_configuration(block: Block, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(block.code)
    merge([file_layer(file)])


@pytest.mark.parametrize("block", blocks("json"), ids=name_of)
def test_json_of_the_pages_is_json(block: Block) -> None:
    assert json.loads(block.code)


@dataclass(frozen=True)
class Command:
    """A line of a page that calls us; ``words`` are those behind ``radixserve``, without redirections."""

    page: str
    line: str
    words: list[str]


def commands() -> list[Command]:
    lines = [(block.page, line) for block in blocks("sh") for line in block.code.splitlines()]
    for page in PAGES:
        lines += [(page.name, line) for line in re.findall(r"^    (radixserve .*)$", page.read_text(), re.MULTILINE)]
    found = []
    for page_name, line in lines:
        called = re.search(rf"\bradixserve ((?:{'|'.join(COMMANDS)})\b[^<>|)]*)", line)
        if called is not None:
            found.append(Command(page_name, line, shlex.split(called[1], comments=True)))
    return found


def name_of_command(command: Command) -> str:
    return f"{command.page}:{'_'.join(command.words)}"


@pytest.mark.parametrize("command", commands(), ids=name_of_command)
def test_commands_of_the_pages_are_understood(command: Command) -> None:
    words = command.words
    own, served = split_serve_options(words)
    match own:
        case ["serve", *flags]:
            served = flags
        case ["bench", "serve", *flags]:
            bench.build_parser("serve").parse_args(flags)
        case ["bench", benchmark, *flags]:
            _, served = bench.build_parser(benchmark).parse_known_args(flags)
        case [name, *flags]:
            import_module(f"radixserve.server.commands.{name}").build_parser().parse_args(flags)
    read_config(parse_flags(served), {})


# Of what cannot be run here, for it downloads a model or serves until it is stopped, the test above checks the flags.
LOCAL = {
    'radixserve complete "The capital of France is" --max-tokens 8': "Paris",
    "radixserve chat  ": "",
    "radixserve models smollm2-135m-instruct": "parameters    134.5 million",
    "radixserve doctor --port 8000": "the default model, smollm2-135m-instruct, is installed",
    "printf 'Name a colour.\\nAnother one.\\n/stats\\n' | radixserve chat --url http://localhost:8000": "TTFT",
    "radixserve complete --url http://localhost:8000 --stats < prompt.txt": "Paris",
    "radixserve bench serve --url http://localhost:8000 --clients 16,64,256 --plot clients.png": "ttft_p50_ms",
}
# These load torch or a model once more, for what tests/commands tries with a small one.
SLOW_COMMANDS = ('radixserve complete "', "radixserve chat  ", "radixserve doctor")
# So that a load takes seconds; everything else of the line is as it stands on the page.
SMALL_LOAD = " --requests 2 --prompt-words 4 --max-tokens 2"


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        pytest.param(line, printed, marks=[pytest.mark.soak] if line.startswith(SLOW_COMMANDS) else [], id=line[:50])
        for line, printed in LOCAL.items()
    ],
)
def test_commands_of_the_pages_work(line: str, printed: str, server: RunningServer, tmp_path: Path) -> None:
    assert any(command.line.startswith(line) for command in commands()), "no longer on a page"
    (tmp_path / "radixserve").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m radixserve.server.cli "$@"\n')
    (tmp_path / "radixserve").chmod(0o755)
    (tmp_path / "prompt.txt").write_text("The capital of France is\n")
    done = subprocess.run(
        ["sh", "-c", for_server(line, server) + (SMALL_LOAD if "bench" in line else "")],
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and printed in done.stdout, done.stderr
    assert ("--stats" in line) == ("TTFT" in done.stderr)
    if "--plot" in line:
        assert (tmp_path / "clients.png").stat().st_size > 10_000


EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# Of these the pages have a shorter form, or tests/contract has.
SLOW = {"langchain_chat.py", "offline.py", "structured_output.py", "tools.py"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.soak] if path.name in SLOW else [], id=path.name) for path in EXAMPLES],
)
def test_examples_run(
    path: Path,
    server: RunningServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    bodies = [{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}, {"messages": []}]
    requests.write_text("".join(json.dumps({"custom_id": f"r{n}", "body": b}) + "\n" for n, b in enumerate(bodies)))
    monkeypatch.setattr(sys, "argv", [str(path), str(requests), str(answers)])
    run_python(for_server(path.read_text(), server), path.name)
    assert capsys.readouterr().out.strip()
    if path.name == "batch_file.py":
        done = [json.loads(line) for line in answers.read_text().splitlines()]
        assert [set(item) for item in done] == [{"custom_id", "body"}, {"custom_id", "error"}]


def test_every_example_is_told_of() -> None:
    listed = set(re.findall(r"\]\((\w+\.py)\)", (ROOT / "examples" / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES}

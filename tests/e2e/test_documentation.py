"""The code of README, docs and examples runs: against one server, or by itself."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from radixserve.configs.options import OPTIONS
from radixserve.configs.sources import file_layer, merge
from radixserve.tests.e2e.server_process import RunningServer

ROOT = Path(__file__).parents[2]
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
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
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
_SLOW_PAGES = ("structured_output.md", "tool_calling.md")


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


def test_flags_of_the_pages_exist() -> None:
    known = {option.flag for option in OPTIONS.values()} | {"--config", "--preset", "--print-config", "--help"}
    serves = [line for block in blocks("sh") for line in block.code.splitlines() if line.startswith("radixserve serve")]
    used = {word.partition("=")[0] for line in serves for word in shlex.split(line, comments=True) if word[:2] == "--"}
    assert used and used - known == set()


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

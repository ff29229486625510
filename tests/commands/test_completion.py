"""``radixserve completion``: what a shell offers after its script was read."""

from __future__ import annotations

import shlex
import shutil
import subprocess

import pytest

from radixserve.server.cli import COMMANDS, main


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
def test_bash_offers_commands_options_and_values(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [
        "radixserve ",
        "radixserve doc",
        "radixserve serve --max-num-s",
        "radixserve serve --preset ",
        "radixserve bench serve --burst",
    ]
    program = script("bash", capsys)
    for line in lines:
        words = [*shlex.split(line), *([""] if line.endswith(" ") else [])]
        program += f"COMP_WORDS=({shlex.join(words)}) COMP_CWORD={len(words) - 1} COMPREPLY=()\n"
        program += "_shtab_radixserve; echo ${COMPREPLY[@]}\n"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=30)
    commands, *others = done.stdout.splitlines()
    assert set(COMMANDS) <= set(commands.split()), done.stderr
    assert others == ["doctor", "--max-num-seqs", "cpu-small latency throughput", "--burstiness"]


@pytest.mark.parametrize(("shell", "start"), [("zsh", "#compdef radixserve\n"), ("fish", "#")])
def test_other_shells_get_every_command(shell: str, start: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert text.startswith(start) and all(name in text for name in COMMANDS)
    checker = shutil.which(shell)
    if checker is not None:
        assert subprocess.run([checker, "-n"], input=text, text=True, timeout=30).returncode == 0

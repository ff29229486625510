"""The command line: what it understands, and one readable line with status 2 for what it does not."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from radixserve import __version__
from radixserve.configs.options import OPTIONS
from radixserve.server.cli import COMMANDS, main
from radixserve.server.commands.serve import parse_flags, read_config


@pytest.fixture(autouse=True)
def no_options_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "PRESET", *(name.upper() for name in OPTIONS)):
        monkeypatch.delenv(f"RADIXSERVE_{name}", raising=False)


def printed_config(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, dict[str, object]]:
    assert main(["serve", "--print-config", *flags]) == 0
    return tomllib.loads(capsys.readouterr().out)


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in COMMANDS)


def test_help_of_serve_tells_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    for option in OPTIONS.values():
        assert f"  {option.flag}" in text and f"[{option.variable}]" in text and f"\n{option.group}:\n" in text


def test_help_breaks_no_word_on_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    text = capsys.readouterr().out
    assert "[RADIXSERVE_MAX_NUM_BATCHED_TOKENS]" in text
    description = text.partition("\n\n")[2].partition("\n\n")[0]
    assert max(map(len, description.splitlines())) <= 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["srve"], "there is no command 'srve'; did you mean serve? (radixserve --help lists them)"),
        (["serve", "--prot", "1"], "unknown option --prot; did you mean --port?"),
        (["serve", "--max-model", "1"], "unknown option --max-model; did you mean --max-model-len?"),
        (["serve", "--port"], "--port: expected one argument"),
        (["serve", "--port=-1"], "--port: '-1' is not allowed, it should be greater than or equal to 0"),
        (["serve", "one", "two"], "unexpected argument two"),
        (["serve", "one", "--model", "two"], "two models: one and --model two"),
        (["serve", "--zzz"], "unknown option --zzz (radixserve serve --help lists them)"),
        (["complete", "--temp", "1", "x"], "unknown option --temp; did you mean --temperature?"),
        (["chat", "--max-tokens", "x"], "--max-tokens: invalid int value: 'x'"),
        (
            ["chat", "--num-pages=40"],
            "--num-pages is an option of `radixserve serve`; those follow --: radixserve chat -- --num-pages=40",
        ),
        (["bench", "serve", "--client", "4"], "unknown option --client; did you mean --clients?"),
        (["bench", "serve", "--json", "/no/such/file"], "--json: /no/such/file cannot be written"),
        (["bench", "offline", "--port", "x"], "--port: 'x' is not allowed, it should be a valid integer"),
        (["doctor", "--port", "x"], "--port: invalid int value: 'x'"),
        (["models", "one", "two"], "unexpected argument two"),
        (["models", "none"], "model 'none' is not on this machine; `radixserve models` lists what is"),
        (["completion", "ksh"], "SHELL: invalid choice: 'ksh' (choose from 'bash', 'zsh', 'fish')"),
        (["serve", "--config", "/no/such.toml"], "cannot read config file /no/such.toml: No such file or directory"),
    ],
)
def test_a_mistake_is_one_line_with_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == f"radixserve: error: {message}\n"


def test_print_config_shows_what_is_in_effect_without_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    printed = printed_config(capsys, "Org/Model-1B", "--api-key=k-secret", "--no-enforce-eager", "--max_num_seqs", "3")
    assert printed["model"]["model"] == "Org/Model-1B"
    assert printed["runner"]["enforce_eager"] is False
    assert printed["scheduler"]["max_num_seqs"] == 3
    assert "k-secret" not in str(printed)


def test_flags_win_over_variables_file_and_preset(tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("port = 3\nmax_num_seqs = 3\nmax_num_queued_reqs = 3")
    environ = {
        "RADIXSERVE_CONFIG": str(file),
        "RADIXSERVE_PRESET": "latency",
        "RADIXSERVE_PORT": "2",
        "RADIXSERVE_MAX_NUM_SEQS": "2",
    }
    config = read_config(parse_flags(["--port", "1"]), environ)
    assert (config.port, config.max_num_seqs, config.max_num_queued_reqs) == (1, 2, 3)
    assert config.max_num_batched_tokens == 512


def test_lists_and_switches_as_flags() -> None:
    flags = ["--served-model-name=a,b", "--served-model-name", "c", "--disable-overlap-schedule"]
    config = read_config(parse_flags(flags), {})
    assert config.served_model_name == ("a", "b", "c")
    assert config.disable_overlap_schedule is True

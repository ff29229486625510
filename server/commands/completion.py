"""``radixserve completion SHELL``: prints a script with which a shell completes commands, options and values."""

from __future__ import annotations

from argparse import _SubParsersAction
from collections.abc import Sequence
from importlib import import_module

import shtab

from radixserve.server.cli import COMMANDS
from radixserve.server.commands import bench
from radixserve.server.commands.parser import Parser

_SHELLS = ("bash", "zsh", "fish")
_PATHS = ("FILE", "FOLDER", "MODEL", "NAME")
_DESCRIPTION = """\
Print what makes a shell complete our commands. bash: eval "$(radixserve completion bash)" in ~/.bashrc. zsh: the same
in ~/.zshrc, after compinit. fish: radixserve completion fish > ~/.config/fish/completions/radixserve.fish"""


def build_parser() -> Parser:
    parser = Parser(
        prog="radixserve completion", usage=f"radixserve completion {{{','.join(_SHELLS)}}}", description=_DESCRIPTION
    )
    parser.add_argument("shell", metavar="SHELL", choices=_SHELLS, help=", ".join(_SHELLS))
    return parser


def run(arguments: Sequence[str]) -> int:
    print(shtab.complete(_whole_parser(), build_parser().parse_args(arguments).shell))
    return 0


def _whole_parser() -> Parser:
    """One parser of all commands: each parses its own arguments, but shtab wants a tree."""
    root = Parser(prog="radixserve")
    commands = root.add_subparsers()
    for name, summary in COMMANDS.items():
        match name:
            case "version":
                commands.add_parser(name, help=summary)
            case "bench":
                benchmarks = commands.add_parser(name, help=summary).add_subparsers()
                for benchmark, what in bench.BENCHMARKS.items():
                    _add(benchmarks, benchmark, what, bench.build_parser(benchmark))
            case _:
                parser = import_module(f"radixserve.server.commands.{name}").build_parser()
                _add(commands, name, summary, parser)
    return root


def _add(commands: _SubParsersAction[Parser], name: str, summary: str, parser: Parser) -> None:
    for action in parser._actions:
        metavar = str(action.metavar)
        if metavar in _PATHS or action.dest == "model":
            action.complete = shtab.FILE  # type: ignore[attr-defined]  # what shtab looks for
        elif metavar.startswith("{"):
            action.choices = metavar.strip("{}").split(",")
    commands.add_parser(name, help=summary, parents=[parser], add_help=False)

"""The ``radixserve`` command: finds the subcommand, runs it, and turns errors meant for users into one line.

A subcommand is a module of ``server/commands`` with ``run(arguments) -> exit status``. It is imported when it is
called, so ``radixserve version`` loads nothing else.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from radixserve import __version__
from radixserve.configs.errors import OptionError
from radixserve.engine.errors import RadixServeError

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "chat": "talk to a model in the terminal",
    "complete": "continue a prompt",
    "models": "list the models on this machine, or inspect one",
    "doctor": "find what keeps a server from running well",
    "bench": "measure a running server",
    "completion": "let a shell complete all of this",
    "version": "print the version",
}

_OVERVIEW = """\
usage: radixserve COMMAND [options]

OpenAI-compatible LLM inference server with a radix prefix cache.

commands:
{}

radixserve COMMAND --help tells the options of a command."""
EXIT_USAGE = 2
_STDOUT_FD = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status: 2 for a mistake in the command line or configuration."""
    match list(sys.argv[1:] if arguments is None else arguments):
        case [] | ["-h" | "--help" | "help", *_]:
            print(_OVERVIEW.format("\n".join(f"  {name:<10} {summary}" for name, summary in COMMANDS.items())))
            return 0
        case ["version" | "--version" | "-V", *_]:
            print(__version__)
            return 0
        case [name, *rest] if name in COMMANDS:
            return _run(name, rest)
        case [name, *_]:
            close = get_close_matches(name, COMMANDS, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            return _fail(f"there is no command {name!r}{hint} (radixserve --help lists them)")
    raise AssertionError("unreachable")


def _run(name: str, arguments: list[str]) -> int:
    try:
        status: int = import_module(f"radixserve.server.commands.{name}").run(arguments)
        if sys.stdout is not None:  # as it is where it was closed before the start
            sys.stdout.flush()  # what cannot be written is told here, not at the exit
    except (RadixServeError, OptionError) as error:
        return _fail(str(error))
    except BrokenPipeError:  # `| head` has seen enough
        _forget_output()
        return 0
    except OSError as error:  # a full disk, mostly
        _forget_output()
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def _forget_output() -> None:
    """What could not be written is not tried again at the exit, where Python would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT_FD)


def _fail(message: str) -> int:
    with contextlib.suppress(OSError):  # it may lead to a full disk, too
        print(f"radixserve: error: {message}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())

"""``radixserve complete``: continue one prompt, from the command line or standard input."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from radixserve.engine.errors import ConfigError
from radixserve.server.commands.client import COMPLETION_PATH, Reply, client_parser, connected, split_serve_options
from radixserve.server.commands.parser import Parser


def build_parser() -> Parser:
    parser = client_parser("complete", "[PROMPT]", "Continue a prompt: the text goes to standard output as it comes.")
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the text to continue (default: standard input)")
    parser.add_argument("--stats", action="store_true", help="tell tokens and times on standard error afterwards")
    return parser


def run(arguments: Sequence[str]) -> int:
    own, serve_options = split_serve_options(arguments)
    flags = build_parser().parse_args(own)
    prompt = flags.prompt if flags.prompt is not None else _read_prompt()
    if not prompt:
        raise ConfigError("the prompt is empty: give it as an argument or on standard input")
    reply = Reply()
    with connected(flags, serve_options) as client:
        for piece in client.stream(COMPLETION_PATH, {"prompt": prompt}, reply):
            print(piece.text, end="", flush=True)
        print(flush=True)
    if flags.stats:
        print(reply.summary(), file=sys.stderr)
    return 0


def _read_prompt() -> str:
    """Without the last line's end: models continue a line, and `echo` adds one."""
    if sys.stdin.isatty():
        print("(the prompt, then Ctrl-D)", file=sys.stderr)
    return sys.stdin.read().removesuffix("\n")

"""Flags of the benchmarks, and where their figures go."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixserve import __version__
from radixserve.server.commands.parser import Parser
from radixserve.server.commands.serve import parse_flags, read_config

_MODEL_LEN = 4096
_VOCAB = 10_000  # random ids lie below, where any model has ids


def engine_options(arguments: Sequence[str], **defaults: Any) -> dict[str, Any]:
    """Options for ``LLM`` from the flags (and variables) of ``radixserve serve``. Loading shows how far it is."""
    config = read_config(parse_flags(arguments), os.environ)
    return {"show_progress": True, **defaults, **config.model_dump(exclude_unset=True)}


def engine_parser(name: str, description: str | None) -> Parser:
    """With the flags that all benchmarks of the engine alone have."""
    parser = Parser(prog=f"radixserve bench {name}", description=description)
    parser.add_argument("--seed", type=int, default=0, help="seed of the workload (default: %(default)s)")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the figures there as well")
    return parser


def model_len(longest: int) -> int:
    """Context for requests of up to ``longest`` tokens, unless --max-model-len says otherwise."""
    return max(_MODEL_LEN, longest)


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCAB) for _ in range(count)]


def write_json(path: Path | None, name: str, arguments: Sequence[str], facts: Mapping[str, Any]) -> None:
    """``facts``, and how benchmark ``name`` came to them, without keys."""
    if path is None:
        return
    command = shlex.join(["radixserve", "bench", name, *_without_keys(arguments)])
    path.write_text(json.dumps({"radixserve": __version__, "command": command, **facts}, indent=2) + "\n")


def _without_keys(arguments: Sequence[str]) -> Iterator[str]:
    words = iter(arguments)
    for word in words:
        if word == "--api-key":
            next(words, None)
        elif not word.startswith("--api-key="):
            yield word


def output_file(text: str) -> Path:
    """A path that can be written, told before the measurement and not after it."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text} cannot be written")
    return path


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is less than 0")
    return value


def above_zero(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def span(text: str) -> tuple[int, int]:
    """LOW:HIGH, or one number for both."""
    low, _, high = text.partition(":")
    bounds = positive(low), positive(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text}: the first number is the larger one")
    return bounds


def counts(text: str) -> list[int]:
    """Separated by commas, each at least 1."""
    return [positive(part) for part in text.split(",")]


def rates(text: str) -> list[float]:
    """Separated by commas, each above 0."""
    return [above_zero(part) for part in text.split(",")]

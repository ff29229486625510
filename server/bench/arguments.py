"""Flags of the benchmarks, and where their figures go."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from radixserve.server.commands.parser import Parser
from radixserve.server.commands.serve import parse_flags, read_config

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


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(_VOCAB) for _ in range(count)]


def write_json(path: Path | None, facts: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(facts, indent=2) + "\n")


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


def span(text: str) -> tuple[int, int]:
    """LOW:HIGH, or one number for both."""
    low, _, high = text.partition(":")
    bounds = positive(low), positive(high or low)
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text}: the first number is the larger one")
    return bounds


def numbers(text: str) -> list[float]:
    """Positive numbers, separated by commas."""
    values = [float(part) for part in text.split(",")]
    if min(values) <= 0:
        raise argparse.ArgumentTypeError(f"{text}: not above 0")
    return values

"""What flags of the benchmarks take, and where their figures go."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from radixserve import __version__


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

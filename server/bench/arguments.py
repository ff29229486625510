"""What flags of the benchmarks take, and where their figures go."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from radixserve import __version__

Number = TypeVar("Number", int, float)


def write_json(path: Path | None, name: str, arguments: Sequence[str], facts: Mapping[str, Any]) -> None:
    """``facts``, and how benchmark ``name`` came to them, without keys."""
    if path is None:
        return
    command = shlex.join(["radixserve", "bench", name, *_without_keys(arguments)])
    told = {"radixserve": __version__, "command": command, **facts}
    path.write_text(json.dumps(told, indent=2, default=str) + "\n")  # paths are no JSON


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


def _number(kind: Callable[[str], Number], is_right: Callable[[Number], bool], must_be: str) -> Callable[[str], Number]:
    def number(text: str) -> Number:
        value = kind(text)
        if not is_right(value):
            raise argparse.ArgumentTypeError(f"{text} is not {must_be}")
        return value

    return number


positive = _number(int, lambda value: value >= 1, "at least 1")
count = _number(int, lambda value: value >= 0, "at least 0")
above_zero = _number(float, lambda value: value > 0, "above 0")


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

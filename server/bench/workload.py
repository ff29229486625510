"""What a load test sends: conversations drawn beforehand from a seed, or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from radixserve.engine.errors import ConfigError

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem "
    "hand part place case week company system program question work government number night point home water room "
    "mother area money story fact month lot right study book eye job word business issue side kind head house"
).split()

Message = dict[str, object]


@dataclass(frozen=True)
class Conversation:
    """``opening`` messages, then user texts, each sent once the one before is answered, with ``max_tokens`` for it."""

    opening: tuple[Message, ...]
    turns: tuple[str, ...]
    max_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Workload:
    """Words of a user text and generated tokens are uniform in their ranges. ``prefixes`` system prompts of
    ``prefix_words`` words are shared by all conversations (0: none)."""

    prompt_words: tuple[int, int] = (64, 512)
    max_tokens: tuple[int, int] = (64, 512)
    turns: int = 1
    prefixes: int = 0
    prefix_words: int = 0
    prompts: Path | None = None

    def draw(self, count: int, seed: int) -> list[Conversation]:
        """``count`` conversations; the first ones are the same whatever the count."""
        rng = random.Random(seed)
        systems = [_words(rng, self.prefix_words) for _ in range(self.prefixes)]
        listed = list(_read(self.prompts)) if self.prompts else []
        return [self._conversation(rng, systems, listed[i % len(listed)] if listed else None) for i in range(count)]

    def _conversation(self, rng: random.Random, systems: list[str], entry: Conversation | None) -> Conversation:
        opening: tuple[Message, ...] = ({"role": "system", "content": rng.choice(systems)},) if systems else ()
        if entry is not None:
            limits = entry.max_tokens or (rng.randint(*self.max_tokens),)
            return Conversation((*opening, *entry.opening), entry.turns, limits)
        turns = tuple(_words(rng, rng.randint(*self.prompt_words)) for _ in range(self.turns))
        return Conversation(opening, turns, tuple(rng.randint(*self.max_tokens) for _ in turns))


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which ``count`` conversations begin, ``rate`` a second on average.

    Gaps follow a gamma distribution of shape ``burstiness``: 1 is a Poisson process, less comes in bursts, more is
    more even (the parameter of vLLM's benchmark of the same name).
    """
    rng = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        times.append(now)
        now += rng.gammavariate(burstiness, 1 / (rate * burstiness))
    return times


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


def _read(path: Path) -> Iterator[Conversation]:
    """Each line is a text, or JSON with ``prompt`` or ``messages`` and perhaps ``max_tokens``."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts: {path} cannot be read: {error}") from error
    if not lines:
        raise ConfigError(f"--prompts: {path} has no prompts")
    for number, line in enumerate(lines, 1):
        if not line.startswith("{"):
            yield Conversation((), (line,), ())
            continue
        try:
            yield _entry(json.loads(line))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f'--prompts: {path}, line {number}: expected {{"prompt": text}} or {{"messages": [...]}} ({error!r})'
            ) from error


def _entry(facts: dict[str, object]) -> Conversation:
    limit, messages = facts.get("max_tokens"), facts.get("messages")
    limits = (limit,) if isinstance(limit, int) else ()
    if isinstance(messages, list):
        return Conversation(tuple(messages[:-1]), (str(messages[-1]["content"]),), limits)
    return Conversation((), (str(facts["prompt"]),), limits)

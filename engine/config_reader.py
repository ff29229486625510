"""Typed look-ups in a model's configuration. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from radixserve.engine.errors import ModelError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """Values under the names that a ``config.json`` gives them. All errors are ``ModelError`` and name the key and
    ``source``; ``keys`` holds what the source itself calls a key, where that differs."""

    values: Json
    source: str
    keys: Mapping[str, str] = field(default_factory=dict)

    def over(self, defaults: Json) -> ConfigReader:
        """With ``defaults`` for the keys that are absent. A key that is there and null stays null."""
        return replace(self, values={**defaults, **self.values})

    def section(self, key: str) -> ConfigReader | None:
        """An object inside; None where it is absent, null or empty."""
        value = self.values.get(key) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object")
        return replace(self, values=value, source=f"{self.source}, {key}") if value else None

    def integer(self, key: str) -> int:
        """A size or count, so 1 or more."""
        value = self.optional_integer(key)
        if value is None:
            raise ModelError(f"{self.source}: {self._name(key)} is missing")
        if value <= 0:
            raise ModelError(f"{self.source}: {self._name(key)} is {value}; it must be positive")
        return value

    def optional_integer(self, key: str) -> int | None:
        value = self.values.get(key)
        if value is None:
            return None
        if type(value) is not int:
            raise self._wrong(key, "an integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key, default)
        if not _is_number(value):
            raise self._wrong(key, "a number")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        return None if self.values.get(key) is None else self.number(key)

    def flag(self, key: str, default: bool = False) -> bool:
        return bool(self.values.get(key, default))

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self.values.get(key)
        if not isinstance(value, list) or not all(map(_is_number, value)):
            raise self._wrong(key, "a list of numbers")
        return tuple(map(float, value))

    def items(self, key: str, kind: type[str] | type[int], count: int | None = None) -> list[Any] | None:
        """A list of strings or integers (``count`` of them); None where it is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(not isinstance(item, kind) for item in value):
            raise self._wrong(key, f"a list of {'strings' if kind is str else 'integers'}")
        if count is not None and len(value) < count:
            raise ModelError(f"{self.source}: {self._name(key)} has {len(value)} entries for {count} layers")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Absent, one id or a list of them."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(token_id) is int for token_id in ids):
            raise self._wrong(key, "a token id or a list of them")
        return tuple(ids)

    def _name(self, key: str) -> str:
        return self.keys.get(key, key)

    def _wrong(self, key: str, wanted: str) -> ModelError:
        return ModelError(f"{self.source}: {self._name(key)} must be {wanted}, not {self.values.get(key)!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

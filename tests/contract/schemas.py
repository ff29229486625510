"""Random JSON schemas of the kinds that people ask for."""

from __future__ import annotations

import random
from typing import Any

_WORDS = "name age city items price tags note id kind value count address active".split()


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """An object with one to four properties."""
    names = rng.sample(_WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    if rng.random() < 0.5:
        schema["additionalProperties"] = False
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.35:
        return rng.choice([random_schema, _array, _union])(rng, depth)
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[A-Z][a-z]+$", r"^\d{3}-\d{2}$"])},
            {"type": "string", "format": "date"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 100)},
            {"type": "number", "minimum": 0, "maximum": 10},
            {"type": "integer", "multipleOf": 5},
            {"type": "boolean"},
            {"type": ["string", "null"], "maxLength": 8},
            {"enum": rng.sample(["red", "green", "blue", 1, 2.5, None, True], 3)},
            {"const": rng.choice(["fixed", 7, None])},
        ]
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_value(rng, depth - 1), random_schema(rng, depth - 1)]}

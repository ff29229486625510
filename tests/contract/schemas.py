"""Random JSON schemas of the kinds that people ask for."""

from __future__ import annotations

import random
from typing import Any

_WORDS = [*"name age city items price tags note id kind value count address active".split(), 'a "b"', "naïve", "$ref"]
_NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["value", "next"],
}


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object, with a list of nodes to refer to."""
    return {**_object(rng, 3), "$defs": {"node": _NODE}}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    """With one to four properties."""
    names = rng.sample(_WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {"type": "object", "properties": {name: _value(rng, depth - 1) for name in names}}
    schema["required"] = rng.sample(names, rng.randint(1, len(names)))
    if rng.random() < 0.6:
        schema["additionalProperties"] = rng.choice([False, False, {"type": "boolean"}])
    return schema


def _value(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth > 0 and rng.random() < 0.35:
        return rng.choice([_object, _array, _tuple, _union])(rng, depth)
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 12)},
            {"type": "string", "minLength": 2, "maxLength": rng.randint(2, 20)},
            {"type": "string", "pattern": r"^[^é\s]\S{1,5}.$"},
            {"type": "string", "pattern": rng.choice(["^[a-z]{2,5}$", "^[A-Z][a-z]+$", r"^\d{3}-\d{2}$"])},
            {"type": "string", "format": "date"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 100)},
            {"type": "number", "minimum": 0, "maximum": 10},
            {"type": "integer", "exclusiveMinimum": low + 0.5, "maximum": low + 7.5},
            {"type": "number", "exclusiveMinimum": low / 8, "exclusiveMaximum": low / 8 + 2},
            {"type": "integer", "multipleOf": 5},
            {"$ref": "#/$defs/node"},
            {"type": "boolean"},
            {"type": ["string", "null"], "maxLength": 8},
            {"enum": rng.sample(["red", "green", "blue", 1, 2.5, None, True], 3)},
            {"const": rng.choice(["fixed", 7, None, {"of": ['"', "\n"]}])},
        ]
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    places = [_value(rng, depth - 1), True, _value(rng, 0)][: rng.randint(1, 3)]
    return {"type": "array", "prefixItems": places, "items": False, "minItems": rng.randint(0, len(places))}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    one = _object(rng, depth - 1)
    return rng.choice([{"anyOf": [_value(rng, depth - 1), one]}, {"oneOf": [one, {"type": "null"}]}])

"""What an output must look like, in the one form that the engine compiles: xgrammar's structural tags. No torch.

A *format* is a JSON object with a ``type`` (https://xgrammar.mlc.ai, "structural tag"); formats nest, so that a schema
can follow free reasoning or stand inside a tool call. ``SamplingParams.grammar`` is a whole structural tag, as text.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.patterns import dot_within_lines, flaw, written_in_json

Format = dict[str, Any]

MAX_DEPTH = 64  # of a schema; compilation takes the square of it
# Between two tokens of JSON: enough for a line break or a space, too little for a model to get lost in it.
_MAX_WHITESPACE = 2

# Keywords that say something about a value and that no grammar of ours can hold.
_UNSUPPORTED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies contains minContains maxContains "
    "unevaluatedItems unevaluatedProperties uniqueItems $dynamicRef $recursiveRef".split()
)
# Keywords that limit a value; all others are annotations.
_LIMITS = frozenset(
    "type enum const multipleOf minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength pattern format "
    "items prefixItems additionalItems minItems maxItems properties patternProperties additionalProperties "
    "propertyNames required minProperties maxProperties anyOf oneOf allOf $ref".split()
)
# Whose limits the compiler forgets unless it is told the type.
_OF_STRINGS = frozenset("minLength maxLength pattern format".split())
_OF_NUMBERS = frozenset("multipleOf minimum maximum exclusiveMinimum exclusiveMaximum".split())
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_ROUNDED = {"minimum": math.ceil, "exclusiveMinimum": math.floor, "maximum": math.floor, "exclusiveMaximum": math.ceil}
# Formats that the compiler holds; others are annotations.
_FORMATS = frozenset(
    "date time date-time duration email hostname ipv4 ipv6 json-pointer relative-json-pointer uri uri-reference "
    "uri-template uuid".split()
)
# Keywords beside which the compiler forgets all others.
_ALONE = ("anyOf", "oneOf", "$ref", "enum", "const")
# Where schemas stand inside a schema.
_ONE = ("items", "additionalItems", "additionalProperties", "propertyNames")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def structural_tag(form: Format) -> str:
    """``form`` as ``SamplingParams.grammar``."""
    return json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False, separators=(",", ":"))


def json_schema(schema: Mapping[str, Any] | bool, *, param: str = "grammar") -> Format:
    """JSON that fits ``schema``, its properties in the schema's order and no others unless it names a schema for them.
    Raises ``InvalidRequest`` naming a keyword that cannot be kept, for ``param``."""
    return {
        "type": "json_schema",
        "json_schema": _Schemas(param).prepare(schema, "", 0),
        "max_whitespace_cnt": _MAX_WHITESPACE,
    }


def json_object() -> Format:
    """Any JSON object."""
    return json_schema({"type": "object"})


def checked(form: Any, *, param: str, depth: int = 0) -> Format:
    """A format that a user gives, the schemas in it brought into our form. Raises ``InvalidRequest``."""
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"{param}: is nested more than {MAX_DEPTH} levels deep", param=param)
    if isinstance(form, Mapping) and form.get("type") == "regex" and isinstance(form.get("pattern"), str):
        return {**form, **regex(form["pattern"], param=param)}
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        return {**form, "json_schema": json_schema(form.get("json_schema", True), param=param)["json_schema"]}

    def inner(value: Any) -> Any:
        if isinstance(value, list):
            return [inner(item) for item in value]
        return checked(value, param=param, depth=depth + 1) if isinstance(value, Mapping) else value

    return {key: inner(value) for key, value in form.items()}


def regex(pattern: str, *, param: str = "grammar") -> Format:
    """Text that ``pattern`` matches as a whole. Raises ``InvalidRequest`` for what cannot be kept of it."""
    if reason := flaw(pattern):
        raise InvalidRequest(f"{param}: {reason}", param=param, code="invalid_grammar")
    return {"type": "regex", "pattern": dot_within_lines(pattern)}


def ebnf(grammar: str) -> Format:
    """Text of the rule ``root`` of an EBNF grammar, as llama.cpp writes them (GBNF)."""
    return {"type": "grammar", "grammar": grammar}


def choice(texts: Sequence[str]) -> Format:
    """One of ``texts``."""
    return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}


class _Schemas:
    """Brings schemas into the form whose meaning the compiler keeps; ``param`` is the field to blame."""

    def __init__(self, param: str):
        self._param = param

    def prepare(self, schema: Any, where: str, depth: int) -> Any:
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise self._wrong(where, "must be an object or a boolean")
        if depth > MAX_DEPTH:
            raise self._wrong("", f"the schema is nested more than {MAX_DEPTH} levels deep")
        schema = self._without_all_of(dict(schema), where)
        self._check(schema, where)
        self._check_values(schema, where)
        schema = _rounded(_with_safe_patterns(self._typed(schema, where)))
        for key in _ONE:
            if key in schema:
                schema[key] = self.prepare(schema[key], f"{where}.{key}", depth + 1)
        for key in _LISTS:
            if key in schema:
                schema[key] = self._prepare_list(schema[key], f"{where}.{key}", depth)
        for key in _MAPS:
            if key in schema:
                schema[key] = self._prepare_map(schema[key], f"{where}.{key}", depth)
        return _opened(schema)

    def _prepare_list(self, schemas: Any, where: str, depth: int) -> list[Any]:
        if not isinstance(schemas, list) or not schemas:
            raise self._wrong(where, "must be a list of schemas")
        prepared = [self.prepare(schema, f"{where}[{i}]", depth + 1) for i, schema in enumerate(schemas)]
        return [{} if schema is True else schema for schema in prepared]  # what the compiler takes in a list

    def _prepare_map(self, schemas: Any, where: str, depth: int) -> dict[str, Any]:
        if not isinstance(schemas, Mapping):
            raise self._wrong(where, "must be an object of schemas")
        return {name: self.prepare(schema, f"{where}.{name}", depth + 1) for name, schema in schemas.items()}

    def _without_all_of(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """allOf of one schema, as some generators write references, is that schema."""
        parts = schema.pop("allOf", None)
        if parts is None:
            return schema
        if not isinstance(parts, list) or len(parts) != 1 or not isinstance(parts[0], Mapping) or _says(schema):
            raise self._wrong(f"{where}.allOf", "is supported only with one schema, and no other keywords beside it")
        return {**schema, **parts[0]}

    def _check(self, schema: Mapping[str, Any], where: str) -> None:
        if unsupported := sorted(key for key in _UNSUPPORTED & schema.keys() if schema[key] is not False):
            raise self._wrong(f"{where}.{unsupported[0]}", "is not supported")
        for key in _ALONE:
            if key in schema and (others := sorted(_says(schema) - {key, "type"})):
                raise self._wrong(f"{where}.{others[0]}", f"is not supported beside {key}")
        strings = sorted((_OF_STRINGS - {"format"}) & schema.keys())
        if len(strings) > 1 and "pattern" in strings:
            raise self._wrong(f"{where}.{strings[0]}", "is not supported beside pattern")
        if strings and schema.get("format") in _FORMATS:
            raise self._wrong(f"{where}.{strings[0]}", "is not supported beside format")
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._wrong(f"{where}.required", "must be a list of names")

    def _check_values(self, schema: Mapping[str, Any], where: str) -> None:
        for key in _SIZES:
            size = schema.get(key, 0)
            if not isinstance(size, int) or isinstance(size, bool) or size < 0:
                raise self._wrong(f"{where}.{key}", "must be an integer of 0 or more")
        reference = schema.get("$ref", "#")
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise self._wrong(f"{where}.$ref", "must be # or begin with #/: only this schema itself can be referred to")
        expressions = [(f"{where}.pattern", schema.get("pattern", ""))]
        if isinstance(named := schema.get("patternProperties"), Mapping):
            expressions += [(f"{where}.patternProperties", name) for name in named]
        for place, expression in expressions:
            if not isinstance(expression, str):
                raise self._wrong(place, "must be a string")
            if reason := flaw(expression, in_json=True):
                raise self._wrong(place, reason)

    def _typed(self, schema: dict[str, Any], where: str) -> dict[str, Any]:
        """With the type that its limits are for, and those listed values that are of its type."""
        says = _says(schema)
        if not says & {"type", *_ALONE}:
            if says & _OF_STRINGS:
                schema["type"] = "string"
            elif says & _OF_NUMBERS:
                schema["type"] = "number"
        kinds = _kinds(schema)
        if "type" in schema and not kinds:
            raise self._wrong(f"{where}.type", "must name a type")
        if "multipleOf" in schema and ("number" in kinds or "integer" not in kinds):
            raise self._wrong(f"{where}.multipleOf", "is supported only for integers")
        if "multipleOf" in schema and not (_is_of(factor := schema["multipleOf"], ["integer"]) and 1 <= factor <= 1024):
            raise self._wrong(f"{where}.multipleOf", "must be an integer from 1 to 1024")
        if kinds and isinstance(schema.get("enum"), list):
            schema["enum"] = [value for value in schema["enum"] if _is_of(value, kinds)]
        if kinds and "const" in schema and not _is_of(schema["const"], kinds):
            raise self._wrong(f"{where}.const", "is not of the type")
        return schema

    def _wrong(self, where: str, what: str) -> InvalidRequest:
        place = f"{where.removeprefix('.')}: " if where else ""
        return InvalidRequest(f"{self._param}: {place}{what}", param=self._param, code="invalid_schema")


def _says(schema: Mapping[str, Any]) -> set[str]:
    """The keywords that limit the value."""
    return schema.keys() & _LIMITS


def _kinds(schema: Mapping[str, Any]) -> list[Any]:
    """Its types; none if it has any type."""
    kinds = schema.get("type", [])
    return kinds if isinstance(kinds, list) else [kinds]


def _is_of(value: Any, kinds: Sequence[Any]) -> bool:
    match value:
        case None:
            return "null" in kinds
        case bool():
            return "boolean" in kinds
        case str():
            return "string" in kinds
        case int() | float():
            return "number" in kinds or ("integer" in kinds and value % 1 == 0)
        case list():
            return "array" in kinds
    return "object" in kinds


def _with_safe_patterns(schema: dict[str, Any]) -> dict[str, Any]:
    if "pattern" in schema:
        schema["pattern"] = written_in_json(schema["pattern"])
    if isinstance(named := schema.get("patternProperties"), Mapping):
        schema["patternProperties"] = {written_in_json(name): value for name, value in named.items()}
    return schema


def _rounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The limits of integers as integers, which the compiler wants."""
    if "integer" in _kinds(schema) and "number" not in _kinds(schema):
        for key, whole in _ROUNDED.items():
            if isinstance(limit := schema.get(key), float) and math.isfinite(limit):
                schema[key] = whole(limit)
    return schema


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    """The compiler takes what is not named as forbidden, which suits objects with properties; where a schema says
    nothing at all about its members it means anything. ``oneOf`` it reads as anyOf too, but complains in the log."""
    kinds = _kinds(schema)
    if "oneOf" in schema:
        schema["anyOf"] = schema.pop("oneOf")
    if "array" in kinds and not schema.keys() & {"items", "prefixItems"}:
        schema["items"] = True
    required = schema.get("required", [])
    if "properties" in schema or required:
        named = schema.get("properties", {})
        rest = schema.get("additionalProperties", True)
        schema["properties"] = named | {name: rest for name in required if name not in named}
    elif "object" in kinds and not schema.keys() & {"patternProperties", "propertyNames"}:
        schema.setdefault("additionalProperties", True)
    return schema

"""Schemas in the form whose meaning a grammar keeps, or refused by the name of what it cannot."""

import math
from typing import Any

import pytest

from radixserve.engine.errors import InvalidRequest
from radixserve.engine.structured import MAX_DEPTH, checked, json_schema, regex

# A character that JSON writes without an escape.
WRITTEN = r"[^\u0000-\u001f\u0022\u005c]"


def prepared(schema: Any) -> Any:
    return json_schema(schema)["json_schema"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, True),
        ({"type": "object"}, {"type": "object", "additionalProperties": True}),
        ({"type": ["array", "null"]}, {"type": ["array", "null"], "items": True}),
        (
            {"type": "object", "required": ["a"]},
            {"type": "object", "required": ["a"], "properties": {"a": True}},
        ),
        (
            {"properties": {"a": {"type": "array"}}, "additionalProperties": {"type": "object"}, "required": ["b"]},
            {
                "properties": {
                    "a": {"type": "array", "items": True},
                    "b": {"type": "object", "additionalProperties": True},
                },
                "additionalProperties": {"type": "object", "additionalProperties": True},
                "required": ["b"],
            },
        ),
        (
            {"$defs": {"x": {"type": "array"}}, "allOf": [{"$ref": "#/$defs/x"}], "title": "X", "x-order": 1},
            {"$defs": {"x": {"type": "array", "items": True}}, "$ref": "#/$defs/x", "title": "X", "x-order": 1},
        ),
        (
            {"anyOf": [{"type": "integer"}, {"type": "array"}]},
            {"anyOf": [{"type": "integer"}, {"type": "array", "items": True}]},
        ),
        ({"oneOf": [{"type": "integer"}, True]}, {"anyOf": [{"type": "integer"}, {}]}),
        ({"minLength": 3}, {"type": "string", "minLength": 3}),
        ({"pattern": "^.-[a-z]$"}, {"type": "string", "pattern": f"^{WRITTEN}-[a-z]$"}),
        ({"patternProperties": {"^x.": True}}, {"patternProperties": {f"^x{WRITTEN}": True}}),
        (
            {"type": "integer", "minimum": -2.5, "exclusiveMaximum": 2.5},
            {"type": "integer", "minimum": -2, "exclusiveMaximum": 3},
        ),
        (
            {"type": "integer", "exclusiveMinimum": -2.5, "maximum": 2.5},
            {"type": "integer", "exclusiveMinimum": -3, "maximum": 2},
        ),
        ({"prefixItems": [True, {"type": "null"}]}, {"prefixItems": [{}, {"type": "null"}]}),
        ({"minimum": 3}, {"type": "number", "minimum": 3}),
        ({"type": "string", "enum": ["a", 1, None]}, {"type": "string", "enum": ["a"]}),
        ({"type": ["integer", "null"], "enum": [1, 1.5, True, None]}, {"type": ["integer", "null"], "enum": [1, None]}),
        (
            {"type": "string", "format": "password", "minLength": 8},
            {"type": "string", "format": "password", "minLength": 8},
        ),
        ({"type": "array", "items": {}, "uniqueItems": False}, {"type": "array", "items": {}, "uniqueItems": False}),
    ],
)
def test_schemas_say_what_json_schema_means_by_silence(schema: Any, expected: Any) -> None:
    assert prepared(schema) == expected


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {}}, "not: "),
        ({"properties": {"a": {"items": {"if": {}, "then": {}}}}}, "properties.a.items.if: "),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "anyOf[1].uniqueItems: "),
        ({"allOf": [{"type": "string"}, {"maxLength": 3}]}, "allOf: "),
        ({"allOf": [{"type": "integer"}], "minimum": 3}, "allOf: "),
        ({"$ref": "#/$defs/a", "maxLength": 3}, "maxLength: is not supported beside $ref"),
        ({"type": "string", "pattern": "a", "minLength": 2}, "minLength: is not supported beside pattern"),
        ({"properties": []}, "properties: "),
        ({"items": [{}]}, "items: must be an object"),
        ({"anyOf": []}, "anyOf: "),
        ({"required": "a"}, "required: "),
        ({"type": "string", "maxLength": -1}, "maxLength: must be"),
        ({"type": "array", "minItems": True}, "minItems: must be"),
        ({"type": []}, "type: must name"),
        ({"type": "number", "multipleOf": 0.5}, "multipleOf: is supported only for integers"),
        ({"type": "integer", "multipleOf": 1025}, "multipleOf: must be an integer from 1 to 1024"),
        ({"type": "integer", "multipleOf": 0.5}, "multipleOf: must be an integer from 1 to 1024"),
        ({"multipleOf": 2}, "multipleOf: is supported only for integers"),
        ({"type": "string", "format": "date", "maxLength": 3}, "maxLength: is not supported beside format"),
        ({"type": "string", "format": "date", "pattern": "a"}, "pattern: is not supported beside format"),
        ({"enum": ["a", "abc"], "maxLength": 1}, "maxLength: is not supported beside enum"),
        ({"type": "string", "const": 5}, "const: is not of the type"),
        ({"$ref": "https://example.org/a.json"}, "$ref: must be # or begin with #/"),
        ({"$defs": {"a": {"$anchor": "x"}}, "$ref": "#x"}, "$ref: must be"),
        ({"pattern": 5}, "pattern: must be a string"),
        ({"type": "integer", "const": math.inf}, "const: is not of the type"),
        ({"items": {"pattern": "(?=a)b"}}, "items.pattern: (?= is not supported"),
        ({"pattern": 'say "x"'}, "pattern: quotes"),
        ({"patternProperties": {"a$b": {}}}, "patternProperties: $ is supported only at the end"),
    ],
)
def test_what_no_grammar_can_hold_is_named(schema: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        json_schema(schema, param="response_format")
    assert refused.value.message.startswith(f"response_format: {place}")
    assert refused.value.param == "response_format"


def test_depth_is_limited_before_anybody_compiles() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(MAX_DEPTH + 1):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="nested"):
        json_schema(schema)
    form: dict[str, Any] = {"type": "any_text"}
    for _ in range(MAX_DEPTH + 1):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(InvalidRequest, match="nested"):
        checked(form, param="structured_outputs")


def test_schemas_inside_structural_tags_are_prepared_too() -> None:
    form = {
        "type": "sequence",
        "elements": [{"type": "json_schema", "json_schema": {"type": "array"}, "style": "json"}],
    }
    (inner,) = checked(form, param="x")["elements"]
    assert inner == {"type": "json_schema", "json_schema": {"type": "array", "items": True}, "style": "json"}
    with pytest.raises(InvalidRequest, match="not: "):
        checked({"type": "tag", "content": {"type": "json_schema", "json_schema": {"not": {}}}}, param="x")


@pytest.mark.parametrize(
    "make", [regex, lambda pattern: checked({"type": "regex", "pattern": pattern}, param="grammar")]
)
def test_expressions_that_would_be_kept_in_part_are_refused(make: Any) -> None:
    with pytest.raises(InvalidRequest, match="is supported only at the end") as refused:
        make("a$b")
    assert refused.value.code == "invalid_grammar"

"""The fields that say what an answer must look like: OpenAI's ``response_format`` and those of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from radixserve.engine import structured
from radixserve.engine.errors import InvalidRequest
from radixserve.engine.sampling_params import MAX_GRAMMAR_CHARS
from radixserve.engine.structured import Format
from radixserve.engine.text.conversation import wrong
from radixserve.server.protocol.schemas import BOOLEAN, OBJECT, STRING, any_of, record, tagged

RESPONSE_FORMAT_SCHEMA = any_of(
    record(type={"enum": ["text", "json_object"]}),
    tagged(
        "json_schema", json_schema=record({"name": STRING, "description": STRING, "strict": BOOLEAN}, schema=OBJECT)
    ),
    tagged("structural_tag", format=OBJECT),
)


# What each kind of structure takes; the keys of ``structured_outputs``.
_TAKES = {
    "json": "a JSON schema",
    "json_object": "true",
    "regex": "a string, and not empty",
    "choice": "a list of strings, none empty",
    "grammar": "a string, and not empty",
    "structural_tag": "an object with a format that is one",
}
# Of vLLM: how a grammar is made, where ours has no choice.
_HARMLESS = {"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
# Fields of vLLM and SGLang, and the kinds that they ask for.
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}


class Wanted(msgspec.Struct, frozen=True):
    """A format, and the field that asks for it."""

    format: Format
    field: str


def wanted_format(request: Any) -> Wanted | None:
    """What the structured-output fields of a ``GenerationRequest`` ask for. Raises ``InvalidRequest``."""
    asked = list(_asked(request))
    for field, kind, *_ in asked:
        if kind not in _TAKES:
            raise wrong(field, f"is not supported; supported: {', '.join(_TAKES)}")
    if len(asked) > 1:
        fields = " and ".join(field for field, *_ in asked)
        raise wrong(asked[1][0], f"only one structure can be asked for, not {fields}")
    if not asked:
        return None
    field, kind, value, where = asked[0]
    return Wanted(_format(kind, value, where), field)


def grammar_text(form: Format, field: str) -> str:
    """``form`` for the engine. Raises ``InvalidRequest`` if it is too large."""
    text = structured.structural_tag(form)
    if len(text) > MAX_GRAMMAR_CHARS:
        raise InvalidRequest(
            f"{field}: has {len(text)} characters of schema or grammar, the most is {MAX_GRAMMAR_CHARS}",
            param=field,
            code="grammar_too_complex",
        )
    return text


def _asked(request: Any) -> Iterator[tuple[str, str, Any, str]]:
    """A field that asks for a structure, of which kind, the value, and where that stands."""
    match request.response_format:
        case None | {"type": "text"}:
            pass
        case {"type": "json_object"}:
            yield "response_format", "json_object", True, "response_format"
        case {"type": "json_schema", **described}:
            where = "response_format.json_schema.schema"
            match described:
                case {"json_schema": {"schema": schema}}:
                    yield "response_format", "json", schema, where
                case _:
                    raise wrong(where, "is required")
        case {"type": "structural_tag"} as tag:
            yield "response_format", "structural_tag", tag, "response_format"
        case _:
            raise wrong("response_format.type", "must be one of text, json_object, json_schema, structural_tag")
    for kind, value in (request.structured_outputs or {}).items():
        if value is not None and (value or kind not in _HARMLESS):
            field = f"structured_outputs.{kind}"
            yield field, kind, value, field
    for field, kind in _ALIASES.items():
        if (value := getattr(request, field)) is not None:
            yield field, kind, value, field


def _format(kind: str, value: Any, field: str) -> Format:
    if kind in ("json", "structural_tag") and isinstance(value, str):
        value = _json(value, field)
    match kind, value:
        case "json", Mapping() | bool():
            return structured.json_schema(value, param=field)
        case "json_object", True:
            return structured.json_object()
        case "regex", str() if value:
            return structured.regex(value, param=field)
        case "choice", [*texts] if texts and all(isinstance(text, str) and text for text in texts):
            return structured.choice(value)
        case "grammar", str() if value:
            return structured.ebnf(value)
        case "structural_tag", {"format": Mapping() as form}:
            return structured.checked(form, param=field)
    raise wrong(field, f"must be {_TAKES[kind]}")


def _json(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise wrong(field, "is not valid JSON") from None

"""The fields that say what an answer must look like: OpenAI's ``response_format`` and those of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


class Wanted(msgspec.Struct, frozen=True):
    """A format, and the field that asks for it."""

    format: Format
    field: str


def wanted_format(request: Any) -> Wanted | None:
    """What the structured-output fields of a ``GenerationRequest`` ask for. Raises ``InvalidRequest``."""
    found = list(_wanted(request))
    if len(found) > 1:
        fields = " and ".join(wanted.field for wanted in found)
        raise wrong(found[1].field, f"only one structure can be asked for, not {fields}")
    return found[0] if found else None


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


def _wanted(request: Any) -> Iterator[Wanted]:
    if request.response_format is not None:
        form = _response_format(request.response_format)
        if form is not None:
            yield Wanted(form, "response_format")
    for key, value in (request.structured_outputs or {}).items():
        field = f"structured_outputs.{key}"
        if value is None or (key in _HARMLESS and not value):
            continue
        if key not in _READERS:
            raise wrong(field, f"is not supported; supported: {', '.join(_READERS)}")
        yield Wanted(_READERS[key](value, field), field)
    for field, key in _ALIASES.items():
        value = getattr(request, field)
        if value is not None:
            yield Wanted(_READERS[key](value, field), field)


def _response_format(value: Mapping[str, Any]) -> Format | None:
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return structured.json_object()
        case "json_schema":
            described, where = value.get("json_schema"), "response_format.json_schema.schema"
            if not isinstance(described, Mapping) or "schema" not in described:
                raise wrong(where, "is required")
            return _schema(described["schema"], where)
        case "structural_tag":
            return _tag(value, "response_format")
    raise wrong("response_format.type", "must be one of text, json_object, json_schema, structural_tag")


def _schema(value: Any, field: str) -> Format:
    if isinstance(value, str):
        value = _json(value, field)
    if not isinstance(value, Mapping | bool):
        raise wrong(field, "must be a JSON schema")
    return structured.json_schema(value, param=field)


def _object(value: Any, field: str) -> Format:
    if value is not True:
        raise wrong(field, "must be true")
    return structured.json_object()


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str) or not value:
        raise wrong(field, "must be a string, and not empty")
    return value


def _choice(value: Any, field: str) -> Format:
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        raise wrong(field, "must be a list of strings, none empty")
    return structured.choice(value)


def _tag(value: Any, field: str) -> Format:
    if isinstance(value, str):
        value = _json(value, field)
    form = value.get("format") if isinstance(value, Mapping) else None
    if not isinstance(form, Mapping):
        raise wrong(f"{field}.format", "must be an object")
    return structured.checked(form, param=field)


def _json(text: str, field: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        raise wrong(field, "is not valid JSON") from None


_READERS: dict[str, Callable[[Any, str], Format]] = {
    "json": _schema,
    "json_object": _object,
    "regex": lambda value, field: structured.regex(_text(value, field), param=field),
    "choice": _choice,
    "grammar": lambda value, field: structured.ebnf(_text(value, field)),
    "structural_tag": _tag,
}
# Of vLLM: how a grammar is made, where ours has no choice.
_HARMLESS = {"disable_fallback", "disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"}
_ALIASES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}

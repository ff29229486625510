"""Checks of what messages are made of. Errors name the place as a path: ``messages[0].content[1].type``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from radixserve.engine.errors import InvalidRequest

# Text parts of one message are joined by a line break, as vLLM does.
PART_SEPARATOR = "\n"


def wrong(where: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{where}: {what}", param=where)


def as_object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong(where, "must be an object")
    return value


def string_in(item: Mapping[str, Any], key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise wrong(f"{where}.{key}", "must be a string")
    return value


def text_in(content: object, where: str, kinds: Mapping[str, str]) -> str:
    """A string, or parts joined by line breaks. ``kinds``: where the text is, for each type of part."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of parts")
    return PART_SEPARATOR.join(_part(part, f"{where}[{i}]", kinds) for i, part in enumerate(content))


def _part(part: object, where: str, kinds: Mapping[str, str]) -> str:
    kind, part = kind_of(part, where, kinds)
    return string_in(part, kinds[kind], where)


def kind_of(item: object, where: str, kinds: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The ``type`` of an item, which must be one of ``kinds``, and the item."""
    item = as_object(item, where)
    kind = item.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise wrong(f"{where}.type", f"{kind!r} is not supported: only text is read; supported: {', '.join(kinds)}")
    return kind, item


def parsed_arguments(text: str, where: str) -> Mapping[str, Any]:
    """Of a call, as its model wrote them."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise wrong(where, f"is not valid JSON: {error}") from None
    return as_object(value, where)

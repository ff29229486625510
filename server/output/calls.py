"""How models write tool calls, between the markers of a family: read from a ``Reader``, told to ``Deltas``."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from radixserve.server.output.deltas import Deltas
from radixserve.server.output.reader import SPACE, Malformed, Reader, Reading

# Names that families have for the arguments of a call.
_ARGUMENTS = ("arguments", "parameters", "args", "input")


@dataclass
class CallReader:
    """Reads one body of calls. ``tools``: the schemas of the parameters, by name; a call of anything else is text.

    Up to its name a call may turn out to be text after all (``Malformed``); then its beginning was told.
    """

    reader: Reader
    deltas: Deltas
    tools: Mapping[str, Any]
    in_call: bool = False

    def start(self, name: str) -> None:
        if name not in self.tools:
            raise Malformed
        self.deltas.start_call(name)
        self.in_call = True

    def end(self) -> None:
        """The arguments are whole: what follows and fits nothing is text again."""
        self.in_call = False
        self.reader.mark()

    # ---- {"name": ..., "arguments": {...}}, one, several, or a list ----

    def json_body(self) -> Reading[None]:
        reader = self.reader
        first = yield from reader.after_space()
        if first == "[":
            yield from self._list_of(self._json_call, ",", ";")
            return
        reader.give_back(first)
        behind = yield from self._several(self._json_call, ",", ";")
        reader.give_back(behind)

    def _list_of(self, one: Callable[[], Reading[None]], *separators: str) -> Reading[None]:
        """The rest of a list whose bracket was read."""
        if (yield from self._several(one, *separators)) != "]":
            raise Malformed
        self.reader.mark()

    def _several(self, one: Callable[[], Reading[None]], *separators: str) -> Reading[str]:
        """Some with separators between them; returns the character behind the last one."""
        while True:
            yield from one()
            char = yield from self.reader.after_space()
            if char not in separators:
                return char

    def _json_call(self) -> Reading[None]:
        """One call. Arguments are passed on as they come, once the name is known."""
        if (yield from self.reader.after_space()) != "{":
            raise Malformed
        name, early, started = "", "", False
        while True:
            key = yield from self._key()
            first = yield from self.reader.after_space()
            if key == "name":
                name = yield from self._string(first)
            elif key in _ARGUMENTS and name and first == "{" and not started:
                self.start(name)
                started = True
                yield from self.reader.json_value(first, self.deltas.arguments)
                self.end()
            else:
                value: list[str] = []
                yield from self.reader.json_value(first, value.append)
                if key in _ARGUMENTS:
                    early = _as_object("".join(value))
            char = yield from self.reader.after_space()
            if char == "}":
                break
            if char != ",":
                raise Malformed
        if not started:
            self.start(name)
            self.deltas.arguments(early or "{}")
            self.end()
        self.reader.mark()

    def _key(self) -> Reading[str]:
        first = yield from self.reader.after_space()
        key = yield from self._string(first)
        colon = yield from self.reader.after_space()
        if colon != ":":
            raise Malformed
        return key

    def _string(self, first: str) -> Reading[str]:
        if first != '"':
            raise Malformed
        written = ['"']
        yield from self.reader.string(first, written.append)
        return str(_loads("".join(written)))

    # ---- name{...}, name[ARGS]{...}, or a list as above (Mistral) ----

    def mistral_body(self) -> Reading[None]:
        first = yield from self.reader.after_space()
        self.reader.give_back(first)
        if first == "[":
            yield from self.json_body()
            return
        name = yield from self.reader.word()
        if (yield from self.reader.try_literal("[CALL_ID]")):
            yield from self.reader.word()
        yield from self.reader.try_literal("[ARGS]")
        if (yield from self.reader.after_space()) != "{":
            raise Malformed
        self.start(name)
        yield from self.reader.json_value("{", self.deltas.arguments)
        self.end()

    # ---- <function=name> <parameter=key> value </parameter> </function> (Qwen3-Coder) ----

    def xml_body(self) -> Reading[None]:
        reader = self.reader
        first = yield from reader.after_space()
        reader.give_back(first)
        if not (yield from reader.try_literal("<function=")):
            raise Malformed
        name = yield from reader.word()
        if (yield from reader.after_space()) != ">":
            raise Malformed
        self.start(name)
        properties = _properties(self.tools[name])
        opening = "{"
        while True:
            _, tag = yield from reader.text_until("<parameter=", "</function>")
            if tag == "</function>":
                break
            key, _ = yield from reader.text_until(">")
            self.deltas.arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
            opening = ", "
            yield from self._xml_value(properties.get(key, {}))
        self.deltas.arguments("{}" if opening == "{" else "}")
        self.end()

    def _xml_value(self, schema: Any) -> Reading[None]:
        """The text of a parameter; strings are passed on as they come. Its first and last line breaks are markup."""
        char = yield from self.reader.next()
        if char != "\n":
            self.reader.give_back(char)
        if isinstance(schema, Mapping) and schema.get("type") not in ("string", None):
            text, _ = yield from self.reader.text_until("\n</parameter>", "</parameter>")
            self.deltas.arguments(_as_json(text))
            return
        self.deltas.arguments('"')
        end = yield from self.reader.until(
            lambda text: self.deltas.arguments(json.dumps(text, ensure_ascii=False)[1:-1]),
            "\n</parameter>",
            "</parameter>",
            at_end=_drop,
        )
        if end is None:
            raise Malformed
        self.deltas.arguments('"')

    # ---- [name(key=value, ...), ...] (Llama 3.2, Llama 4) ----

    def pythonic_body(self) -> Reading[None]:
        if (yield from self.reader.after_space()) != "[":
            raise Malformed
        yield from self._list_of(self._python_call, ",")

    def _python_call(self) -> Reading[None]:
        name = yield from self.reader.word()
        if (yield from self.reader.after_space()) != "(":
            raise Malformed
        written: list[str] = []
        yield from self.reader.nested("(", written.append, quotes="'\"")
        arguments = _keywords("".join(written))
        self.start(name)
        self.deltas.arguments(arguments)
        self.end()


def _drop(_: str) -> None:
    """The beginning of a marker, which is no part of a value."""


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None


def _as_object(text: str) -> str:
    """Arguments as an object, a string that holds one, or null."""
    value = _loads(text)
    if isinstance(value, str):
        text, value = value, _loads(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text


def _as_json(text: str) -> str:
    """A parameter that is no string by its schema; one all the same if it is no JSON."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False)
    except (ValueError, RecursionError):
        return json.dumps(text.strip(SPACE), ensure_ascii=False)


def _properties(schema: Any) -> Mapping[str, Any]:
    found = schema.get("properties") if isinstance(schema, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _keywords(written: str) -> str:
    """``(city="Oslo", days=3)`` as a JSON object."""
    try:
        call = ast.parse(f"f{written}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            raise Malformed
        values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        return json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise Malformed from None

"""Keeps control-token text that users type from becoming control tokens, while the chat template's own ones work.

A prompt is text until it is tokenized, and there ``<|im_end|>`` looks the same whoever wrote it. So before the template
is rendered each such text in user strings is replaced by one private-use character that occurs nowhere else. What is
left in the rendered prompt was written by the template; it is renamed to secret names, which a second copy of the
tokenizer knows as the control tokens, and the users' texts are put back. One encode then gives what the plain tokenizer
gives with control tokens recognised in the template and not recognised elsewhere, pre-tokenization across the borders
included. Prompts without such text, nearly all, skip all this.
"""

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from radixserve.engine.text.tokenizer import Tokenizer

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class LiteralEncoder:
    """Encodes rendered chats in which users' control-token text is only text. Owns the second tokenizer, which is made
    when it is first needed. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        controls = sorted(tokenizer.control_texts, key=len, reverse=True)  # The longest wins, as in tokenizers.
        self._control = re.compile("|".join(map(re.escape, controls)) or r"(?!)")
        self._beginnings = {text[:end] for text in controls for end in range(1, len(text))}
        first_chars = "".join(map(re.escape, {text[0] for text in controls}))
        self._first_char = re.compile(f"[{first_chars}]" if first_chars else r"(?!)")
        self._longest = max(map(len, controls), default=0)

    def encode(self, inputs: Any, render: Callable[[Any], str]) -> list[int]:
        """Token ids of ``render(inputs)``; ``inputs``: strings in lists and dicts, all of them the user's."""
        found = {span for text in _strings(inputs) if self._first_char.search(text) for span in self._risky(text)}
        if not found:
            return self._tokenizer.encode(render(inputs), add_special_tokens=False)
        used = set("".join(_strings(inputs)))
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        char_of = {text: next(free) for text in sorted(found, key=len, reverse=True)}
        rendered = render(_map_strings(inputs, lambda text: self._hide(text, char_of)))
        backend, secret_name_of, id_of = self._renamed
        rendered = self._control.sub(lambda match: secret_name_of[match[0]], rendered)
        for text, char in char_of.items():
            rendered = rendered.replace(char, text).replace(json.dumps(char)[1:-1], text)  # Templates may write JSON.
        ids = backend.encode_batch_fast([rendered], add_special_tokens=False)[0].ids
        return [id_of.get(i, i) for i in ids]

    def _risky(self, text: str) -> Iterator[str]:
        """Control-token texts in ``text``, and the beginning of one at its end: what follows might complete it."""
        yield from self._control.findall(text)
        if beginning := self._beginning_at_end(text):
            yield beginning

    def _beginning_at_end(self, text: str) -> str:
        tail = text.rstrip()[-self._longest + 1 :]  # Templates may trim.
        if not self._first_char.search(tail):
            return ""
        return next((tail[start:] for start in range(len(tail)) if tail[start:] in self._beginnings), "")

    def _hide(self, text: str, char_of: Mapping[str, str]) -> str:
        if beginning := self._beginning_at_end(text):
            end = len(text.rstrip())
            text = text[: end - len(beginning)] + char_of[beginning] + text[end:]
        return self._control.sub(lambda match: char_of[match[0]], text)

    @cached_property
    def _renamed(self) -> tuple[Backend, dict[str, str], dict[int, int]]:
        """The tokenizer with secret names for control tokens, text -> name, and its ids -> the model's ids."""
        secret = secrets.token_hex(16)
        config = json.loads(self._tokenizer.backend.to_str())
        config["post_processor"] = None
        secret_name_of, id_of_content = {}, {}
        for token in config["added_tokens"]:
            if token["special"]:
                name = secret_name_of[token["content"]] = f"<{secret}:{token['id']}>"
                token["content"] = name
                token["normalized"] = False
            id_of_content[token["content"]] = token["id"]
        backend = Backend.from_str(json.dumps(config))
        own_ids = {content: backend.token_to_id(content) for content in id_of_content}
        id_of = {own: id_of_content[content] for content, own in own_ids.items() if own is not None}
        return backend, secret_name_of, id_of


def _strings(value: Any) -> list[str]:
    """All strings in nested lists and dicts, keys included."""
    found, rest = [], [value]
    while rest:
        inner = rest.pop()
        if isinstance(inner, str):
            found.append(inner)
        elif isinstance(inner, list | tuple):
            rest += inner
        elif isinstance(inner, Mapping):
            rest += inner.keys()
            rest += inner.values()
    return found


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(inner, change) for inner in value]
    return value

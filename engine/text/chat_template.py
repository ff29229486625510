"""Chat templates: Jinja in a sandbox, with the functions and settings that templates on the Hub are written for."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn, TypedDict, Unpack

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from radixserve.engine.errors import InvalidRequest, ModelError
from radixserve.engine.model_files import read_json
from radixserve.engine.text.sandbox import MAX_RENDERED_CHARS, Sandbox, check_json, with_deadline

_RESERVED = {"messages", "tools", "add_generation_prompt", "continue_final_message"}
# Marks the end of a message that the model shall continue. A private-use character that no one types; followed by
# a space, so that it can be seen whether the template trims its messages.
_END_MARK = "\U0010fe0f"


class _Refusal(TemplateError):
    """The template itself called ``raise_exception``."""


class ChatOptions(TypedDict, total=False):
    """``add_generation_prompt``: on by default. ``continue_final_message`` leaves the last message open for the model
    to go on with."""

    add_generation_prompt: bool
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None


class ChatTemplate:
    """A compiled template. ``special_tokens`` (``bos_token``, ...) are variables in it; ``tool_use`` is another source,
    for requests with tools. Raises ``ModelError`` that names ``origin`` if the source is no valid template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, origin: str, tool_use: str | None = None):
        self.source = source
        self.tool_source = source if tool_use is None else tool_use
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
        environment.filters["tojson"] = _to_json
        self._special_tokens = dict(special_tokens)
        try:
            self._default = environment.from_string(source)
            self._tool_use = environment.from_string(tool_use) if tool_use is not None else self._default
            variables = meta.find_undeclared_variables(environment.parse(self.tool_source))
        except TemplateSyntaxError as error:
            raise ModelError(f"chat template of {origin}, line {error.lineno}: {error.message}") from error
        self.uses_tools = "tools" in variables  # or ignores them

    def render(self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]) -> str:
        """The prompt text of normalized messages. Raises ``InvalidRequest`` with what the template says against
        them."""
        variables: dict[str, Any] = {**self._special_tokens, "documents": None}
        variables |= (kwargs := options.get("chat_template_kwargs") or {})
        if taken := sorted(_RESERVED & kwargs.keys()):
            raise InvalidRequest(f"chat_template_kwargs must not set {', '.join(taken)}", param="chat_template_kwargs")
        add_generation_prompt, tools = options.get("add_generation_prompt", True), options.get("tools") or None
        if continue_final_message := options.get("continue_final_message", False):
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude each other",
                    param="continue_final_message",
                )
            last = messages[-1]
            messages = [*messages[:-1], {**last, "content": last["content"] + _END_MARK + " "}]
        template = self._tool_use if tools else self._default
        try:
            variables |= {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
            text = _join(template.generate(with_deadline(variables)))
        except _Refusal as error:
            raise InvalidRequest(str(error), param="messages") from error
        except InvalidRequest:
            raise
        except Exception as error:  # A template can fail in any way Python can.
            raise InvalidRequest(
                f"the model's chat template cannot write these messages: {error}", param="messages"
            ) from error
        return _cut_at_mark(text) if continue_final_message else text


def template_from_file(path: Path, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """A template in a file of its own: Jinja text, or JSON with a key ``chat_template``. Raises ``ModelError``."""
    if path.suffix == ".json":
        if (template := template_from_config(read_json(path), special_tokens, origin=str(path))) is None:
            raise ModelError(f"{path} has no chat_template")
        return template
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the chat template {path}: {error}") from error
    return ChatTemplate(source, special_tokens, origin=str(path))


def template_from_config(
    config: Mapping[str, Any], special_tokens: Mapping[str, str], *, origin: str
) -> ChatTemplate | None:
    """The ``chat_template`` of a tokenizer_config.json: text, or a list of named ones. None without one."""
    value = config.get("chat_template")
    listed = value if isinstance(value, list) else [{"name": "default", "template": value}]
    named = {item.get("name"): item.get("template") for item in listed if isinstance(item, Mapping)}
    default, tool_use = named.get("default"), named.get("tool_use")
    if not isinstance(default, str):
        return None
    return ChatTemplate(
        default, special_tokens, origin=origin, tool_use=tool_use if isinstance(tool_use, str) else None
    )


def template_from_gguf(
    metadata: Mapping[str, Any], special_tokens: Mapping[str, str], *, origin: str
) -> ChatTemplate | None:
    """The template in a GGUF file's metadata. None without one."""
    keys = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
    listed = [{"name": name, "template": metadata.get(key)} for name, key in keys.items()]
    return template_from_config({"chat_template": listed}, special_tokens, origin=origin)


def _join(pieces: Any) -> str:
    """Join the output while watching its size."""
    found, num_chars = [], 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise InvalidRequest("the rendered chat template is too long", param="messages")
        found.append(piece)
    return "".join(found)


def _cut_at_mark(text: str) -> str:
    before, mark, after = text.rpartition(_END_MARK)
    if not mark:
        raise InvalidRequest(
            "the chat template does not write the final message, so it cannot be continued",
            param="continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


class _GenerationTag(Extension):
    """``{% generation %}`` marks assistant text for training; here it is only its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise _Refusal(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Plain JSON; Jinja's own filter escapes for HTML."""
    check_json(value, options.get("indent"))
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)

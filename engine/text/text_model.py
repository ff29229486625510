"""All that turns requests into token ids and ids into text, for one model. No torch, no transformers."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Unpack

from radixserve.configs.schema import ModelOptions
from radixserve.engine.errors import InvalidRequest, ModelError
from radixserve.engine.gguf_reader import GGUFFile, read_gguf
from radixserve.engine.model_config import load_sampling_defaults, load_spec, spec_from_gguf
from radixserve.engine.model_files import ModelFiles, read_json, tokenizer_files
from radixserve.engine.model_spec import ModelSpec, SamplingDefaults
from radixserve.engine.text.chat_template import (
    ChatOptions,
    ChatTemplate,
    template_from_config,
    template_from_file,
    template_from_gguf,
)
from radixserve.engine.text.conversation import normalize_messages
from radixserve.engine.text.gguf_tokenizer import build_gguf_tokenizer, gguf_special_tokens
from radixserve.engine.text.literals import LiteralEncoder
from radixserve.engine.text.tokenizer import Tokenizer, load_tokenizer, read_special_tokens


@dataclass(frozen=True)
class TextModel:
    """Tokenizer, chat template and facts of one model. Shared by all requests; any thread may call it.

    ``template`` is None for a model that has none: only raw prompts work then.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    literals: LiteralEncoder
    spec: ModelSpec
    sampling_defaults: SamplingDefaults

    def encode_prompt(self, text: str) -> list[int]:
        """A raw prompt: control-token text is control tokens; BOS is added if the tokenizer adds one by itself."""
        return self.tokenizer.encode(text, add_special_tokens=True)

    def render_chat(self, messages: object, **options: Unpack[ChatOptions]) -> str:
        """The prompt text of a conversation. Raises ``InvalidRequest``."""
        return self._required_template().render(normalize_messages(messages), **options)

    def encode_chat(self, messages: object, **options: Unpack[ChatOptions]) -> list[int]:
        """Token ids of a conversation. Control tokens come from the template alone: their text in messages, tools and
        arguments is encoded as text. No BOS is added, since templates write it. Raises ``InvalidRequest``."""
        template = self._required_template()
        user_inputs = {key: value for key, value in options.items() if key in ("tools", "chat_template_kwargs")}
        user_inputs["messages"] = normalize_messages(messages)
        return self.literals.encode(user_inputs, lambda inputs: template.render(**{**options, **inputs}))

    def _required_template(self) -> ChatTemplate:
        if self.template is None:
            raise InvalidRequest("the model has no chat template; use /v1/completions, or give one: --chat-template")
        return self.template


def load_text_model(files: ModelFiles, options: ModelOptions) -> TextModel:
    """Read what ``files`` and ``options`` (another tokenizer or chat template, ...) say. Raises ``ModelError``."""
    text_files = tokenizer_files(options.tokenizer) if options.tokenizer else files
    gguf = read_gguf(text_files.gguf) if text_files.gguf else None
    tokenizer = _load_tokenizer(text_files, gguf)
    template = _load_template(text_files, gguf, tokenizer.special_tokens, options.chat_template)
    use_defaults = options.generation_config == "auto"
    return TextModel(
        tokenizer=tokenizer,
        template=template,
        literals=LiteralEncoder(tokenizer),
        spec=spec_from_gguf(gguf) if gguf and text_files is files else load_spec(files),
        sampling_defaults=load_sampling_defaults(files) if use_defaults else SamplingDefaults(),
    )


def _load_tokenizer(files: ModelFiles, gguf: GGUFFile | None) -> Tokenizer:
    if gguf:
        return Tokenizer(build_gguf_tokenizer(gguf.metadata), gguf_special_tokens(gguf.metadata))
    if files.tokenizer is None:
        raise ModelError(f"model {files.name} has no tokenizer.json; give a tokenizer with --tokenizer")
    return Tokenizer(load_tokenizer(files.tokenizer), read_special_tokens(files.tokenizer_config))


def _load_template(
    files: ModelFiles, gguf: GGUFFile | None, special_tokens: Mapping[str, str], given: str | None
) -> ChatTemplate | None:
    if given:
        return template_from_file(Path(given).expanduser(), special_tokens)
    if gguf:
        return template_from_gguf(gguf.metadata, special_tokens, origin=str(gguf.path))
    if files.chat_template:
        return template_from_file(files.chat_template, special_tokens)
    if files.tokenizer_config:
        config = read_json(files.tokenizer_config)
        return template_from_config(config, special_tokens, origin=str(files.tokenizer_config))
    return None

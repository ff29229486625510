import json
from pathlib import Path
from typing import Any

import pytest

from radixserve.configs.schema import ModelOptions
from radixserve.engine.errors import InvalidRequest, ModelError
from radixserve.engine.model_files import resolve_model
from radixserve.engine.text.text_model import TextModel, load_text_model

from . import templates
from .small_tokenizers import byte_level_backend, save_model_folder, sentencepiece_backend

USER = [{"role": "user", "content": "hello"}]


def load(folder: Path, **options: Any) -> TextModel:
    return load_text_model(resolve_model(str(folder), "dummy"), ModelOptions(**options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    return save_model_folder(tmp_path, sentencepiece_backend(), config)


def test_a_folder_is_loaded_with_template_and_special_tokens(folder: Path):
    model = load(folder)
    assert model.render_chat(USER) == "<s>hello"
    assert model.encode_chat(USER) == model.tokenizer.encode("<s>hello", add_special_tokens=False)
    assert model.spec.family == "llama"


def test_a_template_file_beside_the_model_comes_before_its_config(folder: Path):
    (folder / "chat_template.jinja").write_text("file")
    assert load(folder).render_chat(USER) == "file"


def test_a_given_template_comes_first(folder: Path, tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("mine")
    assert load(folder, chat_template=str(tmp_path / "mine.jinja")).render_chat(USER) == "mine"


def test_a_broken_given_template_is_named(folder: Path, tmp_path: Path):
    (tmp_path / "mine.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="mine.jinja"):
        load(folder, chat_template=str(tmp_path / "mine.jinja"))


def test_without_a_template_only_raw_prompts_work(folder: Path):
    (folder / "tokenizer_config.json").write_text("{}")
    model = load(folder)
    assert model.encode_prompt("hello")
    for ask in (model.render_chat, model.encode_chat):
        with pytest.raises(InvalidRequest, match="no chat template"):
            ask(USER)


def test_another_tokenizer_can_be_given(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    other.mkdir()
    save_model_folder(other, byte_level_backend(), {"chat_template": "other"})
    for name in (other, other / "tokenizer.json"):
        model = load(folder, tokenizer=str(name))
        assert model.tokenizer.token_id("<|ab|>") is not None and model.render_chat(USER) == "other"
    with pytest.raises(ModelError, match="--tokenizer"):
        load(folder, tokenizer=str(tmp_path / "absent"))


def test_a_model_without_tokenizer_names_the_flag(folder: Path):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="--tokenizer"):
        load(folder)


def test_recommended_sampling_can_be_turned_off(folder: Path):
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5}))
    assert load(folder).sampling_defaults.temperature == 0.5
    assert load(folder, generation_config="none").sampling_defaults.temperature is None


@pytest.mark.parametrize("content", [None, "", "absent"])
def test_the_word_none_is_never_written(text_model: TextModel, content: str | None):
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    turn: dict[str, Any] = {"role": "assistant", "tool_calls": [call]}
    if content != "absent":
        turn["content"] = content
    messages = [
        *USER,
        turn,
        {"role": "tool", "tool_call_id": "c", "content": "5 C"},
        {"role": "user", "content": "thanks"},
    ]
    rendered = text_model.render_chat(messages)
    assert "None" not in rendered
    assert rendered.count("<|im_start|>assistant\n<|im_end|>") == 1


def test_a_rendered_chat_as_raw_prompt_is_the_same_ids(text_model: TextModel):
    for messages in (
        USER,
        [{"role": "system", "content": "Be terse."}, *USER, {"role": "assistant", "content": "Hi."}, *USER],
    ):
        assert text_model.encode_prompt(text_model.render_chat(messages)) == text_model.encode_chat(messages)


def test_chats_get_no_second_bos(tmp_path: Path):
    from tokenizers import processors

    backend = sentencepiece_backend()
    backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": templates.STRICT_WITH_MACRO}
    model = load(save_model_folder(tmp_path, backend, config))
    assert model.encode_chat(USER).count(1) == 1
    assert model.encode_prompt("hello").count(1) == 1

"""The default model's text side, and transformers' as an oracle."""

from copy import deepcopy
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from radixserve.configs.schema import ModelOptions
from radixserve.engine.model_files import resolve_model
from radixserve.engine.text.text_model import TextModel, load_text_model


@pytest.fixture(scope="session")
def text_model() -> TextModel:
    return load_text_model(resolve_model("smollm2-135m-instruct"), ModelOptions())


@pytest.fixture(scope="session")
def transformers_tokenizer() -> Any:
    """What transformers makes of the default model's file, as it comes."""
    from transformers import AutoTokenizer

    path = resolve_model("smollm2-135m-instruct").gguf
    assert path is not None
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="session")
def oracle(transformers_tokenizer: Any) -> Any:
    """The same with the pre-tokenizer that the file names. transformers does not know "smollm" and takes GPT-2's, which
    leaves out that digits are split off first, as in the model's original tokenizer.json."""
    tokenizer = deepcopy(transformers_tokenizer)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer

"""docs/openai_fields.md names every field, and every field that OpenAI's client can send is declared."""

import re
from pathlib import Path

from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from radixserve.server.protocol.chat import ChatRequest
from radixserve.server.protocol.completions import CompletionRequest

PAGE = Path(__file__).parents[2] / "docs" / "openai_fields.md"


def test_every_field_of_openai_is_declared() -> None:
    assert set(chat_params.CompletionCreateParamsBase.__annotations__) <= ChatRequest.model_fields.keys()
    assert set(text_params.CompletionCreateParamsBase.__annotations__) <= CompletionRequest.model_fields.keys()


def test_the_page_has_every_declared_field_and_no_other() -> None:
    before_answers = PAGE.read_text().split("## Answers")[0]
    rows = [line.split("|")[1] for line in before_answers.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(named) == len(set(named))
    assert set(named) == ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()

"""The pages of docs/ name every field, and every field that the clients can send is declared."""

import re
from pathlib import Path

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params

from radixserve.server.protocol.chat import ChatRequest
from radixserve.server.protocol.completions import CompletionRequest
from radixserve.server.protocol.fields import RequestModel
from radixserve.server.protocol.messages import CountTokensRequest, MessagesRequest
from radixserve.server.protocol.responses import ResponsesRequest

DOCS = Path(__file__).parents[2] / "docs"


def test_every_field_of_openai_is_declared() -> None:
    assert set(chat_params.CompletionCreateParamsBase.__annotations__) <= ChatRequest.model_fields.keys()
    assert set(text_params.CompletionCreateParamsBase.__annotations__) <= CompletionRequest.model_fields.keys()
    assert set(responses_params.ResponseCreateParamsBase.__annotations__) <= ResponsesRequest.model_fields.keys()


def test_every_field_of_anthropic_is_declared() -> None:
    whole, count = message_create_params.MessageCreateParamsBase, message_count_tokens_params.MessageCountTokensParams
    assert set(whole.__annotations__) <= MessagesRequest.model_fields.keys()
    assert set(count.__annotations__) <= CountTokensRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("page", "models"),
    [
        ("openai_fields.md", (ChatRequest, CompletionRequest)),
        ("responses.md", (ResponsesRequest,)),
        ("messages.md", (MessagesRequest, CountTokensRequest)),
    ],
)
def test_pages_have_every_declared_field_and_no_other(page: str, models: tuple[type[RequestModel], ...]) -> None:
    before_answers = (DOCS / page).read_text().split("## Answers")[0]
    rows = [line.split("|")[1] for line in before_answers.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(named) == len(set(named))
    assert set(named) == {name for model in models for name in model.model_fields}

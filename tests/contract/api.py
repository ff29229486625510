"""The API as tests of this folder use it: plain HTTP, with the checks that hold for every answer."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from radixserve.tests.e2e.server_process import RunningServer, running_server

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# Two texts whose greedy tokens are nearer than this (in nats) at the first difference count as the same: in another
# batch sums are rounded in another order.
NEAR_TIE = 0.02


@dataclass(frozen=True)
class Text:
    """A generated text with its tokens, and by how much the best alternative of each was worse."""

    text: str
    tokens: list[int]
    gaps: list[float]
    finish_reason: str
    cached_tokens: int

    def agrees_with(self, other: Text) -> bool:
        """The same, or different from a near tie on. One may have ended earlier by its limit."""
        for mine, others, gap in zip(self.tokens, other.tokens, self.gaps, strict=False):
            if mine != others:
                return gap < NEAR_TIE
        return True


class Api:
    """One server, seen by one client."""

    def __init__(self, server: RunningServer, **client_options: Any):
        self.server = server
        self.http = httpx.Client(base_url=server.url, **{"timeout": 90, **client_options})

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.http.post(path, json=body)

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        whole: dict[str, Any] = response.json()
        return whole

    def chat(self, content: Any, **fields: Any) -> dict[str, Any]:
        """``content``: what the user says, or all messages."""
        return self.answer(CHAT, chat_body(content, **fields))

    def comp(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return self.answer(COMPLETIONS, comp_body(prompt, **fields))

    def greedy(self, prompt: Any, max_tokens: int, **fields: Any) -> Text:
        whole = self.comp(prompt, max_tokens=max_tokens, logprobs=2, return_token_ids=True, **fields)
        return as_text(whole)

    def count(self, content: Any, **fields: Any) -> int:
        """Prompt tokens of a chat."""
        return int(self.chat(content, **{"max_tokens": 1, **fields})["usage"]["prompt_tokens"])

    def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The JSON events of a stream that ends well; checks the grammar around them."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *blocks, end = response.content.decode("utf-8").split("\n\n")
        assert (blocks.pop(), end) == ("data: [DONE]", "")
        blocks = [block for block in blocks if not block.startswith(":")]
        assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
        return [json.loads(block.removeprefix("data: ")) for block in blocks]

    def streamed(self, path: str, body: dict[str, Any]) -> tuple[list[str], str]:
        """The non-empty pieces of a stream's only choice, and its finish reason."""
        choices = [choice for event in self.events(path, body) for choice in event["choices"]]
        reasons = [choice["finish_reason"] for choice in choices]
        assert [reason is not None for reason in reasons] == [False] * (len(reasons) - 1) + [True]
        pieces = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
        return [piece for piece in pieces if piece], reasons[-1]

    def is_alive(self) -> bool:
        answer = self.chat("hi", max_tokens=4)
        return 1 <= int(answer["usage"]["completion_tokens"]) <= 4

    def live(self) -> int:
        stats = self.server.stats()
        return stats["running"] + stats["waiting"]


@contextlib.contextmanager
def launched(*flags: str, **client_options: Any) -> Iterator[Api]:
    """A server in fp32, so that texts can be compared. In the end it must be alive, idle, and without a lost page."""
    with running_server("--dtype", "float32", *flags) as server:
        api = Api(server, **client_options)
        with api.http:
            yield api
            assert api.is_alive()
        assert "Traceback" not in server.log()
    assert server.process.returncode == 0, "asked to stop while idle, it does"


def chat_body(content: Any, **fields: Any) -> dict[str, Any]:
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    return {"messages": messages, "temperature": 0, **fields}


def comp_body(prompt: Any, **fields: Any) -> dict[str, Any]:
    return {"prompt": prompt, "temperature": 0, **fields}


def as_text(whole: dict[str, Any]) -> Text:
    choice = whole["choices"][0]
    gaps = []
    for best in choice["logprobs"]["top_logprobs"]:
        values = sorted(best.values(), reverse=True)
        gaps.append(values[0] - values[1] if len(values) > 1 else 0.0)
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    return Text(choice["text"], choice["token_ids"], gaps, choice["finish_reason"], cached)


def text_of(whole: dict[str, Any]) -> str:
    choice = whole["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert isinstance(text, str)
    return text


def refused(response: httpx.Response, *statuses: int, naming: str | None = None) -> dict[str, Any]:
    """The error of a refusal in OpenAI's form, the same for streams."""
    assert response.status_code in (statuses or (400,)), response.text
    assert response.headers["content-type"].startswith("application/json")
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and isinstance(error["type"], str)
    assert "Traceback" not in response.text and ".py" not in response.text
    assert naming is None or naming in error["message"], error
    return error

"""The text side by itself, and the operators' routes."""

import re
from pathlib import Path

import httpx

from radixserve.tests.architecture.source_tree import ROOT
from radixserve.tests.server.byte_model import write_byte_model
from radixserve.tests.server.service import CHAT, COMPLETIONS, Service, running_service


def test_tokenize_and_back(http: httpx.Client) -> None:
    answer = http.post("/tokenize", json={"prompt": "hé<|im_end|>", "return_token_strs": True}).json()
    assert answer["tokens"] == [104, 195, 169, 256]
    assert (answer["count"], answer["max_model_len"]) == (4, 512)
    assert answer["token_strs"][-1] == "<|im_end|>"
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": "hé<|im_end|>"}


def test_tokenize_and_render_chats_as_the_chat_route_does(http: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}
    rendered = http.post(f"{CHAT}/render", json=body).json()
    assert rendered["prompt"] == "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n"
    tokens = http.post("/tokenize", json=body).json()["tokens"]
    assert tokens == rendered["prompt_token_ids"]
    usage = http.post(CHAT, json={**body, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == len(tokens) == rendered["count"]
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    with_tools = [
        http.post(path, json={**body, "tools": [tool]}).json()["count"] for path in ("/tokenize", f"{CHAT}/render")
    ]
    assert with_tools[0] == with_tools[1] > len(tokens)
    closed = http.post(f"{CHAT}/render", json={**body, "add_generation_prompt": False}).json()
    assert closed["prompt"].endswith("<|im_end|>\n")


def test_final_message_can_be_continued(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer"}]
    body = {"messages": messages, "continue_final_message": True}
    assert http.post(f"{CHAT}/render", json=body).json()["prompt"].endswith("assistant\nThe answer")


def test_bad_tokens_and_missing_text_are_client_errors(http: httpx.Client) -> None:
    for path, body in [
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/detokenize", {}),
        ("/tokenize", {}),
    ]:
        assert http.post(path, json=body).status_code == 400


def test_models_are_listed(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    assert http.get("/v1/models/tiny").json() == listed["data"][0]
    assert listed["data"][0]["max_model_len"] == 512
    assert http.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_health_and_version(http: httpx.Client) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    head = http.head("/health")
    assert (head.status_code, head.content) == (200, b"")
    assert http.get("/version").json()["version"]


def test_server_info_has_pids_and_stats(http: httpx.Client, service: Service) -> None:
    info = http.get("/server_info").json()
    assert info["engine_pid"] == info["worker_pid"]
    assert info["stats"]["running"] == 0
    assert info["config"]["served_model_name"] == ["tiny"]
    assert "api_key" not in info["config"]


def test_cache_is_flushed(http: httpx.Client) -> None:
    http.post(CHAT, json={"messages": [{"role": "user", "content": "x"}]})
    assert http.post("/flush_cache").json()["num_tokens"] > 0
    assert http.post("/flush_cache").json()["num_tokens"] == 0


def test_openapi_describes_the_bodies(http: httpx.Client) -> None:
    answer = http.get("/openapi.json")
    document = answer.json()
    schemas = document["components"]["schemas"]
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    assert {"messages", "temperature", "cache_salt"} <= schemas["ChatRequest"]["properties"].keys()
    assert "StreamOptions" in schemas
    assert set(re.findall(r'"#/components/schemas/(\w+)"', answer.text)) <= schemas.keys()


def test_the_page_of_the_api_has_every_route(http: httpx.Client) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    routes = {
        f"{method.upper()} {re.sub('{.*}', '{id}', path)}"
        for path, methods in http.get("/openapi.json").json()["paths"].items()
        for method in methods
    }
    assert len(routes) > 12
    assert {route for route in routes if f"`{route}`" not in page} == set()


def test_without_a_template_chats_are_refused_and_raw_prompts_work(folder: Path) -> None:
    model = write_byte_model(folder / "model", template=None)
    with running_service(folder, model=str(model)) as bare, httpx.Client(base_url=bare.url) as own:
        for stream in (False, True):
            body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
            answer = own.post(CHAT, json=body)
            assert answer.status_code == 400
            assert "chat template" in answer.json()["error"]["message"]
        assert own.post(COMPLETIONS, json={"prompt": "<<hi>>"}).json()["choices"][0]["text"] == "hi"


def test_the_models_recommendations_are_defaults_unless_turned_off(folder: Path) -> None:
    model = write_byte_model(folder / "model", generation={"temperature": 0.25, "top_k": 5, "do_sample": True})
    for choice, expected in (("auto", (0.25, 5)), ("none", (1.0, 0))):
        with running_service(folder, model=str(model), generation_config=choice) as own:
            for fields in ({}, {"temperature": 0.5}):
                httpx.post(f"{own.url}{COMPLETIONS}", json={"prompt": "hi", **fields})
            plain, asked = (submit.sampling for submit in own.engine.submits)
            assert (plain.temperature, plain.top_k) == expected
            assert asked.temperature == 0.5

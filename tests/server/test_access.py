"""Keys, browsers, and request ids."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radixserve.configs.schema import ServeConfig
from radixserve.engine.errors import ConfigError
from radixserve.server.auth import read_api_keys
from radixserve.tests.server.service import CHAT, COMPLETIONS, Service, running_service

ORIGIN = {"origin": "http://app.example"}
BODY = {"prompt": "<<ok>>"}


@pytest.fixture
def guarded(folder: Path) -> Iterator[httpx.Client]:
    options = {"api_key": ("other", "k-Test_123"), "cors_allow_origins": ("*",)}
    with running_service(folder, **options) as service, httpx.Client(base_url=service.url, headers=ORIGIN) as client:
        yield client


def test_keys_guard_all_but_health_and_preflight(guarded: httpx.Client) -> None:
    assert guarded.get("/health").status_code == 200
    wanted = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = guarded.options(CHAT, headers=wanted)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "*"
    assert "POST" in preflight.headers["access-control-allow-methods"]
    assert "authorization" in preflight.headers["access-control-allow-headers"]

    for authorization in (None, "Bearer wrong", "k-Test_123", "Basic k-Test_123", "Bearer", "Bearer k-Test_1234"):
        headers = {} if authorization is None else {"authorization": authorization}
        refused = guarded.post(COMPLETIONS, json=BODY, headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.headers["access-control-allow-origin"] == "*"
        assert refused.headers["x-request-id"]
        assert refused.json()["error"]["type"] == "authentication_error"
    for path in ("/v1/models", "/server_info", "/version", "/openapi.json"):
        assert guarded.get(path).status_code == 401
    for path in ("/tokenize", "/detokenize", "/flush_cache", "/abort_request", f"{CHAT}/render"):
        assert guarded.post(path, json={}).status_code == 401

    for key in ("k-Test_123", "other"):
        accepted = guarded.post(COMPLETIONS, json=BODY, headers={"authorization": f"bearer {key}"})
        assert accepted.status_code == 200
    info = guarded.get("/server_info", headers={"authorization": "Bearer other"})
    assert "k-Test_123" not in info.text


@pytest.mark.parametrize("api_key", [(), ("k-user",)])
def test_an_admin_key_opens_all_and_alone_the_routes_of_operators(folder: Path, api_key: tuple[str, ...]) -> None:
    with (
        running_service(folder, api_key=api_key, admin_api_key=("k-admin",)) as service,
        httpx.Client(base_url=service.url) as client,
    ):
        user, admin = ({"authorization": f"Bearer {key}"} for key in ("k-user", "k-admin"))
        for headers in (user, admin):
            assert client.post(COMPLETIONS, json=BODY, headers=headers).status_code == 200
        assert client.post(COMPLETIONS, json=BODY).status_code == (401 if api_key else 200)
        refused = client.post("/flush_cache", headers=user)
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "admin_key_needed"
        assert client.get("/server_info", headers=user).status_code == 403
        assert client.post("/abort_request", json={"request_id": "r"}).status_code == (401 if api_key else 403)
        assert client.post("/flush_cache", headers=admin).status_code == 200
        info = client.get("/server_info", headers=admin)
        assert info.status_code == 200
        assert "k-admin" not in info.text


def test_keys_of_a_file_have_names_and_weights(folder: Path) -> None:
    file = folder / "keys"
    file.write_text("# a comment\nk-one\nk-two batch 0.5  # theirs\n\nk-#three batch 0.5 #\n")
    with running_service(folder, api_key=("k-flag",), api_key_file=str(file)) as service:
        for key in ("k-flag", "k-one", "k-two", "k-#three"):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{service.url}{COMPLETIONS}", json=BODY, headers=headers).status_code == 200
        for key in ("batch", "k-two batch 0.5", "#", "k-"):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.post(f"{service.url}{COMPLETIONS}", json=BODY, headers=headers).status_code == 401
        flag, one, *batch = [(submit.tenant, submit.weight) for submit in service.engine.submits]
    assert flag == ("key 1", 1.0)
    assert one[1] == 1.0 and one[0] not in ("", "key 1", "k-one")
    assert batch == [("batch", 0.5)] * 2


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        ("k-secret a 0", "line 1: the weight"),
        ("k-secret a nan", "line 1: the weight"),
        ("k-secret a 1 2", "line 1: more than"),
        ("k-secret\nk-secret", "line 2: this key is given twice"),
        ("k-secret a 1\nk-other a 2", "line 2: a has another weight"),
        ("# nothing", "no key"),
    ],
)
def test_a_wrong_key_file_is_an_error_that_names_the_line_and_no_key(folder: Path, lines: str, names: str) -> None:
    file = folder / "keys"
    file.write_text(lines)
    for path in (file, folder / "nowhere"):
        with pytest.raises(ConfigError) as caught:
            read_api_keys(ServeConfig(api_key_file=str(path)))
        assert str(path) in str(caught.value) and "k-secret" not in str(caught.value)
        assert path != file or names in str(caught.value)


def test_without_keys_any_authorization_will_do(http: httpx.Client) -> None:
    headers = {"authorization": "Bearer sk-whatever"}
    assert http.post(COMPLETIONS, json=BODY, headers=headers).status_code == 200


def test_browsers_are_not_let_in_unless_configured(http: httpx.Client) -> None:
    answer = http.options(CHAT, headers={**ORIGIN, "access-control-request-method": "POST"})
    assert answer.status_code == 405
    assert "access-control-allow-origin" not in http.post(COMPLETIONS, json=BODY, headers=ORIGIN).headers


@pytest.mark.parametrize("given", ["abc-1.2:3", "x" * 128])
def test_sane_request_id_of_the_client_is_kept(http: httpx.Client, service: Service, given: str) -> None:
    answer = http.post(COMPLETIONS, json=BODY, headers={"x-request-id": given})
    assert answer.headers["x-request-id"] == given
    assert answer.json()["id"] == f"cmpl-{given}"
    assert service.engine.submits[-1].request_id == given


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é", "<script>"])
def test_other_request_ids_are_replaced(http: httpx.Client, given: str) -> None:
    for path in ("/health", "/nope"):
        answer = http.get(path, headers={"x-request-id": given.encode()})
        assert answer.headers["x-request-id"] not in ("", given)

"""The client side of ``chat`` and ``complete``: finds or starts a server, and streams answers from it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, NamedTuple

import httpx

from radixserve.configs.options import OPTIONS, flag_of
from radixserve.engine.errors import ConfigError, RadixServeError
from radixserve.engine.lifeline import end_with_parent
from radixserve.server.commands.parser import Parser

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"

_SAMPLING = {"max_tokens": int, "temperature": float, "top_p": float, "seed": int}
_POLL_S = 0.1
_STOP_S = 10.0
_ERROR_LINE = re.compile(r"^(?:radixserve: (?:error: )?|\S+ ERROR +[\w.]+: )(.*)", re.MULTILINE)
_EPILOG = """\
Without --url the model is served by a server of its own, on a free port, until the command ends; what follows -- are
options of that `radixserve serve`. With --url the server that runs there is asked."""


class CallFailed(RadixServeError):
    """The server cannot be reached, or answered with an error."""


@dataclass(slots=True)
class Reply:
    """What one answer took, filled in while it streams. Times in seconds since the request was sent."""

    ttft_s: float = 0.0
    total_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0

    def summary(self) -> str:
        decode_s = self.total_s - self.ttft_s
        speed = f", {(self.tokens - 1) / decode_s:.1f} tokens/s" if self.tokens > 1 and decode_s > 0 else ""
        prompt = f"{self.prompt_tokens} prompt tokens ({self.cached_tokens} cached)"
        return (
            f"{prompt}, {self.tokens} generated; TTFT {1000 * self.ttft_s:.0f} ms{speed}, {self.total_s:.2f} s in all"
        )


class Piece(NamedTuple):
    """Some text of an answer, or of the reasoning before it where the server tells these apart."""

    text: str
    is_reasoning: bool = False


@dataclass(frozen=True)
class Client:
    """Asks one server for answers of one model. ``sampling``: fields of every request."""

    http: httpx.Client
    model: str
    sampling: Mapping[str, Any]

    def stream(self, path: str, body: Mapping[str, Any], reply: Reply) -> Iterator[Piece]:
        """Pieces of the answer, none empty; leaving the iteration ends the request. Raises ``CallFailed``."""
        fields = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        start = time.monotonic()
        try:
            with self.http.stream("POST", path, json={**fields, **self.sampling, **body}) as response:
                if response.status_code != 200:
                    response.read()
                    raise CallFailed(_message(response))
                for event in _events(response):
                    reply.total_s = time.monotonic() - start
                    piece = _take(event, reply)
                    if piece.text:
                        yield piece
        except httpx.HTTPError as error:
            raise CallFailed(f"the server at {self.http.base_url} cannot be reached: {error}") from error


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line[6:])


def _take(event: Mapping[str, Any], reply: Reply) -> Piece:
    if "error" in event:
        raise CallFailed(event["error"]["message"])
    if usage := event.get("usage"):
        reply.prompt_tokens, reply.tokens = usage["prompt_tokens"], usage["completion_tokens"]
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    choice: dict[str, Any] = next(iter(event.get("choices") or ()), {})
    delta = choice.get("delta") or {}
    thought: str = delta.get("reasoning_content") or delta.get("reasoning") or ""
    text: str = choice.get("text") or delta.get("content") or ""
    if text or thought:
        reply.ttft_s = reply.ttft_s or reply.total_s
        reply.tokens += 1
    return Piece(thought, is_reasoning=True) if thought else Piece(text)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answered {response.status_code}"


# ---- flags ----


def client_parser(command: str, usage: str, description: str) -> Parser:
    parser = Parser(
        prog=f"radixserve {command}",
        usage=f"radixserve {command} {usage} [options] [-- serve options]",
        description=description,
        epilog=_EPILOG,
        behind_dashes=[option.flag for option in OPTIONS.values()],
    )
    parser.add_argument("--url", help="a running server, http://host:port")
    parser.add_argument("--model", help="model to serve, or with --url one that is served there")
    parser.add_argument("--api-key", help="bearer token [the first of RADIXSERVE_API_KEY]")
    for name, kind in _SAMPLING.items():
        parser.add_argument(flag_of(name), type=kind, metavar=name.rpartition("_")[2].upper())
    return parser


def split_serve_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments before and after ``--``."""
    own = list(arguments)
    return (own[: own.index("--")], own[own.index("--") + 1 :]) if "--" in own else (own, [])


@contextmanager
def connected(flags: argparse.Namespace, serve_options: Sequence[str]) -> Iterator[Client]:
    """A client for the server that the flags of ``client_parser`` name. Raises ``ConfigError`` and ``CallFailed``."""
    if flags.url and serve_options:
        raise ConfigError("options after -- are for a server that is started here; leave them or --url out")
    key = flags.api_key or os.environ.get("RADIXSERVE_API_KEY", "").split(",")[0]
    sampling = {name: value for name in _SAMPLING if (value := getattr(flags, name)) is not None}
    with contextlib.ExitStack() as stack:
        if flags.url:
            url = base_url(flags.url)
        else:
            url = stack.enter_context(_local_server([*([flags.model] if flags.model else []), *serve_options]))
        timeout = httpx.Timeout(None, connect=10)
        http = stack.enter_context(
            httpx.Client(base_url=url, headers=key_header(key), timeout=timeout, trust_env=bool(flags.url))
        )
        served = served_models(http)
        wanted = flags.model if flags.url and flags.model else served[0]
        if wanted not in served:
            raise ConfigError(f"--model {wanted} is not served at {url}; served: {', '.join(served)}")
        yield Client(http, wanted, sampling)


def base_url(url: str) -> str:
    """Of a server, however people write it: without http://, with /v1."""
    return (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")


def key_header(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


def served_models(http: httpx.Client) -> list[str]:
    """Names of the models there, one or more. Raises ``CallFailed``."""
    try:
        response = http.get("/v1/models", timeout=10)
        if response.status_code != 200:
            raise CallFailed(_message(response))
        names = [str(model["id"]) for model in response.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CallFailed(
            f"no server at {http.base_url} ({error}): is it running? `radixserve serve` starts one"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise CallFailed(f"{http.base_url} does not list its models ({error!r})") from error
    if not names:
        raise CallFailed(f"{http.base_url} has no models")
    return names


# ---- a server of our own ----


@contextmanager
def _local_server(options: Sequence[str]) -> Iterator[str]:
    """Serve on a free port within the scope; yields the URL once requests can be served. Raises ``ConfigError``."""
    serve = [sys.executable, "-P", "-m", "radixserve.server.cli", "serve"]
    command = [*serve, *options, "--port", "0", "--log-format", "text"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # a Ctrl-C of the terminal is for us
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        assert process.stdout is not None
        try:
            found = re.search(r"http://\S+", process.stdout.readline().decode())
            if found is None:
                process.wait()
                raise ConfigError(_last_error(log))
            _wait_until_ready(found[0], process, log)
            yield found[0]
        finally:
            _stop(process)
            process.stdout.close()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
    shows = sys.stderr.isatty()
    with httpx.Client(base_url=url, trust_env=False, timeout=10) as http:
        while (state := _health(http))["status"] != "ok":
            if process.poll() is not None:
                raise ConfigError(_last_error(log))
            if shows:
                line = f"{state['reason']} {state.get('progress', 0):.0%}"
                narrow = line[: shutil.get_terminal_size().columns - 1]  # \r goes back within one line only
                print(f"\r\033[K{narrow}", end="", file=sys.stderr, flush=True)
            time.sleep(_POLL_S)
    if shows:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _health(http: httpx.Client) -> dict[str, Any]:
    try:
        health: dict[str, Any] = http.get("/health").json()
    except httpx.TransportError:  # it is just leaving
        return {"status": "gone", "reason": "the server stops"}
    return health


def _last_error(log: IO[bytes]) -> str:
    """The line of the server's log that tells users what is wrong, or else the end of the log."""
    log.seek(0)
    text = log.read().decode(errors="replace")
    told = _ERROR_LINE.search(text)
    return told[1] if told else "\n".join(["the server did not start:", *text.splitlines()[-5:]])


def _stop(process: subprocess.Popen[bytes]) -> None:
    for _ in range(2):  # a second signal stops at once
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
            return
    process.kill()
    process.wait()

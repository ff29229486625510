"""``radixserve bench serve``: closed-loop streaming load on any OpenAI-compatible server, as a table and JSON."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import httpx

from radixserve.engine.errors import ConfigError
from radixserve.server.bench.arguments import positive, span, write_json
from radixserve.server.bench.load import Workload, run_load


def run(arguments: Sequence[str]) -> int:
    """Returns 1 when any request failed."""
    options = _parser().parse_args(arguments)
    url = options.url.rstrip("/").removesuffix("/v1")
    workload = Workload(
        url=url,
        model=options.model or _first_model(url, options.api_key),
        clients=options.clients,
        requests=options.requests or 4 * options.clients,
        prompt_words=options.prompt_words,
        max_tokens=options.max_tokens,
        processes=options.processes,
        seed=options.seed,
        api_key=options.api_key,
    )
    report = run_load(workload)
    summary = report.summary()
    print(f"{workload.clients} clients, {workload.requests} requests to {url}, model {workload.model}")
    for name, value in summary.items():
        print(f"  {name:<20} {value:>12,.2f}")
    for error in sorted({sample.error for sample in report.samples if sample.error}):
        print(f"  error: {error}")
    facts = {"clients": workload.clients, "model": workload.model, "seed": workload.seed, **summary}
    write_json(options.json, facts)
    return 1 if summary["errors"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="radixserve bench serve", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server under test (default: %(default)s)")
    add("--model", help="model name to send (default: the first that the server lists)")
    add("--clients", type=positive, default=8, help="clients at the same time (default: %(default)s)")
    add("--requests", type=positive, help="requests in all (default: 4 for each client)")
    add("--prompt-words", type=span, default=(64, 512), metavar="LOW:HIGH", help="words a prompt (default: 64:512)")
    add("--max-tokens", type=span, default=(64, 512), metavar="LOW:HIGH", help="tokens an answer (default: 64:512)")
    add("--processes", type=positive, default=1, help="client processes (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the workload (default: %(default)s)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="key to send (default: $OPENAI_API_KEY)")
    add("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return parser


def _first_model(url: str, api_key: str | None) -> str:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10, trust_env=False)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
        raise ConfigError(f"{url} does not list its models ({error}); is it running? Else give --model") from error

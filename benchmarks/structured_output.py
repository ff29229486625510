"""What a grammar costs: processor time a token beside unconstrained answers, on one server, in turn.

    python benchmarks/structured_output.py [--rounds 5] [--clients 1 8] [--output FILE]

Each round asks for answers of the same length of every kind, one kind after the other, so that what else the machine
does hits all. Processor time is that of the engine's process, divided by the tokens that it made. ``regex`` has a mask
at each token and never a forced one; ``json`` is a list of records, in which names and punctuation are forced.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from server_under_test import running_server

SERVE = (sys.executable, "-m", "radixserve.server.cli", "serve", "--port", "{port}")
START_SECONDS = 120
RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "regex": {"regex": r"[A-Za-z ,.'\n-]*"},
    "json": {"structured_outputs": {"json": {"type": "array", "items": RECORD, "minItems": 1000}}},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    options = parser.parse_args()
    rounds = []
    with running_server(shlex.split(shlex.join(SERVE)), START_SECONDS) as url, httpx.Client(base_url=url) as http:
        http.timeout = httpx.Timeout(600)
        for kind in KINDS:  # compiles the grammar
            measure(http, kind, 1, 16)
        for number in range(options.rounds):
            found = {
                str(clients): {kind: measure(http, kind, clients, options.tokens) for kind in KINDS}
                for clients in options.clients
            }
            rounds.append(found)
            print(f"round {number + 1}: {found}", flush=True)
    if options.output:
        options.output.write_text(json.dumps({"kinds": KINDS, "tokens": options.tokens, "rounds": rounds}, indent=1))
    report(rounds)


def measure(http: httpx.Client, kind: str, clients: int, num_tokens: int) -> float:
    """Milliseconds of processor time a token, of ``clients`` answers at once."""
    limits = {"min_tokens": num_tokens, "max_tokens": num_tokens, "ignore_eos": True}
    body = {"prompt": "A list of people:\n", "temperature": 0.7, **limits}

    def ask(seed: int) -> int:
        answer = http.post("/v1/completions", json={**body, **KINDS[kind], "seed": seed})
        answer.raise_for_status()
        return int(answer.json()["usage"]["completion_tokens"])

    engine = psutil.Process(http.get("/server_info").json()["engine_pid"])
    before = engine.cpu_times()
    with ThreadPoolExecutor(clients) as pool:
        made = sum(pool.map(ask, range(clients)))
    after = engine.cpu_times()
    return 1e3 * (after.user + after.system - before.user - before.system) / made


def report(rounds: list[dict[str, dict[str, float]]]) -> None:
    print("\n| clients | kind | ms a token, median | beside free answers: median (lowest, highest round) |")
    print("|---|---|---|---|")
    for clients in rounds[0]:
        for kind in KINDS:
            times = [found[clients][kind] for found in rounds]
            ratios = sorted(found[clients][kind] / found[clients]["free"] for found in rounds)
            spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"
            print(f"| {clients} | {kind} | {statistics.median(times):.2f} | {spread} |")


if __name__ == "__main__":
    main()

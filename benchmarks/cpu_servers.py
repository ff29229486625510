"""radixserve beside another OpenAI-compatible server on a CPU, in turn, so that what else the machine does hits both.

    python benchmarks/cpu_servers.py --peer "llama-server -m MODEL.gguf --port {port} -np 32 -c 32768"

Each round starts one server, loads it with each number of clients through ``radixserve bench serve``, ends it, and does
the same with the other. ``{port}`` and ``{model}`` (the default model's file) in the peer's command are filled in.
Prints medians and the ratios of each round, and how long /health took beside each load, asked 20 times a second.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from server_under_test import running_server

from radixserve.configs.schema import ServeConfig
from radixserve.engine.model_files import resolve_model

CLI = (sys.executable, "-m", "radixserve.server.cli")
START_SECONDS = 400  # a server that compiles its model first
PROBE_SECONDS = 0.05
# name: clients, requests, words of a prompt, tokens of an answer
LOADS = {
    "1 client": ("1", "4", "64:64", "64:64"),
    "8 clients": ("8", "16", "64:64", "64:64"),
    "32 clients": ("32", "32", "64:64", "64:64"),
    "prompts of 512 words": ("1", "4", "512:512", "1:1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", required=True, help="command of the other server")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file for all results")
    options = parser.parse_args()
    model = resolve_model(ServeConfig().model).gguf
    commands = {"radixserve": shlex.join([*CLI, "serve", "--port", "{port}"]), "peer": options.peer}
    rounds: list[dict[str, Any]] = []
    for number in range(options.rounds):
        found = {name: measure(command, str(model), number) for name, command in commands.items()}
        rounds.append(found)
        print(f"round {number + 1}: " + ", ".join(f"{load} {ratio(found, load):.2f}" for load in LOADS), flush=True)
        if options.output:
            options.output.write_text(json.dumps({"loads": LOADS, "peer": options.peer, "rounds": rounds}, indent=1))
    report(rounds)


def measure(command: str, model: str, seed: int) -> dict[str, Any]:
    """Results of all loads, by name."""
    server = shlex.split(command.replace("{model}", model))
    with tempfile.TemporaryDirectory() as folder, running_server(server, START_SECONDS) as url:
        results = {}
        for name, (clients, requests, words, tokens) in LOADS.items():
            output = Path(folder) / "report.json"
            bench = [*CLI, "bench", "serve", "--url", url, "--json", str(output)]
            load = ["--clients", clients, "--requests", requests, "--prompt-words", words, "--max-tokens", tokens]
            with health_probe(f"{url}/health") as delays:
                subprocess.run([*bench, *load, "--seed", str(seed)], check=True, stdout=subprocess.DEVNULL)
            results[name] = json.loads(output.read_text()) | {"health_ms": percentiles(delays)}
    return results


@contextmanager
def health_probe(url: str) -> Iterator[list[float]]:
    """Milliseconds that each answer took, a new connection each as with an orchestrator's probe; None answered: inf."""
    delays: list[float] = []
    ended = threading.Event()

    def probe() -> None:
        while not ended.wait(PROBE_SECONDS):
            start = time.perf_counter()
            try:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    answer.read()
                delays.append(1e3 * (time.perf_counter() - start))
            except OSError:
                delays.append(float("inf"))

    thread = threading.Thread(target=probe)
    thread.start()
    try:
        yield delays
    finally:
        ended.set()
        thread.join()


def percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99])
    return {"count": len(values), "p50": float(p50), "p99": float(p99), "max": max(values)}


def rate(results: dict[str, Any], load: str) -> float:
    """Tokens a second: generated ones, or, where answers are one token, of the prompts."""
    (summary,) = results[load]["loads"].values()
    return float(summary["prompt_tokens_per_s" if load.startswith("prompts") else "output_tokens_per_s"])


def ratio(found: dict[str, Any], load: str) -> float:
    return rate(found["radixserve"], load) / rate(found["peer"], load)


def report(rounds: list[dict[str, Any]]) -> None:
    print(
        "\n| load | radixserve, tok/s | peer, tok/s | ratio: median (lowest, highest) | /health p99, ms: ours, peer's |"
    )
    print("|---|---|---|---|---|")
    for load in LOADS:
        ours, peers = (
            statistics.median(rate(found[name], load) for found in rounds) for name in ("radixserve", "peer")
        )
        probes = (
            f"{max(found[name][load]['health_ms']['p99'] for found in rounds):.0f}" for name in ("radixserve", "peer")
        )
        ratios = sorted(ratio(found, load) for found in rounds)
        spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}, {ratios[-1]:.2f})"
        print(f"| {load} | {ours:.0f} | {peers:.0f} | {spread} | {', '.join(probes)} |")


if __name__ == "__main__":
    main()

"""``radixserve bench serve``: streaming load on any OpenAI-compatible server, as a table, JSON and pictures.

A closed loop of --clients, each sending its next request when the last one is answered, or an open loop that begins
--rate conversations a second. Several values, separated by commas, are measured one after the other.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

import httpx

from radixserve.engine.errors import ConfigError
from radixserve.server.bench.arguments import above_zero, count, counts, output_file, positive, rates, span, write_json
from radixserve.server.bench.load import ClosedLoop, Load, OpenLoop, Pace, Sample, run_load, shown_count
from radixserve.server.bench.report import Goal, Summary, check_plot, plot_curves, plot_spread, summarize, table
from radixserve.server.bench.streaming import Target
from radixserve.server.bench.workload import Workload
from radixserve.server.commands.client import base_url, key_header, served_models
from radixserve.server.commands.parser import Parser

_CLIENTS = 8
# By default a closed loop sends so many conversations for each client, and an open one goes on for so many seconds.
_ROUNDS = 4
_SECONDS = 30
# A server may take so long to load.
_LOADING_S, _POLL_S = 600.0, 0.25


def run(arguments: Sequence[str]) -> int:
    """Returns 1 when any request failed."""
    options = build_parser().parse_args(arguments)
    check_plot(options.plot)
    if options.prompts and options.turns > 1:
        raise ConfigError("--turns does not go with --prompts, whose entries have one turn each; leave out one of them")
    target = Target(base_url(options.url), options.api_key)
    _wait_until_ready(target)
    model = options.model or _first_model(target)
    # Its fields have flags of their names.
    workload = Workload(**{name: getattr(options, name) for name in Workload.__dataclass_fields__})
    goal = Goal(options.good_ttft_ms / 1e3, options.good_itl_ms / 1e3)
    columns: dict[str, Summary] = {}
    samples: list[Sample] = []
    for seed, pace in enumerate(_paces(options), options.seed):
        size, default_count = _size(pace)
        conversations = workload.draw(options.requests or default_count, seed)
        processes = options.processes or _processes(size)
        with shown_count(str(pace), len(conversations)) as ended:
            load = Load(target, model, pace, processes, options.ignore_eos, options.timeout, seed, ended)
            runs = run_load(load, conversations)
        samples = [sample for run in runs for sample in run.samples]
        columns[str(pace)] = summarize(runs, goal)
        for error in sorted({sample.error for sample in samples if sample.error}):
            print(f"{pace}: {error}")
    print(f"{target.url}, model {model}\n{table(columns)}")
    if options.plot:
        _plot(options, columns, samples)
    facts = {"url": target.url, "model": model, "seed": options.seed, "workload": vars(workload), "loads": columns}
    write_json(options.json, "serve", arguments, facts)
    return 1 if any(summary["errors"] for summary in columns.values()) else 0


def _paces(options: argparse.Namespace) -> list[Pace]:
    if options.rate:
        return [OpenLoop(rate, options.burstiness) for rate in options.rate]
    return [ClosedLoop(clients) for clients in options.clients or [_CLIENTS]]


def _plot(options: argparse.Namespace, columns: dict[str, Summary], samples: list[Sample]) -> None:
    """``samples``: of the last load."""
    if len(columns) == 1:
        (name,) = columns
        good = [sample for sample in samples if sample.error is None]
        panels = {
            "first token": [1e3 * sample.ttft_s for sample in good],
            "between chunks": [1e3 * gap for sample in good for gap in sample.gaps_s],
            "whole answer": [1e3 * sample.total_s for sample in good],
        }
        plot_spread(options.plot, {title: {name: times} for title, times in panels.items()})
        return
    points = {_size(pace)[0]: summary for pace, summary in zip(_paces(options), columns.values(), strict=True)}
    plot_curves(options.plot, "conversations a second" if options.rate else "clients", points)


def _size(pace: Pace) -> tuple[float, int]:
    """Clients or rate, and the conversations to hold by default."""
    if isinstance(pace, ClosedLoop):
        return pace.clients, _ROUNDS * pace.clients
    return pace.rate, max(1, round(_SECONDS * pace.rate))


def _processes(size: float) -> int:
    """Client processes for so many clients, or arrivals a second: one is enough for a few dozen."""
    return max(1, min(8, (os.cpu_count() or 1) // 2, round(size / 32)))


def build_parser() -> Parser:
    parser = Parser(prog="radixserve bench serve", description=__doc__)
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000", help="server under test (default: %(default)s)")
    add("--model", help="model name to send (default: the first that the server lists)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="key to send (default: $OPENAI_API_KEY)")
    either = parser.add_mutually_exclusive_group().add_argument
    either("--clients", type=counts, metavar="N[,N]", help=f"clients at the same time (default: {_CLIENTS})")
    either("--rate", type=rates, metavar="R[,R]", help="conversations that begin in a second, instead of --clients")
    add("--burstiness", type=above_zero, default=1.0, help="of --rate: 1 is Poisson, less comes in bursts (default: 1)")
    add("--requests", type=positive, help="conversations in all (default: 4 for each client, or 30 s of --rate)")
    add("--prompt-words", type=span, default=(64, 512), metavar="LOW:HIGH", help="words a text (default: 64:512)")
    add("--max-tokens", type=span, default=(64, 512), metavar="LOW:HIGH", help="tokens an answer (default: 64:512)")
    add("--turns", type=positive, default=1, help="texts a conversation, each with what was said before (default: 1)")
    add("--prefixes", type=count, default=0, help="system prompts that all conversations share (default: none)")
    add("--prefix-words", type=positive, default=1024, help="words of each of these (default: %(default)s)")
    add("--prompts", type=Path, metavar="FILE", help="a text a line, or JSON with prompt or messages, and max_tokens")
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers of full length (default: yes)",
    )
    add("--good-ttft-ms", type=above_zero, default=500.0, help="a good request's first token (default: %(default)s)")
    add("--good-itl-ms", type=above_zero, default=50.0, help="and each further one on average (default: %(default)s)")
    add("--processes", type=positive, help="client processes (default: by load and cores, at most 8)")
    add("--timeout", type=above_zero, default=600.0, metavar="S", help="for one answer (default: %(default)s)")
    add(
        "--seed", type=int, default=0, help="seed of the first load, the next ones have the next (default: %(default)s)"
    )
    add("--json", type=output_file, metavar="FILE", help="write the figures there as well")
    add("--plot", type=output_file, metavar="FILE", help="draw them: .png, .svg or .pdf")
    return parser


def _wait_until_ready(target: Target) -> None:
    """While the server says at /health that it is there and not ready, as most do as long as they load."""
    deadline, told = time.monotonic() + _LOADING_S, False
    while True:
        try:
            answer = httpx.get(f"{target.url}/health", timeout=10, trust_env=False)
        except (httpx.HTTPError, httpx.InvalidURL):
            return  # whoever needs the server will tell
        if answer.status_code != HTTPStatus.SERVICE_UNAVAILABLE:
            return
        if time.monotonic() > deadline:
            raise ConfigError(f"{target.url} is not ready after {_LOADING_S:.0f} s: {answer.text[:200]}")
        if not told:
            print(f"waiting until {target.url} is ready", file=sys.stderr, flush=True)
        told = True
        time.sleep(_POLL_S)


def _first_model(target: Target) -> str:
    with httpx.Client(base_url=target.url, headers=key_header(target.api_key), trust_env=False) as http:
        return served_models(http)[0]

"""Sums over the GPUs of a host, captured in graphs: `python benchmarks/gpu_ranks.py [--ranks 2] [--out FILE]`.

Starts a process for each rank. For each number of tokens: NCCL's sum and ours (``kernels/triton_peers.py``), alone and
with the residual and the norm that follow, in microseconds; the largest error against the exact result, in units of the
largest value; and whether all ranks have the same bits. Then draws of tokens from logits of which each rank has a part,
and two endings: a sum whose partner is gone, and leaving NCCL. Nothing waits longer than ``--limit`` seconds.
``--tiny`` tries it out on a CPU.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_timing import replay_us
from torch import Tensor

from radixserve.engine.parallel import ParallelLogits
from radixserve.engine.ranks import TorchRanks
from radixserve.engine.sharding import Shard
from radixserve.kernels.interface import Norm, Ops
from radixserve.kernels.select import select_ops, select_sampling

CALLS = 24  # in a graph
REPLAYS = 12
EPS = 1e-6
Call = Callable[[Tensor, Tensor], tuple[Tensor, ...]]  # x, residual -> results; may overwrite both


class Rank:
    """What one process does; all do the same."""

    def __init__(self, shard: Shard, options: argparse.Namespace):
        self.shard, self.options = shard, options
        self.device = torch.device("cpu" if options.tiny else f"cuda:{shard.rank}")
        self.dtype = torch.float32 if options.tiny else torch.bfloat16
        if not options.tiny:
            torch.cuda.set_device(self.device)
        self.ranks = TorchRanks(shard, self.device)
        self.ranks.meet(Path(options.meeting))
        self.norm = Norm(self.values(-1, options.hidden), EPS)
        alone, summing = (select_ops(self.device, self.dtype, sums=sums) for sums in (None, self.ranks))
        self.calls = {
            "nccl": self.sum_by_nccl,
            "ours": lambda x, residual: (self.ranks.all_reduce(x),),
            "nccl+norm": lambda x, residual: self.add_norm(alone, *self.sum_by_nccl(x, residual), residual),
            "ours+norm": lambda x, residual: self.add_norm(summing, x, residual),
        }
        if options.tiny:
            del self.calls["ours+norm"]

    def values(self, seed: int, *shape: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed + 2)
        return torch.randn(shape, generator=generator, device=self.device).to(self.dtype)

    def sum_by_nccl(self, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        dist.all_reduce(x)
        return (x,)

    def add_norm(self, ops: Ops, x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        return ops.add_rms_norm(x, residual, self.norm)

    def measure(self, tokens: int) -> dict[str, Any]:
        shape = (tokens, self.options.hidden)
        row: dict[str, Any] = {"tokens": tokens}
        given = [self.values(rank, *shape) for rank in range(self.shard.size)]
        total = torch.stack([x.float() for x in given]).sum(0)
        residual = self.values(100, *shape)
        stream = total + residual.float()
        normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + EPS) * self.norm.weight.float()
        for name, call in self.calls.items():
            expected = (normed, stream) if name.endswith("norm") else (total,)
            found = call(given[self.shard.rank].clone(), residual.clone())
            errors = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
            same = all(bool((self.ranks.all_gather(each) == each).all()) for each in found)
            row[name] = self.time_us(call, given[self.shard.rank], residual)
            row[f"{name} error"], row[f"{name} same bits"] = max(errors), same
        return row

    def time_us(self, call: Call, x: Tensor, residual: Tensor) -> float:
        x, residual = x.clone(), residual.clone()

        def body() -> None:
            for _ in range(CALLS):
                call(x.zero_() if self.options.tiny else x, residual)

        self.ranks.least(0)
        if self.options.tiny:
            start = time.perf_counter()
            body()
            return 1e6 * (time.perf_counter() - start) / CALLS
        call(x, residual)
        us = self.replayed_us(body) / CALLS
        self.graph.reset()
        return us

    def replayed_us(self, body: Callable[[], None]) -> float:
        """Of ``graph``, which contains ``body`` then."""
        self.graph = graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        # NCCL's own thread asks for its events all the time, which is no part of a capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            body()
        self.ranks.least(0)
        return statistics.median(replay_us(graph, REPLAYS))

    def draws_us(self, count: int, vocab_size: int) -> dict[str, float]:
        """Of ``count`` tokens, from parts of their logits, without filters and with, and from all that are gathered."""
        parallel, kernels = ParallelLogits(self.shard, self.ranks, vocab_size), select_sampling(self.device)
        assert kernels is not None
        part = torch.randn(count, -(-vocab_size // self.shard.size), device=self.device)
        rows = torch.arange(count, dtype=torch.int32, device=self.device)
        floats = torch.tensor([[0.6, 1.0, 0.0]], device=self.device).repeat(count, 1)
        ints = torch.tensor([[1, vocab_size]], device=self.device).repeat(count, 1)
        rules, last_tokens = (rows, floats, ints, rows), torch.zeros(count, dtype=torch.int64, device=self.device)

        def from_parts() -> None:
            lines = parallel.add_up(kernels.lines_of_part(part, *rules, parallel.part))
            kernels.pick(lines, *rules, last_tokens, parallel.part)

        def from_all() -> None:
            kernels.draw(parallel.gather(part), *rules, last_tokens)

        found = {}
        cases = {"parts": (vocab_size, 1.0), "all": (vocab_size, 1.0), "parts, filters": (20, 0.95)}
        for name, (top_k, top_p) in cases.items():
            ints[:, 1], floats[:, 1] = top_k, top_p
            body = from_all if name == "all" else from_parts
            body()
            found[name] = self.replayed_us(body)
            self.graph.reset()
        return found

    def lose_partner(self) -> float:
        """Rank 0 begins a sum that nobody else makes; milliseconds until it ends after ``abort``."""
        torch.cuda.synchronize()
        self.ranks.all_reduce(self.values(0, 1, self.options.hidden))
        time.sleep(0.5)
        start = time.perf_counter()
        self.ranks.abort()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)


def run_rank(options: argparse.Namespace) -> None:
    faulthandler.dump_traceback_later(options.limit, exit=True)
    rank = Rank(Shard(options.rank, options.ranks), options)
    is_first = options.rank == 0
    results = []
    for tokens in options.tokens:
        results.append(rank.measure(tokens))
        if is_first:
            print(*(f"{key}: {_short(value)}" for key, value in results[-1].items()), sep=" | ", flush=True)
    if not options.tiny:
        found = rank.draws_us(256, 151936)
        if is_first:
            print("draws of 256 tokens from", *(f"{name}: {us:.0f} us" for name, us in found.items()), flush=True)
    if options.out and is_first:
        options.out.write_text(json.dumps(results))
    rank.ranks.least(0)
    if is_first:
        if not options.tiny:
            try:
                print(f"a sum without a partner ended {rank.lose_partner():.1f} ms after abort", flush=True)
            except RuntimeError as error:  # as when the driver takes the partner's memory away
                print(f"a sum without a partner failed: {error}", flush=True)
        start = time.perf_counter()
        rank.ranks.leave()
        print(f"left after {time.perf_counter() - start:.2f} s", flush=True)
    sys.stdout.flush()
    os._exit(0)  # as followers do


def _short(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.1f} us" if value >= 0.1 else f"{value:.1e}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256, 1024, 2048, 4096, 8192])
    parser.add_argument("--limit", type=float, default=90.0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None:
        run_rank(options)
    given = sys.argv[1:] if arguments is None else arguments
    with tempfile.TemporaryDirectory() as meeting:
        command = [sys.executable, __file__, *given, "--meeting", meeting, "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(options.ranks)]
        deadline = time.monotonic() + options.limit + 10
        for process in ranks:
            try:
                process.wait(max(1.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        return max(abs(process.wait()) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())

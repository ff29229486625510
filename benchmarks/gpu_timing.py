"""Shared by the GPU benchmarks: time in CUDA-graph replays, and compile Triton kernels on all cores beforehand."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

DEVICE = torch.device("cuda")
BYTES_PER_US = 4.29e6  # of an H200's memory
_REPLAYS = 12


def graph_us(body: Callable[[], None], calls: int) -> float:
    """Median microseconds of one call, ``body`` making ``calls`` of them. Give it buffers larger than the L2 cache."""
    return statistics.median(replay_us(capture(body), _REPLAYS)) / calls


def decode_layout(kv_lens: NDArray[np.integer[Any]], page_table: NDArray[np.int32], page_size: int) -> Any:
    """Stands for the ``BatchLayout`` of one decode for each of ``kv_lens``."""
    return types.SimpleNamespace(
        kv_lens=torch.from_numpy(kv_lens.astype(np.int32)).to(DEVICE),
        rows=torch.arange(len(kv_lens), dtype=torch.int32, device=DEVICE),
        page_table=torch.from_numpy(page_table).to(DEVICE),
        page_size=page_size,
    )


def attention_us(
    kernel: Any, plan: Callable[[], None], q: Tensor, caches: Sequence[Tensor], rounds: int
) -> tuple[float, Tensor]:
    """Microseconds of one decode attention, planned once for ``rounds`` through all ``caches``, and what it gives for
    the first of them."""
    out = torch.full_like(q, float("nan"))

    def body() -> None:
        plan()
        q.mul_(1)  # the ordinary kernel that has to lie between plan and run
        for cache in [*reversed(caches)] * rounds:
            kernel.run_decode(q, cache[0], cache[1], out)

    return graph_us(body, rounds * len(caches)), out


def capture(body: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """Warm up on a side stream, then record ``body``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, replays: int) -> list[float]:
    """Microseconds of each replay; the first, which follows an idle device, is left out."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 2)]
    for mark in marks:
        mark.record()
        graph.replay()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in zip(marks[1:-1], marks[2:], strict=True)]


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - ref|| / ||ref|| in fp32; NaN if anything is."""
    return float((out.float() - reference.float()).norm() / reference.float().norm())


Job = tuple[str, str, tuple[Any, ...], dict[str, Any]]  # module, kernel, arguments (dtypes for tensors), options


def precompile(jobs: Sequence[Job]) -> None:
    """Fill Triton's disk cache from one process a core, so that a sweep spends the device's time on measuring."""
    workers = min(len(jobs), os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for error in pool.imap_unordered(_compile, jobs, chunksize=1):
            if error:
                print(error)


def _compile(job: Job) -> str | None:
    module, kernel, args, options = job
    try:
        namespace = __import__(module, fromlist=[kernel])
        getattr(namespace, kernel).warmup(*args, grid=(1, 1, 1), **options)
    except Exception as error:  # a configuration that does not compile is a result of the sweep
        return f"{kernel} {options}: {str(error)[:200]}"
    return None

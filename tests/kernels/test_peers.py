"""Sums over ranks by kernels that write into each other's memory.

In Triton's interpreter ranks are processes that share memory, on a GPU they are streams of one device:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_peers.py``.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from radixserve.kernels.interface import Norm
from radixserve.kernels.peer_memory import RAISED, flag_bytes, mailbox_bytes

pytest.importorskip("triton")
from radixserve.kernels.triton_peers import PeerSums

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("needs a GPU, or Triton's interpreter", allow_module_level=True)

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
EPS = 1e-6
SIZE = 48 if INTERPRETED else 4096
# Tokens and parts: more tokens than blocks, and fewer blocks than in the sum before.
SHAPES = [(3, 1), (1, 2), (136, 1), (2, 2), (1, 1)] if INTERPRETED else [(300, 1), (1, 4), (256, 2), (17, 1), (1, 1)]
SLICE_BYTES = max(tokens for tokens, _ in SHAPES) * SIZE * 4  # just as much as the longest needs
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Ranks that wait for each other in vain say where, and end the run."""
    faulthandler.dump_traceback_later(90, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def part_of(rank: int, index: int, dtype: torch.dtype) -> Tensor:
    tokens, parts = SHAPES[index]
    return randn(10 * index + rank, *([parts] if parts > 1 else []), tokens, SIZE).to(DEVICE, dtype)


def common(index: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Residual and weight, the same on all ranks."""
    return randn(100 + index, SHAPES[index][0], SIZE).to(DEVICE, dtype), randn(200, SIZE).to(DEVICE, dtype)


def bests(rank: int, ranks: int) -> Tensor:
    """As draws from parts of the logits are told: short lines, of which each rank fills in a part."""
    line = torch.zeros(3, 2, ranks)
    line[:, 0, rank] = torch.tensor([torch.inf, -torch.inf, 0.1 + rank])
    line[:, 1, rank] = 2**24 - 1 - rank
    return line.flatten(1).to(DEVICE)


class Rank:
    """One of them, with all that it gives to the sums."""

    def __init__(self, rank: int, mailboxes: list[Tensor], dtype: torch.dtype):
        self.sums = PeerSums(rank, [mailbox.data_ptr() for mailbox in mailboxes], SLICE_BYTES, DEVICE)
        self.bests = bests(rank, len(mailboxes))
        self.given = [(part_of(rank, index, dtype), *common(index, dtype)) for index in range(len(SHAPES))]

    def run(self) -> list[Tensor]:
        """All results, one sum after another."""
        found = []
        for part, residual, weight in self.given:
            stream = residual.clone()
            found += [self.sums.add_rms_norm(part, stream, Norm(weight, EPS)), stream]
            if part.dim() == 2:
                found.append(self.sums.all_reduce(part.clone()))
        return [*found, self.sums.all_reduce(self.bests.clone())]


def run_process(rank: int, mailboxes: list[Tensor], dtype: torch.dtype, results: Any) -> None:
    results.put((rank, [tensor.numpy() for tensor in Rank(rank, mailboxes, dtype).run()]))


def in_processes(mailboxes: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    for mailbox in mailboxes:
        mailbox.share_memory_()
    context = multiprocessing.get_context("fork")  # at the same addresses
    queue = context.Queue()
    ranks = [context.Process(target=run_process, args=(r, mailboxes, dtype, queue)) for r in range(len(mailboxes))]
    for process in ranks:
        process.start()
    found = dict(queue.get(timeout=60) for _ in ranks)
    for process in ranks:
        process.join()
    return [[torch.from_numpy(array) for array in found[rank]] for rank in range(len(ranks))]


def in_graphs(mailboxes: list[Tensor], dtype: torch.dtype) -> list[list[Tensor]]:
    ranks = [Rank(rank, mailboxes, dtype) for rank in range(len(mailboxes))]
    graphs = [torch.cuda.CUDAGraph() for _ in ranks]
    flags = [mailbox[: flag_bytes(len(mailboxes)) // 8] for mailbox in mailboxes]
    found = []
    for rank, graph in zip(ranks, graphs, strict=True):
        for flag in flags:
            flag.fill_(RAISED)  # alone, to compile: nobody waits
        counts = rank.sums._counts.clone()
        rank.run()
        rank.sums._counts.copy_(counts)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            found.append(rank.run())
    for flag in flags:
        flag.zero_()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in ranks]
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ranks", [2, 4] if INTERPRETED else [2])  # more do not fit on one device at a time
def test_all_ranks_get_the_same_bits_of_the_right_sums(ranks: int, dtype: torch.dtype) -> None:
    size = mailbox_bytes(ranks, SLICE_BYTES) // 8
    mailboxes = [torch.zeros(size, dtype=torch.int64, device=DEVICE) for _ in range(ranks)]
    found = (in_processes if INTERPRETED else in_graphs)(mailboxes, dtype)
    for ours, theirs in pairwise(found):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    results = iter(found[0])
    bound = {"rtol": 2**-6, "atol": 2**-5} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    for index, (_, parts) in enumerate(SHAPES):
        residual, weight = (tensor.float() for tensor in common(index, dtype))
        given = torch.stack([part_of(rank, index, dtype).float() for rank in range(ranks)])
        total = given.sum((0, 1)) if parts > 1 else given.sum(0)
        stream = total + residual
        normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + EPS) * weight
        expected = [normed, stream] + ([total] if parts == 1 else [])
        for value in expected:
            torch.testing.assert_close(next(results).float(), value, **bound)
    assert torch.equal(next(results), torch.stack([bests(rank, ranks) for rank in range(ranks)]).sum(0))


def test_a_sum_that_does_not_fit_is_not_begun() -> None:
    """It would overwrite what the next rank has given, and what lies behind the mailbox."""
    mailbox = torch.zeros(mailbox_bytes(2, SLICE_BYTES) // 8, dtype=torch.int64, device=DEVICE)
    sums = PeerSums(0, [mailbox.data_ptr()] * 2, SLICE_BYTES, DEVICE)
    part = torch.zeros(SLICE_BYTES // (SIZE * 4) + 1, SIZE, device=DEVICE)
    assert sums.fits(part[1:]) and not sums.fits(part)
    with pytest.raises(AssertionError, match="too long"):
        sums.all_reduce(part)
    assert not mailbox.any()


def test_raised_flags_let_a_rank_go_whose_partner_is_gone() -> None:
    mailboxes = [torch.zeros(mailbox_bytes(2, SLICE_BYTES) // 8, dtype=torch.int64, device=DEVICE) for _ in range(2)]
    sums = PeerSums(0, [mailbox.data_ptr() for mailbox in mailboxes], SLICE_BYTES, DEVICE)
    part = part_of(0, 0, DTYPES[0])
    flags = mailboxes[0][: flag_bytes(2) // 8]
    raised = torch.full_like(flags, RAISED, device="cpu")
    if INTERPRETED:  # where nothing can happen beside a kernel
        flags.copy_(raised)
        sums.all_reduce(part)
        return
    raised = raised.pin_memory()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        sums.all_reduce(part)
        waits = torch.cuda.Event()
        waits.record()
    time.sleep(0.5)
    assert not waits.query()
    flags.copy_(raised, non_blocking=True)
    waits.synchronize()

"""Connects GPUs whose kernels make sums over ranks by writing into each other's memory, where that is possible."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.engine.sharding import Shard
from radixserve.kernels.interface import RankSums
from radixserve.kernels.peer_memory import (
    HANDLE_BYTES,
    RAISED,
    PeerMemory,
    PeerMemoryUnavailable,
    flag_bytes,
    mailbox_bytes,
)
from radixserve.kernels.select import select_peer_sums

# That a rank writes to others for one sum. Longer ones, but for those of decodes, are left to NCCL, which sends each
# value fewer times.
_MAX_SENT_BYTES = 16 << 20
_ALIGNMENT = 128
_CONNECTED = b"connected"

_log = logging.getLogger(__name__)

AllGather = Callable[[Tensor], Tensor]  # [...] -> [ranks, ...]


@dataclass(frozen=True, slots=True)
class PeerLink:
    """This rank's mailbox, and the sums that are made with it and those of the others. ``raised``: what ``flags`` are
    when nobody shall wait for them, in pinned memory; ``side``: a stream of its own."""

    sums: RankSums
    memory: PeerMemory
    flags: Tensor
    raised: Tensor
    side: torch.cuda.Stream

    def let_go(self) -> None:
        """Let all sums of this rank end that wait for a rank that is gone, with any result. Works beside them, as a
        copy needs no multiprocessor."""
        with torch.cuda.stream(self.side):
            self.flags.copy_(self.raised, non_blocking=True)

    def close(self) -> None:
        """Give the memory back, after ``let_go``, when no other rank will make a sum."""
        torch.cuda.synchronize(self.side.device)
        self.memory.close()


def connect_peers(shard: Shard, device: torch.device, decode_bytes: int, all_gather: AllGather) -> PeerLink | None:
    """To be called by all ranks. None, on all of them, where one cannot write to another's memory. ``decode_bytes``: of
    a sum that must not be left to NCCL."""
    longest = max(_MAX_SENT_BYTES // (shard.size - 1), decode_bytes)
    slice_bytes = -(-longest // _ALIGNMENT) * _ALIGNMENT
    memory, addresses, reason = None, list[int](), "see the other ranks"
    handle = outcome = b""
    try:
        memory = PeerMemory(mailbox_bytes(shard.size, slice_bytes))
        memory.check_reach(shard.rank, (rank for rank in range(shard.size) if rank != shard.rank))
        handle = memory.handle()
    except PeerMemoryUnavailable as error:
        reason = str(error)
    handles = _exchange(handle, device, all_gather)
    try:
        if memory is not None and all(any(each) for each in handles):
            addresses = [memory.address if r == shard.rank else memory.open(each) for r, each in enumerate(handles)]
            outcome = _CONNECTED
    except PeerMemoryUnavailable as error:
        reason = str(error)
    are_connected = all(any(each) for each in _exchange(outcome, device, all_gather))
    if memory is None or not are_connected:
        if memory is not None:
            memory.close()
        if shard.rank == 0:
            _log.warning("sums over ranks are left to NCCL, which is slower for few tokens: %s", reason)
        return None
    flags = memory.head(flag_bytes(shard.size) // 8, device)
    sums = select_peer_sums(shard.rank, addresses, slice_bytes, device)
    raised = torch.full((len(flags),), RAISED).pin_memory()
    return PeerLink(sums, memory, flags, raised, torch.cuda.Stream(device))


def _exchange(message: bytes, device: torch.device, all_gather: AllGather) -> list[bytes]:
    """What all ranks have to say, in up to ``HANDLE_BYTES``; all zeros for nothing."""
    padded = torch.frombuffer(bytearray(message.ljust(HANDLE_BYTES, b"\0")), dtype=torch.uint8).to(device)
    return [bytes(row.tolist()) for row in all_gather(padded).cpu()]

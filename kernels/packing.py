"""Weights in the layout of the native CPU kernels: panels of 16 rows in blocks of 32 columns, see ``native/step.cpp``.

A packed matrix is a uint8 tensor [rows, bytes a row], so that it can be cut and addressed by rows of 16 like the matrix
it stands for; which kind it is follows from the number of bytes.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 32  # columns that share a scale
PANEL = 16  # rows that lie together
_BLOCK_BYTES = (20, 34, 64)  # by kind, of one row


class WeightKind(IntEnum):
    """From coarse to fine: 4 bits with scale and minimum, 8 bits with scale, bf16."""

    Q4 = 0
    Q8 = 1
    BF16 = 2


def row_bytes(kind: WeightKind, cols: int) -> int:
    return cols // BLOCK * _BLOCK_BYTES[kind]


def kind_of(weight: Tensor, cols: int) -> WeightKind:
    """What ``weight`` [rows, bytes a row] with ``cols`` columns is packed as."""
    return WeightKind(_BLOCK_BYTES.index(weight.shape[1] * BLOCK // cols))


def can_pack(rows: int, cols: int) -> bool:
    return rows % PANEL == 0 and cols % BLOCK == 0


def packed_bytes(kind: WeightKind, rows: int, cols: int) -> int:
    """Of a matrix; its last panel is whole whatever ``rows`` is."""
    return -(-rows // PANEL) * PANEL * row_bytes(kind, cols)


def as_packed(room: Tensor, kind: WeightKind, rows: int, cols: int) -> Tensor:
    """``room``, uint8 of ``packed_bytes``, as a matrix without values."""
    return room.view(-1, row_bytes(kind, cols))[:rows]


def large_page_room(num_bytes: int, device: torch.device) -> Tensor:
    """Uint8 memory that every step reads: all weights, or keys and values. On a CPU in large pages if the system has
    them: a step of one token takes a fifth longer when addresses are looked up by 4 KiB. OSError: there is no room."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]  # keeps the memory alive


def pack(kind: WeightKind, values: Tensor) -> Tensor:
    """Round ``values`` [rows, cols], both multiples of their units, to ``kind`` -> uint8 [rows, bytes a row]."""
    blocks = values.float().view(len(values), -1, BLOCK) if kind is not WeightKind.BF16 else values
    match kind:
        case WeightKind.Q4:
            packed = pack_q4(*_round_q4(blocks))
        case WeightKind.Q8:
            packed = pack_q8(*_round_q8(blocks))
        case WeightKind.BF16:
            packed = _across_rows(values.bfloat16().view(torch.uint8).numpy()).reshape(len(values), -1)
    return torch.from_numpy(packed)


def pack_q4(q: NDArray[np.uint8], d: NDArray[np.float16], m: NDArray[np.float16]) -> NDArray[np.uint8]:
    """w = d q + m: q [rows, blocks, 32] in 0..15, d and m [rows, blocks]."""
    nibbles = q[..., :16] | (q[..., 16:] << np.uint8(4))
    return _panels(_by_columns(nibbles), d, m)


def pack_q8(q: NDArray[np.int8], d: NDArray[np.float16]) -> NDArray[np.uint8]:
    """w = d q: q [rows, blocks, 32], d [rows, blocks]."""
    unsigned = q.view(np.uint8) ^ np.uint8(128)
    return _panels(_by_columns(unsigned), d)


def _by_columns(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[rows, blocks, n] -> [panels, blocks, 16 n]: groups of four columns, each of all rows."""
    rows, blocks, width = values.shape
    return _across_rows(values).reshape(rows // PANEL, blocks, PANEL * width)


def _across_rows(values: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[rows, ...] -> [panels, fours, rows of a panel, 4]: each four bytes of a row beside those of the other rows."""
    fours = np.ascontiguousarray(values).view(np.uint32).reshape(len(values) // PANEL, PANEL, -1)
    return np.ascontiguousarray(fours.swapaxes(1, 2)).view(np.uint8)


def _panels(values: NDArray[np.uint8], *scales: NDArray[np.float16]) -> NDArray[np.uint8]:
    panels, blocks, _ = values.shape
    columns = [np.ascontiguousarray(s.reshape(panels, PANEL, blocks).transpose(0, 2, 1)) for s in scales]
    parts = [values, *(column.view(np.uint8).reshape(panels, blocks, 2 * PANEL) for column in columns)]
    return np.concatenate(parts, axis=-1).reshape(panels * PANEL, -1)


def _round_q4(blocks: Tensor) -> tuple[NDArray[np.uint8], NDArray[np.float16], NDArray[np.float16]]:
    lowest, highest = blocks.amin(-1), blocks.amax(-1)
    d, m = ((highest - lowest) / 15).half(), lowest.half()
    q = (blocks - m.float()[..., None]).mul_(_inverse(d)[..., None]).round_().clamp_(0, 15)
    return q.to(torch.uint8).numpy(), d.numpy(), m.numpy()


def _round_q8(blocks: Tensor) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    d = (blocks.abs().amax(-1) / 127).half()
    q = (blocks * _inverse(d)[..., None]).round_().clamp_(-127, 127)
    return q.to(torch.int8).numpy(), d.numpy()


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d != 0, 1 / d.float(), 0.0)

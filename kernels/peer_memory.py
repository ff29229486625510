"""Device memory that processes on other GPUs of the host may write to, by the CUDA driver's handles for other processes
(IPC). Torch has handles for its own tensors only, whose memory is shared with others."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
# A rank's mailbox: flags int64 [ranks, MAX_BLOCKS], which begin as zeros; then rooms for two sums [2, ranks, slice].
MAX_BLOCKS = 128
RAISED = torch.iinfo(torch.int64).max  # a flag that lets everybody go, for good

_ROOMS = 2
_ALIGNMENT = 128
_NATIVE_ATOMICS = 3
_LAZY_PEER_ACCESS = 1


def flag_bytes(ranks: int) -> int:
    """Of a mailbox."""
    return ranks * MAX_BLOCKS * 8


def mailbox_bytes(ranks: int, slice_bytes: int) -> int:
    """Of one for sums of up to ``slice_bytes``, a multiple of 128."""
    assert slice_bytes % _ALIGNMENT == 0
    return flag_bytes(ranks) + _ROOMS * ranks * slice_bytes


class PeerMemoryUnavailable(Exception):
    """GPUs cannot write to each other's memory here; the message says why."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class PeerMemory:
    """Owns memory of this process's current device, and opens that of others. Not tied to torch's allocator."""

    def __init__(self, num_bytes: int):
        """Allocate; all zeros. Torch must have used the device before. Raises ``PeerMemoryUnavailable``."""
        try:
            self._driver: Any = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise PeerMemoryUnavailable(str(error)) from error
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address, self._num_bytes = address.value, num_bytes
        self._opened: list[int] = []
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))

    def check_reach(self, device: int, others: Iterable[int]) -> None:
        """Raises ``PeerMemoryUnavailable`` unless ``device`` can raise flags on the ``others``, as over NVLink."""
        for other in others:
            can = ctypes.c_int()
            self._call("cuDeviceGetP2PAttribute", ctypes.byref(can), _NATIVE_ATOMICS, device, other)
            if not can.value:
                raise PeerMemoryUnavailable(f"GPU {device} knows no atomic operations on the memory of GPU {other}")

    def handle(self) -> bytes:
        """By which another process can open it."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(self.address))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address here of what ``handle`` of another process means."""
        address = ctypes.c_uint64()
        opened = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS))
        self._opened.append(address.value)
        return address.value

    def head(self, count: int, device: torch.device) -> Tensor:
        """Its first ``count`` int64s, valid until ``close``."""
        return torch.as_tensor(_ArrayOf(self.address, count), device=device)

    def close(self) -> None:
        """Give it back, once no kernel of any process uses it."""
        while self._opened:
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(self._opened.pop()))
        self._call("cuMemFree_v2", ctypes.c_uint64(self.address))

    def _call(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._driver, name)(*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise PeerMemoryUnavailable(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


class _ArrayOf:
    """int64s for ``torch.as_tensor``."""

    def __init__(self, address: int, count: int):
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i8", "data": (address, False), "version": 3}

"""The way of weights from mapped files to a GPU."""

from __future__ import annotations

import threading

import numpy as np
import torch
from torch import Tensor

_PIECE_BYTES = 8 << 20
_SMALL_BYTES = 64 << 10  # which the driver copies at once
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PinnedCopier:
    """Copies to a GPU through two pieces of pinned memory for each thread that calls, of which the host fills one while
    the device fetches the other. Copies from other memory are made by the driver one after the other, whoever asks, and
    each waits for its pages to be read."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def copy(self, place: Tensor, values: Tensor) -> None:
        """As ``place.copy_(values)`` of the same shape on the current stream; ``values``, on the host, may change as
        soon as it returns."""
        if place.numel() * place.itemsize <= _SMALL_BYTES or place[0].numel() * place.itemsize > _PIECE_BYTES:
            place.copy_(values)
        elif not place.is_contiguous():  # a matrix of each expert
            for one, its_values in zip(place, values, strict=True):
                self.copy(one, its_values)
        else:
            rows = _PIECE_BYTES // (place[0].numel() * place.itemsize)
            for some, piece in zip(place.split(rows), values.split(rows), strict=True):
                self._next_piece().pass_on(some, piece)

    def _next_piece(self) -> _Piece:
        state = self._of_thread
        if not hasattr(state, "pieces"):
            state.pieces = _Piece(), _Piece()
        state.pieces = state.pieces[::-1]
        piece: _Piece = state.pieces[0]
        return piece


class _Piece:
    """Owns pinned memory, and knows when the device has fetched what is in it."""

    def __init__(self) -> None:
        self._memory = torch.empty(_PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        self._fetched = torch.cuda.Event()

    def pass_on(self, place: Tensor, values: Tensor) -> None:
        staged = self._memory[: place.numel() * place.itemsize].view(place.dtype).view(place.shape)
        self._fetched.synchronize()
        if values.dtype == place.dtype:
            # Torch would divide the work among threads of its own, for each of ours.
            same_size = _SAME_SIZE[place.itemsize]
            np.copyto(staged.view(same_size).numpy(), values.view(same_size).numpy())
        else:
            staged.copy_(values)
        place.copy_(staged, non_blocking=True)
        self._fetched.record(torch.cuda.current_stream(place.device))

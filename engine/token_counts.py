"""Which tokens a request has seen and produced, for the penalties on repeating them."""

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.engine.step import Int32s
from radixserve.engine.transfer import to_device
from radixserve.kernels.interface import SamplingKernels


class TokenCounts:
    """Owns, per row, how often each token was produced and which were in the prompt. [max_rows, vocab] each,
    allocated when the first request with penalties comes."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, kernels: SamplingKernels | None):
        self._kernels = kernels
        self._shape = (max_rows, vocab_size)
        self._device = device

    def reset(self, row: int, token_ids: Int32s, prompt_len: int) -> None:
        """Start ``row`` with a request's known tokens."""
        produced, in_prompt = self._tables
        known = to_device(token_ids.astype("int64"), self._device)
        ones = torch.ones(len(token_ids) - prompt_len, dtype=produced.dtype, device=self._device)
        produced[row].zero_().index_put_((known[prompt_len:],), ones, accumulate=True)
        in_prompt[row].zero_()[known[:prompt_len]] = True

    def add(self, rows: Tensor, penalized: NDArray[np.intp], token_ids: Tensor) -> None:
        """One more token of each of ``rows`` int32 [S], all different, of which ``penalized`` (indices into S) need it.
        ``token_ids`` int32 [S]."""
        produced, _ = self._tables
        if self._kernels is not None:
            self._kernels.count(rows, token_ids, produced)
        else:
            produced[rows[penalized].long(), token_ids[penalized]] += 1

    def penalize(self, logits: Tensor, rows: Tensor, penalized: NDArray[np.intp], floats: Tensor) -> None:
        """Change logits [S, vocab] of ``rows`` int32 [S], of which ``penalized`` (indices into S) have penalties, as
        ``SamplingKernels.penalize`` says."""
        produced, in_prompt = self._tables
        if self._kernels is not None:
            self._kernels.penalize(logits, rows, floats, produced, in_prompt)
            return
        rows = rows[penalized]
        some, counts = logits[penalized], produced[rows]
        repetition, frequency, presence = floats[rows, 3:].chunk(3, dim=-1)
        seen = (counts > 0) | in_prompt[rows]
        repeated = torch.where(some > 0, some / repetition, some * repetition)
        logits[penalized] = torch.where(seen, repeated, some) - counts * frequency - (counts > 0) * presence

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor]:
        """How often each token was produced, int32, and which were in the prompt, bool."""
        produced = torch.zeros(self._shape, dtype=torch.int32, device=self._device)
        return produced, torch.zeros(self._shape, dtype=torch.bool, device=self._device)

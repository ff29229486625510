"""What sampling rules change of logits before a draw, and what they remember of it, on CUDA: one launch each, in place,
where torch's operations take some ten launches and copies of the logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from radixserve.kernels.interface import LogitPart
from radixserve.kernels.triton_parts import lines_of_part, pick
from radixserve.kernels.triton_sampling import sample

_BLOCK = 4096  # tokens of one program
_WORD_BITS = 32


@triton.jit
def _forbid(logits_ptr, lines_ptr, vocab, logits_stride, words, BLOCK: tl.constexpr, WORD_BITS: tl.constexpr):
    line_ptr = lines_ptr + tl.program_id(1) * (words + 1)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    word = tl.load(line_ptr + token // WORD_BITS, mask=inside, other=-1)
    forbidden = ((word >> (token % WORD_BITS)) & 1) == 0
    row_ptr = logits_ptr + tl.load(line_ptr + words).to(tl.int64) * logits_stride
    tl.store(row_ptr + token, float("-inf"), mask=inside & forbidden)


@triton.jit
def _penalize(
    logits_ptr,
    rows_ptr,
    floats_ptr,
    produced_ptr,
    in_prompt_ptr,
    vocab,
    logits_stride,
    floats_stride,
    BLOCK: tl.constexpr,
):
    row = tl.load(rows_ptr + tl.program_id(1)).to(tl.int64)
    repetition = tl.load(floats_ptr + row * floats_stride + 3)
    frequency = tl.load(floats_ptr + row * floats_stride + 4)
    presence = tl.load(floats_ptr + row * floats_stride + 5)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        at = logits_ptr + tl.program_id(1).to(tl.int64) * logits_stride + token
        x = tl.load(at, mask=inside)
        count = tl.load(produced_ptr + row * vocab + token, mask=inside, other=0).to(tl.float32)
        was_produced = count > 0
        seen = was_produced | (tl.load(in_prompt_ptr + row * vocab + token, mask=inside, other=0) != 0)
        x = tl.where(seen, tl.where(x > 0, x / repetition, x * repetition), x)
        tl.store(at, x - count * frequency - tl.where(was_produced, presence, 0.0), mask=inside)


@triton.jit
def _count(rows_ptr, token_ids_ptr, produced_ptr, vocab):
    row = tl.load(rows_ptr + tl.program_id(0)).to(tl.int64)
    at = produced_ptr + row * vocab + tl.load(token_ids_ptr + tl.program_id(0))
    tl.store(at, tl.load(at) + 1)


class TritonSampling:
    """The ``SamplingKernels`` of CUDA. ``pdl``: programmatic dependent launch of the draw."""

    def __init__(self, pdl: bool):
        self._pdl = pdl

    def draw(
        self, logits: Tensor, rows: Tensor, floats: Tensor, ints: Tensor, num_known: Tensor, last_tokens: Tensor
    ) -> Tensor:
        return sample(logits, rows, floats, ints, num_known, last_tokens, self._pdl)

    def lines_of_part(
        self, logits: Tensor, rows: Tensor, floats: Tensor, ints: Tensor, num_known: Tensor, part: LogitPart
    ) -> Tensor:
        return lines_of_part(logits, rows, floats, ints, num_known, part, self._pdl)

    def pick(
        self,
        lines: Tensor,
        rows: Tensor,
        floats: Tensor,
        ints: Tensor,
        num_known: Tensor,
        last_tokens: Tensor,
        part: LogitPart,
    ) -> Tensor:
        return pick(lines, rows, floats, ints, num_known, last_tokens, part, self._pdl)

    def forbid(self, logits: Tensor, lines: Tensor) -> None:
        vocab = logits.shape[1]
        grid = (triton.cdiv(vocab, _BLOCK), len(lines))
        _forbid[grid](logits, lines, vocab, logits.stride(0), lines.shape[1] - 1, BLOCK=_BLOCK, WORD_BITS=_WORD_BITS)

    def penalize(self, logits: Tensor, rows: Tensor, floats: Tensor, produced: Tensor, in_prompt: Tensor) -> None:
        vocab = logits.shape[1]
        _penalize[(triton.cdiv(vocab, _BLOCK), len(rows))](
            logits,
            rows,
            floats,
            produced,
            in_prompt.view(torch.uint8),
            vocab,
            logits.stride(0),
            floats.stride(0),
            BLOCK=_BLOCK,
        )

    def count(self, rows: Tensor, token_ids: Tensor, produced: Tensor) -> None:
        _count[(len(rows),)](rows, token_ids, produced, produced.shape[1], num_warps=1)

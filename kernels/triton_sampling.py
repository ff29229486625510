"""Sampling by Gumbel-max on CUDA: one pass over the logits, no probabilities, and a draw that depends on nothing but
(seed, number of known tokens, token id), so neither on the batch nor on the order of execution.

argmax(logit / T - log(E)) with E exponentially distributed picks token i with probability softmax(logit / T)[i].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

BLOCK = 4096  # logits of one program


@triton.jit
def _mix64(x):
    """Finalizer of splitmix64 (Steele et al. 2014)."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log_exponential(seed, num_known, token):
    """log(E) for each token id: a keyed murmur3 finalizer gives 32 bits, -log1p(-v) turns them into E."""
    key = _mix64(seed.to(tl.uint64) + _mix64(num_known.to(tl.uint64) + 0x9E3779B97F4A7C15))
    h = token.to(tl.uint32) * 0x9E3779B1 + key.to(tl.uint32)
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13) ^ (key >> 32).to(tl.uint32)) * 0xC2B2AE35
    h = h ^ (h >> 16)
    # A few units below 1, where log would be infinite; small values, which win, keep their relative precision.
    v = tl.minimum((h.to(tl.float32) + 0.5) * 2.3283064e-10, 0.99999994)
    exponential = tl.where(v < 0.01, v * (1.0 + v * (0.5 + v * 0.33333334)), -_fast_log(1.0 - v))
    return _fast_log(exponential)


@triton.jit
def _fast_log(x):
    """Natural logarithm by the hardware's base-2 one, absolute error 2e-7: a fifth of the exact one's time."""
    log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return log2 * 0.6931471805599453


@triton.jit
def _best_of_block(
    logits_ptr,  # [samples, vocab]
    rows_ptr,  # int32 [samples]
    temperatures_ptr,  # fp32 [max_rows], 0: greedy
    seeds_ptr,  # int64 [max_rows]
    num_known_ptr,  # int32 [samples]
    best_ptr,  # fp32 [samples, blocks] out
    best_id_ptr,  # int32 [samples, blocks] out
    vocab,
    logits_stride,
    temperatures_stride,
    seeds_stride,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(1)
    block = tl.program_id(0)
    token = block * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    row = tl.load(rows_ptr + sample)
    temperature = tl.load(temperatures_ptr + row * temperatures_stride)
    score = tl.load(logits_ptr + sample.to(tl.int64) * logits_stride + token, mask=inside, other=float("-inf"))
    score = score.to(tl.float32)
    # A NaN becomes +inf, which no sound logit is, and so reaches the end.
    score = tl.where(score < float("inf"), score, float("inf"))
    if temperature > 0:
        noise = _log_exponential(tl.load(seeds_ptr + row * seeds_stride), tl.load(num_known_ptr + sample), token)
        score = score / temperature - noise
    best = tl.max(score, 0)
    spot = sample * tl.num_programs(0) + block
    tl.store(best_ptr + spot, best)
    # Of equal scores the lowest id.
    tl.store(best_id_ptr + spot, tl.min(tl.where(score == best, token, vocab - 1), 0))


@triton.jit
def _best_of_row(
    best_ptr,
    best_id_ptr,
    rows_ptr,
    drawn_ptr,  # int32 [2, samples] out: token ids, then 1 where logits were not finite
    last_tokens_ptr,  # int64 [max_rows] out
    vocab,
    blocks,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sample = tl.program_id(0)
    at = tl.arange(0, BLOCKS)
    inside = at < blocks
    best = tl.load(best_ptr + sample * blocks + at, mask=inside, other=float("-inf"))
    ids = tl.load(best_id_ptr + sample * blocks + at, mask=inside, other=vocab - 1)
    top = tl.max(best, 0)
    failed = (top == float("inf")) | (top == float("-inf"))
    token = tl.where(failed, 0, tl.min(tl.where(best == top, ids, vocab - 1), 0)).to(tl.int64)
    tl.store(drawn_ptr + sample, token.to(tl.int32))
    tl.store(drawn_ptr + tl.num_programs(0) + sample, failed.to(tl.int32))
    tl.store(last_tokens_ptr + tl.load(rows_ptr + sample), token)


def sample(
    logits: Tensor,  # [S, vocab], unit stride within a row
    rows: Tensor,  # int32 [S]
    temperatures: Tensor,  # fp32 [max_rows], 0 is greedy; may be a column of a table
    seeds: Tensor,  # int64 [max_rows]; likewise
    num_known: Tensor,  # int32 [S]: tokens before the one to sample
    last_tokens: Tensor,  # int64 [max_rows], gets the sampled tokens
    pdl: bool = True,
) -> Tensor:
    """See ``DrawKernel``. Not finite: a NaN or +inf among the logits, or -inf alone."""
    samples, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    best = torch.empty(samples, blocks, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(samples, blocks, dtype=torch.int32, device=logits.device)
    drawn = torch.empty(2, samples, dtype=torch.int32, device=logits.device)
    _best_of_block[(blocks, samples)](
        logits,
        rows,
        temperatures,
        seeds,
        num_known,
        best,
        best_id,
        vocab,
        logits.stride(0),
        temperatures.stride(0),
        seeds.stride(0),
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    _best_of_row[(samples,)](
        best,
        best_id,
        rows,
        drawn,
        last_tokens,
        vocab,
        blocks,
        BLOCKS=triton.next_power_of_2(blocks),
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return drawn

"""From logits to tokens: per-request sampling rules applied to a whole batch at once.

A draw depends on (seed, number of tokens before it) and the request's own logits only: no state advances, so the batch,
chunks and retraction do not change what a seed gives. On a CPU the two numbers are hashed to a uniform one, which
inverts the cumulative distribution in vocabulary order; on a device that has one, a ``DrawKernel`` chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.engine.logprobs import LogprobRows, logprob_rows
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.step import Int32s, RowSetup
from radixserve.engine.token_counts import TokenCounts
from radixserve.engine.transfer import to_device, to_host
from radixserve.kernels.interface import DrawKernel

# The largest probabilities looked at first to find the top-p set: sorting a vocabulary is slow.
_TOP_P_HEAD = 256
# What adjusts the logits of more rows works on so many at a time: of a whole step it would take gigabytes.
_ROWS_AT_ONCE = 64
# Below this, logits divided by it could overflow; it is greedy in effect.
_MIN_TEMPERATURE = 1e-5
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """Which rows sample, and after how many known tokens each. S samples; the host arrays mirror the tensors."""

    rows: Tensor  # int32 [S]
    num_known: Tensor  # int32 [S], prompt and output tokens before the one to sample
    rows_host: Int32s
    num_known_host: Int32s


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Which tokens the samples ``samples`` (indices into S) may be: bit ``i % 32`` of word ``i // 32`` for token i."""

    samples: NDArray[np.intp]  # [M]
    words: Int32s  # [M, ceil(vocab / 32)]


@dataclass(frozen=True, slots=True)
class Sampled:
    """``logprobs`` are those of the samples ``logprob_samples`` (indices into S), if any asked."""

    drawn: Tensor  # int32 [2, S or more]: token ids, then 1 where logits were not finite and the token is meaningless
    logprobs: LogprobRows | None = None
    logprob_samples: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))

    @property
    def token_ids(self) -> Tensor:
        return self.drawn[0]

    @property
    def failed(self) -> Tensor:
        return self.drawn[1].bool()

    def to_host(self) -> Sampled:
        """The same on the host, once the copies that this starts are done."""
        logprobs = self.logprobs.to_host() if self.logprobs else None
        return Sampled(to_host(self.drawn), logprobs, self.logprob_samples)


class Sampler:
    """Owns every row's last token and its sampling rules, on the device and (what decides which work is needed) on the
    host. The row after the last one is nobody's: a step that is padded to a certain size samples greedily for it."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device, draw_kernel: DrawKernel | None = None):
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._device = device
        self._vocab_size = vocab_size
        self._draw_kernel = draw_kernel
        self._floats = torch.zeros(max_rows + 1, len(_FLOATS), device=device)
        self._seeds_top_ks = torch.zeros(max_rows + 1, 2, dtype=torch.int64, device=device)
        self._counts = TokenCounts(max_rows, vocab_size, device)
        self._greedy = np.ones(max_rows, np.bool_)
        self._plain = np.ones(max_rows, np.bool_)  # a draw kernel does it all, but for min_tokens
        self._penalized = np.zeros(max_rows, np.bool_)
        self._biased = np.zeros(max_rows, np.bool_)
        self._top_k = np.zeros(max_rows, np.int64)
        self._top_p = np.ones(max_rows, np.float32)
        self._min_p = np.zeros(max_rows, np.float32)
        self._min_len = np.zeros(max_rows, np.int64)  # prompt_len + min_tokens
        self._wants_logprobs = np.zeros(max_rows, np.bool_)
        self._num_top = np.zeros(max_rows, np.int64)
        self._setups: dict[int, RowSetup] = {}

    def set_rows(self, setups: Sequence[RowSetup]) -> None:
        """Give rows to new requests; everything known of the rows' last owners is forgotten."""
        if not setups:
            return
        for setup in setups:
            self._set_host(setup)
        rows = to_device(np.array([setup.row for setup in setups]), self._device)
        floats = [
            [_effective_temperature(setup.sampling), *(getattr(setup.sampling, name) for name in _FLOATS[1:])]
            for setup in setups
        ]
        ints = [[_signed64(setup.seed), self._top_k[setup.row]] for setup in setups]
        self._floats.index_copy_(0, rows, to_device(np.array(floats, np.float32), self._device))
        self._seeds_top_ks.index_copy_(0, rows, to_device(np.array(ints, np.int64), self._device))
        for setup in setups:
            if setup.sampling.has_penalties:
                self._counts.reset(setup.row, setup.token_ids, setup.prompt_len)

    def are_plain(self, rows_host: Int32s, num_known_host: Int32s) -> bool:
        """Whether ``draw_plain`` is all that these rows need now."""
        return bool((self._plain[rows_host] & (num_known_host >= self._min_len[rows_host])).all())

    def draw_plain(self, logits: Tensor, rows: Tensor, num_known: Tensor) -> Tensor:
        """Only with a draw kernel: ``sample`` for plain rows, [2, S] as in ``Sampled``. May be captured in a CUDA
        graph."""
        assert self._draw_kernel is not None
        return self._draw_kernel(logits, rows, self._floats, self._seeds_top_ks, num_known, self.last_tokens)

    def sample(self, logits: Tensor, batch: SampleBatch, masks: TokenMasks | None = None) -> Sampled:
        """Choose a token for each row of ``logits`` [S, vocab] fp32, which is not changed."""
        adjusted = self._adjust(logits, batch, masks)
        if masks is not None:
            adjusted = self._mask(logits.clone() if adjusted is logits else adjusted, masks)
        if self._draw_kernel is None:
            drawn = self._draw_on_cpu(adjusted, batch, failed=~logits.sum(dim=-1).isfinite())
        else:
            drawn = self.draw_plain(adjusted, batch.rows, batch.num_known)
        tokens = drawn[0]
        if len(penalized := np.flatnonzero(self._penalized[batch.rows_host])):
            where = to_device(penalized, self._device)
            self._counts.add(batch.rows[where], tokens[where])
        wanting = np.flatnonzero(self._wants_logprobs[batch.rows_host])
        logprobs = None
        if len(wanting):
            where = to_device(wanting, self._device)
            num_top = self._num_top[batch.rows_host[wanting]].tolist()
            logprobs = logprob_rows(lambda part: logits[where[part]], tokens[where].long(), num_top)
        return Sampled(drawn, logprobs, wanting)

    def _set_host(self, setup: RowSetup) -> None:
        row, sampling = setup.row, setup.sampling
        self._setups[row] = setup
        self._greedy[row] = sampling.greedy
        self._penalized[row] = sampling.has_penalties
        self._biased[row] = bool(sampling.logit_bias)
        self._top_k[row] = min(sampling.top_k, self._vocab_size) if sampling.top_k > 0 else self._vocab_size
        self._top_p[row] = sampling.top_p
        self._min_p[row] = sampling.min_p
        self._min_len[row] = setup.prompt_len + sampling.min_tokens
        self._wants_logprobs[row] = sampling.logprobs is not None
        self._num_top[row] = sampling.logprobs or 0
        special = sampling.has_penalties or bool(sampling.logit_bias) or sampling.logprobs is not None
        self._plain[row] = not special

    def _mask(self, logits: Tensor, masks: TokenMasks) -> Tensor:
        """-inf, in place, for what ``masks`` forbid."""
        packed = masks.words.view(np.uint8)
        if self._device.type == "cpu":  # by numpy, which is three times faster there
            for sample, line in zip(masks.samples, packed, strict=True):
                allowed = np.unpackbits(line, count=self._vocab_size, bitorder="little")
                np.copyto(logits[sample].numpy(), -np.inf, where=allowed == 0)
            return logits
        shifts = torch.arange(8, dtype=torch.uint8, device=self._device)
        columns = to_device(masks.samples, self._device), to_device(packed, self._device)
        for where, words in zip(*(column.split(_ROWS_AT_ONCE) for column in columns), strict=True):
            forbidden = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : self._vocab_size] == 0
            logits.index_copy_(0, where, logits[where].masked_fill_(forbidden, -torch.inf))
        return logits

    def _adjust(self, logits: Tensor, batch: SampleBatch, masks: TokenMasks | None) -> Tensor:
        """Penalties, then logit_bias, then no end before min_tokens, which masks see to where they are. Returns
        ``logits`` itself if nothing applies."""
        rows = batch.rows_host
        too_short = batch.num_known_host < self._min_len[rows]
        if masks is not None:
            too_short[masks.samples] = False
        penalized = np.flatnonzero(self._penalized[rows])
        listed = np.flatnonzero(self._biased[rows] | too_short)
        if not len(penalized) and not len(listed):
            return logits
        adjusted = logits.clone()
        if len(penalized):
            for where in to_device(penalized, self._device).split(_ROWS_AT_ONCE):
                sample_rows = batch.rows[where]
                penalties = self._floats[sample_rows, 3:]
                adjusted[where] = self._counts.penalize(adjusted[where], sample_rows, penalties)
        if len(listed):
            entries = [self._entries(int(sample), int(rows[sample]), bool(too_short[sample])) for sample in listed]
            samples, tokens, values = (np.concatenate(column) for column in zip(*entries, strict=True))
            cells = (to_device(samples, self._device), to_device(tokens, self._device))
            adjusted.index_put_(cells, to_device(values, self._device), accumulate=True)
        return adjusted

    def _entries(
        self, sample: int, row: int, too_short: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """(sample index, token, value to add) of one request's logit_bias and forbidden stops."""
        setup = self._setups[row]
        added = dict(setup.sampling.logit_bias)
        if too_short:
            eos = () if setup.sampling.ignore_eos else setup.eos_token_ids
            added |= dict.fromkeys((*eos, *setup.sampling.stop_token_ids), -torch.inf)
        inside = {token: value for token, value in added.items() if token < self._vocab_size}
        return (
            np.full(len(inside), sample, np.int64),
            np.fromiter(inside.keys(), np.int64, len(inside)),
            np.fromiter(inside.values(), np.float32, len(inside)),
        )

    def _draw_on_cpu(self, logits: Tensor, batch: SampleBatch, failed: Tensor) -> Tensor:
        # max is several times faster than argmax on a CPU
        tokens = logits.max(dim=-1).indices
        drawn = np.flatnonzero(~self._greedy[batch.rows_host])
        if len(drawn) == len(tokens):
            tokens = self._invert(logits, batch.rows, batch.num_known, batch.rows_host)
        elif len(drawn):
            where = to_device(drawn, self._device)
            rows, num_known = batch.rows[where], batch.num_known[where]
            tokens[where] = self._invert(logits[where], rows, num_known, batch.rows_host[drawn])
        tokens = tokens.masked_fill_(failed, 0)
        self.last_tokens[batch.rows] = tokens
        return torch.stack((tokens, failed)).int()

    def _probs(self, logits: Tensor, rows: Tensor, rows_host: Int32s) -> Tensor:
        """Probabilities of logits [n, vocab] of rows that are not greedy; 0 for what the filters leave out. The others
        do not add up to 1 then."""
        temperature, top_p, min_p = self._floats[rows, :3].chunk(3, dim=-1)
        probs = (logits / temperature).softmax(dim=-1)
        keep_all_k = bool((self._top_k[rows_host] == self._vocab_size).all())
        if not (keep_all_k and (self._top_p[rows_host] >= 1.0).all()):
            probs = self._keep_top(probs, self._seeds_top_ks[rows, 1:], top_p, rows_host)
        if self._min_p[rows_host].any():
            probs = probs.where(probs >= min_p * probs.amax(dim=-1, keepdim=True), 0.0)
        return probs

    def _invert(self, logits: Tensor, rows: Tensor, num_known: Tensor, rows_host: Int32s) -> Tensor:
        """Draw one token for each row of logits [n, vocab] -> int64 [n]."""
        cumulative = self._probs(logits, rows, rows_host).cumsum(dim=-1)
        seeds = self._seeds_top_ks[rows, :1]
        target = uniform(seeds, num_known[:, None]) * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, target, right=True)
        return tokens[:, 0].clamp_(max=self._vocab_size - 1)

    def _keep_top(self, probs: Tensor, top_k: Tensor, top_p: Tensor, rows_host: Int32s) -> Tensor:
        """Zero what top-k and then top-p leave out."""
        all_k, nucleus = self._top_k[rows_host] == self._vocab_size, self._top_p[rows_host] < 1.0
        head_size = int(self._top_k[rows_host].max(initial=1, where=~all_k))
        if not (all_k & nucleus).any():
            return probs.where(probs >= _floors(probs, top_k, top_p, head_size)[0], 0.0)
        floors, found = _floors(probs, top_k, top_p, max(head_size, min(_TOP_P_HEAD, self._vocab_size)))
        if found.all():
            return probs.where(probs >= floors, 0.0)
        return probs.where(probs >= _floors(probs, top_k, top_p, self._vocab_size)[0], 0.0)


def _floors(probs: Tensor, top_k: Tensor, top_p: Tensor, head_size: int) -> tuple[Tensor, Tensor]:
    """The smallest probability that stays, of each row, [n, 1], and whether the largest ``head_size`` ones (at least
    every top_k that is not off) were enough to know it. Ties stay together."""
    head = probs.topk(head_size, dim=-1).values
    cumulative = head.cumsum(dim=-1)
    last_k = top_k.clamp(max=head_size) - 1
    # Top-p is a share of what top-k left, which is everything where top_k is off.
    mass = torch.where(top_k <= head_size, cumulative.gather(1, last_k), 1.0)
    last_p = (cumulative < top_p * mass).sum(dim=-1, keepdim=True)
    found = (top_p >= 1.0) | (top_k <= head_size) | (last_p < head_size)
    last = torch.where(top_p < 1.0, last_p.clamp(max=head_size - 1).minimum(last_k), last_k)
    floors = head.gather(1, last)
    return torch.where((top_p >= 1.0) & (top_k > head_size), 0.0, floors), found


def uniform(seeds: Tensor, counters: Tensor) -> Tensor:
    """Hash int64 (seed, counter) to fp32 in [0, 1) with 23 bits, so that its product with a sum stays below the sum.

    The mixing function of SplitMix64 (Steele, Lea, Flood 2014); int64 arithmetic wraps, shifts are made logical.
    """
    x = seeds + (counters.long() + 1) * _signed64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed64(factor)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return ((x >> 41) & ((1 << 23) - 1)).float() * 2.0**-23


def _effective_temperature(sampling: SamplingParams) -> float:
    return 0.0 if sampling.greedy else max(sampling.temperature, _MIN_TEMPERATURE)


def _signed64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)

"""From logits to tokens: per-request sampling rules applied to a whole batch at once.

A draw depends on (seed, number of tokens before it) and the request's own logits only: no state advances, so the batch,
chunks and retraction do not change what a seed gives. On a CPU the two numbers are hashed to a uniform one, which
inverts the cumulative distribution in vocabulary order; on a device that has them, ``SamplingKernels`` choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.engine.logprobs import LogprobRows, logprob_rows
from radixserve.engine.parallel import ParallelLogits
from radixserve.engine.sampling_params import SamplingParams
from radixserve.engine.step import Int32s, RowSetup
from radixserve.engine.token_counts import TokenCounts
from radixserve.engine.transfer import to_device, to_host
from radixserve.kernels.interface import LogitPart, SamplingKernels

# The largest probabilities looked at first to find the top-p set: sorting a vocabulary is slow.
_TOP_P_HEAD = 256
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
    host. The row after the last one is nobody's: a step that is padded to a certain size samples greedily for it.
    ``parallel``: logits are this rank's part of them."""

    def __init__(
        self,
        max_rows: int,
        vocab_size: int,
        device: torch.device,
        kernels: SamplingKernels | None = None,
        parallel: ParallelLogits | None = None,
    ):
        self.last_tokens = torch.zeros(max_rows + 1, dtype=torch.int64, device=device)
        self._device = device
        self._vocab_size = vocab_size
        self._kernels = kernels
        self._parallel = parallel
        self._floats = torch.zeros(max_rows + 1, len(_FLOATS), device=device)
        self._seeds_top_ks = torch.zeros(max_rows + 1, 2, dtype=torch.int64, device=device)
        self._counts = TokenCounts(max_rows, vocab_size, device, kernels)
        self._greedy = np.ones(max_rows, np.bool_)
        self._plain = np.ones(max_rows, np.bool_)  # ``draw_plain`` does it all, but for min_tokens
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

    def whole(self, logits: Tensor) -> Tensor:
        """Logits of all tokens, for whoever needs more than a draw."""
        return self._parallel.gather(logits) if self._parallel else logits

    def draw_plain(self, logits: Tensor, rows: Tensor, num_known: Tensor) -> Tensor:
        """Only with kernels: ``sample`` for plain rows, [2, S] as in ``Sampled``. May be captured in a CUDA graph."""
        assert self._kernels is not None
        if self._parallel is None:
            return self._draw(logits, rows, num_known)
        rules, part = (rows, self._floats, self._seeds_top_ks, num_known), self._parallel.part
        lines = self._parallel.add_up(self._kernels.lines_of_part(logits, *rules, part))
        return self._kernels.pick(lines, *rules, self.last_tokens, part)

    def sample(self, logits: Tensor, batch: SampleBatch, masks: TokenMasks | None = None) -> Sampled:
        """Choose a token for each row of ``logits`` [S, vocab] fp32, which the rules may change in place."""
        rows, rows_host = batch.rows, batch.rows_host
        if self._kernels and masks is None and self.are_plain(rows_host, batch.num_known_host):
            return Sampled(self.draw_plain(logits, rows, batch.num_known))
        logits = self.whole(logits)
        penalized = np.flatnonzero(self._penalized[rows_host])
        wanting = np.flatnonzero(self._wants_logprobs[rows_host])
        best = None if self._kernels else _largest(logits)
        listed = self._listed(batch, masks)
        is_changed = len(penalized) or len(listed) or masks is not None
        raw = logits.clone() if len(wanting) and is_changed else logits
        if len(penalized):
            self._counts.penalize(logits, rows, penalized, self._floats)
        if len(listed):
            self._add_biases(logits, batch, listed)
        if masks is not None:
            self._mask(logits, masks)
        if best is None:
            drawn = self._draw(logits, rows, batch.num_known)
        else:
            tokens, failed = best
            drawn = self._draw_on_cpu(logits, batch, _largest(logits)[0] if is_changed else tokens, failed)
        if len(penalized):
            self._counts.add(rows, penalized, drawn[0])
        logprobs = None
        if len(wanting):
            where = to_device(wanting, self._device)
            num_top = self._num_top[rows_host[wanting]].tolist()
            logprobs = logprob_rows(lambda part: raw[where[part]], drawn[0][where].long(), num_top)
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
        self._plain[row] = not special and (self._parallel is None or self._draws_from(self._parallel.part, setup))

    def _draws_from(self, part: LogitPart, setup: RowSetup) -> bool:
        """Whether the kernels draw for the row from parts of its logits."""
        sampling, top_k = setup.sampling, self._top_k[setup.row]
        has_filters = top_k < self._vocab_size or sampling.top_p < 1 or sampling.min_p > 0
        return sampling.greedy or not has_filters or bool(top_k <= part.most_top_k)

    def _draw(self, logits: Tensor, rows: Tensor, num_known: Tensor) -> Tensor:
        assert self._kernels is not None
        return self._kernels.draw(logits, rows, self._floats, self._seeds_top_ks, num_known, self.last_tokens)

    def _mask(self, logits: Tensor, masks: TokenMasks) -> None:
        """-inf, in place, for what ``masks`` forbid."""
        if self._kernels is not None:
            lines = np.column_stack((masks.words, masks.samples.astype(np.int32)))
            self._kernels.forbid(logits, to_device(lines, self._device))
            return
        # By numpy, which is three times faster on a CPU.
        for sample, line in zip(masks.samples, masks.words.view(np.uint8), strict=True):
            allowed = np.unpackbits(line, count=self._vocab_size, bitorder="little")
            np.copyto(logits[sample].numpy(), -np.inf, where=allowed == 0)

    def _listed(self, batch: SampleBatch, masks: TokenMasks | None) -> dict[int, bool]:
        """The samples with a logit_bias, or too short to end; whether they are, which masks see to where they are."""
        rows = batch.rows_host
        too_short = batch.num_known_host < self._min_len[rows]
        if masks is not None:
            too_short[masks.samples] = False
        return {int(sample): bool(too_short[sample]) for sample in np.flatnonzero(self._biased[rows] | too_short)}

    def _add_biases(self, logits: Tensor, batch: SampleBatch, listed: dict[int, bool]) -> None:
        """Add logit_bias, in place, and -inf for the ends of what is too short."""
        entries = [self._entries(sample, int(batch.rows_host[sample]), short) for sample, short in listed.items()]
        samples, tokens, values = (np.concatenate(column) for column in zip(*entries, strict=True))
        cells = (to_device(samples, self._device), to_device(tokens, self._device))
        logits.index_put_(cells, to_device(values, self._device), accumulate=True)

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

    def _draw_on_cpu(self, logits: Tensor, batch: SampleBatch, tokens: Tensor, failed: Tensor) -> Tensor:
        """``tokens``: of the largest logits, which greedy rows get."""
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


def _largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row, int64 and bool [S]: the token with the largest logit, and whether that is infinite or some logit no
    number. By numpy: seven times faster than torch, whose threads also wait for each other longer than they compute."""
    tokens = logits.numpy().argmax(axis=-1)  # of a row with a NaN its first one
    failed = ~np.isfinite(logits.numpy()[np.arange(len(tokens)), tokens])
    return torch.from_numpy(tokens), torch.from_numpy(failed)


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

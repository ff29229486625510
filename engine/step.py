"""The border between the scheduler (plain Python, no torch) and whatever executes a step. No torch.

The scheduler decides which tokens of which requests are computed and where their KV goes, and says so in a
``StepPlan``; a ``Runner`` launches it and later gives a ``StepResult``. Tests put a fake runner here.

A *row* is a running request's line in the page table and in every per-request array of the runner. A plan carries
only what changed: page-table entries written since the last plan, and sampling rules of requests that took a row.
Last sampled tokens stay on the device (``row`` -> token), so plans are made before the last step's tokens are known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from radixserve.engine.messages import TokenLogprobs
from radixserve.engine.sampling_params import SamplingParams

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RowSetup:
    """A request takes ``row``, or goes on in it with tokens that were not sampled there. ``token_ids`` [n] int32: all
    tokens so far (prompt, and output after a retraction or a jump), of which the first ``prompt_len`` are the prompt:
    penalties count them. ``seed`` is always set."""

    row: int
    sampling: SamplingParams
    seed: int
    token_ids: Int32s
    prompt_len: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens ``start .. start+len(token_ids)`` of one request; KV of all before ``start`` is already stored.
    ``samples`` is true for the chunk that ends the known tokens: the next token is sampled from its last logits."""

    row: int
    token_ids: Int32s  # [chunk]
    start: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decode rows that begin with the same pages; no row is in two.

    Group g consists of ``members[starts[g]:starts[g + 1]]`` (two or more indices into ``decode_rows``), whose first
    ``num_pages[g]`` page-table entries are equal. Those pages are full, and each row has tokens behind them.
    """

    members: Int32s  # [M]
    starts: Int32s  # [G + 1]
    num_pages: Int32s  # [G]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One forward pass: ``decode_rows`` feed their last token, then come the ``chunks``.

    ``decode_lens`` [D]: KV length of each decode row counting the token fed now, so the token's position is one less.
    ``page_rows/page_cols/page_ids`` [P]: page-table entries to write before the forward, ``table[row, col] = page``.
    ``shared``: which decode rows share a prefix, if the scheduler was told to say so.
    ``masked``: indices of samples whose tokens are limited by masks, which are known only once all earlier steps are
    completed (they depend on those steps' tokens).
    """

    step: int
    setups: tuple[RowSetup, ...]
    page_rows: Int32s
    page_cols: Int32s
    page_ids: Int32s
    decode_rows: Int32s
    decode_lens: Int32s
    chunks: tuple[PrefillChunk, ...]
    shared: SharedPrefixes | None = None
    masked: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def sampled_rows(self) -> list[int]:
        return [*self.decode_rows.tolist(), *(chunk.row for chunk in self.chunks if chunk.samples)]

    @property
    def sample_lens(self) -> list[int]:
        """Tokens before each sampled one."""
        ends = (chunk.start + len(chunk.token_ids) for chunk in self.chunks if chunk.samples)
        return [*self.decode_lens.tolist(), *ends]

    @property
    def num_samples(self) -> int:
        return len(self.decode_rows) + sum(chunk.samples for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens of a plan: those of ``decode_rows`` in order, then of each chunk that samples.

    ``failed`` [num_samples] bool: logits were not finite, the request must fail alone. ``logprobs`` as long as
    ``token_ids`` when any request of the step asked for them, with None for those that did not.
    ``prompt_logprobs``: per row, one entry for each token of its chunk (None for the very first prompt token).
    """

    token_ids: Int32s
    failed: NDArray[np.bool_]
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: dict[int, list[TokenLogprobs | None]] | None = None


class Pulse:
    """Called between the parts of a step that computes in the caller's thread, so that whoever listens can do what must
    not wait for the end of a long one."""

    def __init__(self) -> None:
        self._listener: Callable[[], None] = lambda: None

    def listen(self, listener: Callable[[], None]) -> None:
        """``listener`` must be quick, and not touch what the step is made of."""
        self._listener = listener

    def __call__(self) -> None:
        self._listener()


class PendingStep(Protocol):
    """A launched step."""

    def sample(self, masks: Int32s) -> None:
        """Only, and before ``result``, if the plan has ``masked`` samples: up to here the step chose no tokens.

        ``masks`` [masked, ceil(vocab / 32)]: bit ``i % 32`` of word ``i // 32`` is set if that sample may be token i.
        """

    def result(self) -> StepResult:
        """Block until the step is done and return its tokens. Raises what the device raised."""


class Runner(Protocol):
    """Executes plans in launch order; the next may be launched before the last result was read."""

    def launch(self, plan: StepPlan) -> PendingStep: ...

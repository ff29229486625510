"""What the model code needs from kernels. Shapes: T tokens of a step, S sequences, H hidden, D head_dim.

``Tensor`` arguments live on one device. Implementations: ``torch_ops`` / ``torch_attention`` (any device, the oracle),
FlashInfer and Triton on CUDA; chosen in ``select.py`` only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from radixserve.kernels.quantized import QuantizedMatrix, Stack
from radixserve.kernels.shared_prefix import SharedPrefixRule, SharedTiles


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What an attention kernel must know before its first plan."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype  # of q, k and v as they are computed
    scale: float | None = None  # of q . k; None: 1 / sqrt(head_dim)
    softcap: float | None = None  # scaled scores become softcap * tanh(score / softcap) (Gemma 2)
    # Each that some layer has: how many tokens a query sees, itself included; None: all before it.
    windows: tuple[int | None, ...] = (None,)
    cache_dtype: torch.dtype | None = None  # of k and v in the cache, if another: e4m3, to be cast after each load

    @property
    def has_narrow_cache(self) -> bool:
        return self.cache_dtype not in (None, self.dtype)

    @property
    def score_scale(self) -> float:
        """``scale`` or its default."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Which tokens of a step belong to which sequence: first ``num_decodes`` sequences of one query token each,
    then the prefill chunks. Host copies are for planners; device tensors for kernels that need no plan.

    ``page_table`` is the runner's whole table [max_rows, max_pages]; sequence s reads row ``rows[s]``.

    A step that is planned on the device has empty host arrays and may be padded: behind the real decodes come some of
    KV length 0, which take no tokens, so that chunk tokens follow those of the real decodes; behind the real chunks
    come some without queries; and behind the last chunk's tokens come tokens of nobody, whose attention is anything.
    """

    num_decodes: int
    page_size: int
    rows: Tensor  # int32 [S]
    kv_lens: Tensor  # int32 [S], KV length with this step's tokens stored
    query_starts: Tensor  # int32 [S + 1], offsets of each sequence's queries in T
    page_table: Tensor  # int32 [max_rows, max_pages]
    rows_host: NDArray[np.int32]
    kv_lens_host: NDArray[np.int32]
    query_starts_host: NDArray[np.int32]
    page_table_host: NDArray[np.int32]  # the runner's mirror, same shape as page_table
    shared: SharedTiles | None = None  # prefixes of decodes to be read together; for kernels with ``shared_prefixes``


class AttentionKernel(Protocol):
    """Causal attention of each sequence's queries over its own pages (grouped-query heads, no gathering copy).

    ``plans_on_device``: a layout with empty host arrays is planned from its tensors only, so that ``plan`` and ``run``
    may be captured in a CUDA graph.
    """

    plans_on_device: bool

    @property
    def shared_prefixes(self) -> SharedPrefixRule | None:
        """What the kernel makes of prefixes that decodes have in common; None: nothing."""
        ...

    def plan(self, layout: BatchLayout) -> None:
        """Prepare one step; called once before the layers run."""
        ...

    def run(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None = None) -> Tensor:
        """q [T, q_heads, D]; k_cache, v_cache [pages, page_size, kv_heads, D] of one layer -> [T, q_heads, D].
        ``window``: the layer's, one of the shape's."""
        ...


class PlannedAttention(AttentionKernel, Protocol):
    """An attention kernel that can take some sequences of a step, and leave the rest to another."""

    def plan_from(self, layout: BatchLayout, first: int) -> None:
        """As ``plan``, for the sequences ``first ..`` only."""
        ...

    def run_into(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, out: Tensor, window: int | None = None) -> None:
        """As ``run``, with the queries of the planned sequences only, into ``out`` [queries, q_heads, D]."""
        ...


Weight = Tensor | QuantizedMatrix
"""[out, in]. Where the native CPU kernels are in use, it may be packed (``packing.py``): uint8 [out, bytes a row]."""


class Norm(NamedTuple):
    """x / rms(x) * weight, in fp32. ``weight`` may be fp32 whatever x is."""

    weight: Tensor
    eps: float


class HeadPlaces(NamedTuple):
    """What becomes of the heads of one layer: how they are turned, and where keys and values go."""

    positions: Tensor  # int32 [T]
    cos_sin: Tensor  # fp32 [max_positions, rotary_dim]: cosines, then sines (half-rotation, "neox" pairs)
    slots: Tensor  # int64 [T]: page * page_size + offset; below 0 for padding, which is not stored
    k_cache: Tensor  # [pages, page_size, kv_heads, D]
    v_cache: Tensor
    q_norm: Norm | None = None  # of each head, before it is turned (Qwen3)
    k_norm: Norm | None = None


class Ops(Protocol):
    """Pointwise and small fused operations of a transformer layer."""

    def embed(self, ids: Tensor, weight: Tensor, hidden_size: int, scale: float = 1.0) -> Tensor:
        """Rows ``ids`` int64 [T] of weight [vocab, hidden_size] times ``scale`` -> [T, hidden_size]."""
        ...

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """x [T, H] -> [T, H]."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """Return (rms_norm(x + residual), x + residual); may overwrite both inputs. x: [T, H], or what ``add_linear``
        has left pending."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """gate_up [T, 2 I] -> silu(first half) * second half, [T, I]."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """As ``silu_mul``, with GELU in its tanh form."""
        ...

    def rope_store(self, qkv: Tensor, places: HeadPlaces) -> Tensor:
        """Split qkv [T, (q_heads + 2 kv_heads) * D], norm heads if asked, rotate q and k, store k and v by slot; return
        q [T, q_heads, D]."""
        ...

    def project(
        self, stream: Tensor, pending: Tensor | None, norm: Norm, weight: Weight, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        """How a half of a layer begins: (the stream with nothing pending, rms_norm(stream) @ weight.T (+ bias)
        [T, out]), or, if ``gated``, silu(gate) * up of that product, where weight is [2 out, H], first the gates.
        ``stream``: [T, H], the residual stream, may be overwritten; ``pending``: what is still to be added to it, as
        ``add_linear`` has returned it."""
        ...

    def linear(self, y: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """y [T, in] @ weight[out, in].T (+ bias) [T, out], where a layer gives back to the stream."""
        ...

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Add y [T, in] @ weight[H, in].T (+ bias) to the stream: at once where that is free, else left pending for
        ``project`` or ``add_rms_norm``, as [T, H] or in parts [P, T, H]. Return (stream, pending)."""
        ...

    def experts(
        self, x: Tensor, router: Tensor, gate_up: Stack, down: Stack, per_token: int, normalized: bool, slots: Tensor
    ) -> Tensor:
        """What a mixture of E networks answers to x [T, H]: of softmax(x @ router[E, H].T) the ``per_token`` largest
        choose networks for each token and are their weights, made to sum up to 1 if ``normalized``; network e is
        silu(gate) * up of x @ gate_up[e].T, @ down[e].T, with gate_up [E, 2 I, H], first the gates, and down [E, H, I].
        ``slots`` int64 [T]: below 0 for padding, whose answer is anything. Returns what is to be added to the stream,
        [T, H] or in parts [P, T, H]."""
        ...

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden [S, H] @ weight[vocab, H].T -> fp32 [S, vocab], not rounded to a narrower type where it is largest.
        ``out``: where to put them; only where a CUDA graph is to be captured."""
        ...


class RankSums(Protocol):
    """Sums over the ranks of tensor parallelism. All make the same ones in the same order, with tensors of the same
    shape and type, and get the same bits."""

    def fits(self, part: Tensor) -> bool:
        """Whether ``add_rms_norm`` takes a part of that shape and type."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The sum of all ranks' ``tensor``; may overwrite it."""
        ...

    def add_rms_norm(self, part: Tensor, residual: Tensor, norm: Norm) -> Tensor:
        """The norm [T, H] of the sum of all ranks' ``part`` and ``residual``, which is replaced by that sum. part:
        [T, H] or in parts [P, T, H]."""
        ...


def norm_of_stream(ops: Ops, stream: Tensor, pending: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """How ``Ops.project`` begins where no kernel does it along with the product: (rms_norm(stream), the stream), both
    with nothing pending."""
    if pending is None:
        return ops.rms_norm(stream, norm), stream
    return ops.add_rms_norm(pending, stream, norm)


# What a step of decodes alone needs before its first layer, found on the device, so that a graph may hold it. It gets
# rows and kv_lens int32 [S], page_table int32 [max_rows, max_pages], last_tokens int64 by row, and the page size; it
# gives ids int64, positions int32 and slots int64, [S] each. A kv_len of 0 is padding: position 0, slot -1.
DecodeInputs = Callable[[Tensor, Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]


LINE_ENTRIES = 256  # scores or logits, with their tokens, by which ranks draw a token without gathering its logits


class LogitPart(NamedTuple):
    """Which of all logits [S, vocab] the ``rank`` of ``ranks`` has. A tensor of them is as wide as that of any other
    rank, padded behind its columns."""

    rank: int
    ranks: int
    vocab: int

    @property
    def width(self) -> int:
        """Of a tensor."""
        return -(-self.vocab // self.ranks)

    @property
    def first(self) -> int:
        """Token of the first column."""
        return min(self.rank * self.width, self.vocab)

    @property
    def columns(self) -> int:
        return min(self.width, self.vocab - self.first)

    @property
    def slots(self) -> int:
        """Of each rank, in a line."""
        return LINE_ENTRIES // self.ranks

    @property
    def most_top_k(self) -> int:
        """With this or less a row is drawn from the largest logits of each rank: they fill the slots, hardly more."""
        return self.slots * 3 // 4


class SamplingKernels(Protocol):
    """Sampling on a device, one launch or few for each method. ``rows`` int32 [S] are all different."""

    def draw(
        self,
        logits: Tensor,  # [S, vocab]
        rows: Tensor,  # int32 [S]
        floats: Tensor,  # fp32 [max_rows, 3 or more]: temperature (0 is greedy), top-p, min-p
        ints: Tensor,  # int64 [max_rows, 2]: seed, top-k (vocab: all)
        num_known: Tensor,  # int32 [S]: tokens before the one to choose
        last_tokens: Tensor,  # int64 by row, gets the tokens
    ) -> Tensor:
        """int32 [2, S]: token ids, then 1 where logits were not finite (the token is 0 there). A draw depends on the
        row's logits, rules, seed and number of known tokens only. Tokens of equal logits stay together: a filter keeps
        all or none of them. A CUDA graph may hold it."""
        ...

    def lines_of_part(
        self, logits: Tensor, rows: Tensor, floats: Tensor, ints: Tensor, num_known: Tensor, part: LogitPart
    ) -> Tensor:
        """How a draw from parts of the logits begins: fp32 [S, n], to be added up over ranks, exactly. For rows that
        are greedy, have no filters, or a top-k of ``part.most_top_k`` or less, with or without top-p and min-p."""
        ...

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
        """How it ends, with the sum of all ``lines_of_part``: what ``draw`` would give, the same on all ranks. Of more
        equal logits than a rank has slots not all may stay, and rounding may decide otherwise where top-p ends."""
        ...

    def forbid(self, logits: Tensor, lines: Tensor) -> None:
        """-inf, in place, for tokens that have no bit. ``lines`` int32 [M, ceil(vocab / 32) + 1]: bit ``i % 32`` of
        word ``i // 32`` for token i, and in the end which of the S logits it is for."""
        ...

    def penalize(self, logits: Tensor, rows: Tensor, floats: Tensor, produced: Tensor, in_prompt: Tensor) -> None:
        """In place. ``floats`` 3 to 5: repetition (divides; prompt and output, as in CTRL), frequency and presence
        (subtracted; output only, as in the OpenAI API). ``produced`` int32, ``in_prompt`` bool, [max_rows, vocab]: how
        often, and whether. Leaves logits without penalties alone."""
        ...

    def count(self, rows: Tensor, token_ids: Tensor, produced: Tensor) -> None:
        """One more of ``token_ids`` int32 [S] in ``produced``."""
        ...

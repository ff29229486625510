"""``Ops`` in plain torch: any device, and the oracle that faster implementations are tested against."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels.interface import HeadPlaces, Norm, Weight, norm_of_stream
from radixserve.kernels.quantized import FP8, QuantizedMatrix, Stack, matrix_of

# More tokens than ever lie within one bf16 rounding step of the largest logit.
_REFINED_LOGITS = 16
# Multiplications between two beats of the pulse of a CPU: three seconds, where they are as slow as ten a nanosecond.
_MULTIPLICATIONS = 1 << 35


class TorchOps:
    """See ``Ops`` for shapes. Only ``experts`` waits for the device. ``pulse`` beats while a CPU multiplies."""

    def __init__(self, pulse: Callable[[], None] = lambda: None):
        self._pulse = pulse

    def embed(self, ids: Tensor, weight: Tensor, hidden_size: int, scale: float = 1.0) -> Tensor:
        rows = F.embedding(ids, weight)
        return rows if scale == 1.0 else rows * scale

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        weight, eps = norm
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        residual.add_(x)
        return self.rms_norm(residual, norm), residual

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def rope_store(self, qkv: Tensor, places: HeadPlaces) -> Tensor:
        kv_heads, head_dim = places.k_cache.shape[-2:]
        heads = qkv.view(qkv.shape[0], -1, head_dim)
        q_heads = heads.shape[1] - 2 * kv_heads
        q_and_k, v = heads[:, : q_heads + kv_heads], heads[:, q_heads + kv_heads :]
        if places.q_norm is not None and places.k_norm is not None:
            q, k = q_and_k[:, :q_heads], q_and_k[:, q_heads:]
            q_and_k = torch.cat((self.rms_norm(q, places.q_norm), self.rms_norm(k, places.k_norm)), dim=1)
        q_and_k = _rotate(q_and_k, places.cos_sin.index_select(0, places.positions))
        _store(q_and_k[:, q_heads:], v, places.slots, places.k_cache, places.v_cache)
        return q_and_k[:, :q_heads]

    def project(
        self, stream: Tensor, pending: Tensor | None, norm: Norm, weight: Weight, bias: Tensor | None, *, gated: bool
    ) -> tuple[Tensor, Tensor]:
        normed, stream = norm_of_stream(self, stream, pending, norm)
        return stream, self._gated_linear(normed, weight, bias) if gated else self.linear(normed, weight, bias)

    def linear(self, y: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        return self._product(y, weight.dequantized(y.dtype) if isinstance(weight, QuantizedMatrix) else weight, bias)

    def _product(self, y: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._pulse()
        most_rows = max(1, _MULTIPLICATIONS // weight.numel())
        if y.is_cuda or len(y) <= most_rows:
            return F.linear(y, weight, bias)
        return torch.cat([self._product(rows, weight, bias) for rows in y.split(most_rows)])

    def _gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self.silu_mul(self.linear(x, weight, bias))

    def add_linear(
        self, stream: Tensor, y: Tensor, weight: Weight, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        return stream, self.linear(y, weight, bias)

    def experts(
        self, x: Tensor, router: Tensor, gate_up: Stack, down: Stack, per_token: int, normalized: bool, slots: Tensor
    ) -> Tensor:
        """The tokens of one expert are one product; how many each has must be known on the host, so on a device this
        waits for it."""
        weights, chosen = self.linear(x, router).softmax(-1, dtype=torch.float32).topk(per_token, dim=-1)
        if normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype).flatten()
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=len(router)).tolist()
        out = torch.zeros_like(x)
        for expert, pairs in enumerate(order.split(counts)):
            if not len(pairs):
                continue
            tokens = pairs // per_token
            inner = self.silu_mul(self.linear(x[tokens], matrix_of(gate_up, expert, len(router))))
            answer = self.linear(inner, matrix_of(down, expert, len(router)))
            out.index_add_(0, tokens, answer * weights[pairs, None])
        return out

    def logits(self, hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """bf16 keeps 8 bits: logits near 16 would be multiples of 1/16, and ties between the best ones common."""
        assert out is None, "nothing here is captured in graphs"
        if hidden.dtype == torch.float32:
            return self.linear(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return _refine_largest(self.linear(hidden, weight).float(), hidden, weight)


def _rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + rotary_dim / 2) of each head in fp32. heads [T, N, D], cos_sin [T, rotary_dim]."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin.unsqueeze(1).chunk(2, dim=-1)
    first, second = heads[..., :rotary_dim].float().chunk(2, dim=-1)
    parts = [first * cos - second * sin, second * cos + first * sin]
    if rotary_dim < heads.shape[-1]:
        parts.append(heads[..., rotary_dim:].float())
    return torch.cat(parts, dim=-1).to(heads.dtype)


def _store(k: Tensor, v: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Scatter k, v [T, kv_heads, D] by slot."""
    if slots.device.type != "cpu" or int(slots.min()) < 0:
        # Padding repeats the first real token: shapes then do not depend on the data, and a device need not be asked.
        tokens = torch.where(slots >= 0, torch.arange(len(slots), device=slots.device), (slots >= 0).int().argmax())
        k, v, slots = k[tokens], v[tokens], slots[tokens]
    for cache, new in ((k_cache, k), (v_cache, v)):
        lines, new = cache.view(-1, *new.shape[1:]), new.to(cache.dtype)
        if cache.dtype == FP8:  # which torch does not scatter
            lines, new = lines.view(torch.uint8), new.view(torch.uint8)
        lines.index_copy_(0, slots, new)


def _refine_largest(logits: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """Recompute the largest logits of each row in fp32 (a CPU has no product of bf16 with fp32 results)."""
    best = logits.topk(min(_REFINED_LOGITS, logits.shape[-1]), dim=-1).indices
    exact = torch.einsum("sh,skh->sk", hidden.float(), weight[best].float())
    return logits.scatter_(1, best, exact)

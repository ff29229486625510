"""The two halves of a decoder layer: self-attention over the paged cache, and the gated feed-forward network."""

import torch
from torch import Tensor, nn

from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.layers.linear import Linear, Projection
from radixserve.engine.layers.norm import RMSNorm
from radixserve.engine.model_spec import ModelSpec
from radixserve.kernels.interface import HeadPlaces


class SelfAttention(nn.Module):
    """Grouped-query attention of layer ``index``; stores the new keys and values in that layer's cache."""

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype):
        super().__init__()
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        parts = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.index = index
        self.window = spec.layers[index].window
        self.qkv_proj: Projection = Linear(spec.hidden_size, parts, bias=spec.qkv_bias, dtype=dtype)
        self.o_proj: Projection = Linear(q_size, spec.hidden_size, bias=spec.o_bias, dtype=dtype)
        self.q_norm = RMSNorm(spec, spec.head_dim, dtype) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec, spec.head_dim, dtype) if spec.qk_norm else None

    def forward(
        self,
        stream: Tensor,
        pending: Tensor | None,
        norm: RMSNorm,
        out_norm: RMSNorm | None,
        cos_sin: Tensor,
        ctx: ForwardContext,
    ) -> tuple[Tensor, Tensor | None]:
        """Add attention over the normed stream [T, H], or the norm of that, to the stream."""
        k_cache, v_cache = ctx.k_caches[self.index], ctx.v_caches[self.index]
        stream, qkv = self.qkv_proj.after_norm(stream, pending, norm, ctx.ops)
        norms = (norm.rule if norm else None for norm in (self.q_norm, self.k_norm))
        q = ctx.ops.rope_store(qkv, HeadPlaces(ctx.positions, cos_sin, ctx.slots, k_cache, v_cache, *norms))
        attended = ctx.attention.run(q, k_cache, v_cache, self.window).flatten(1)
        return self.o_proj.add_to(stream, attended, out_norm, ctx.ops)


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        super().__init__()
        size = spec.intermediate_size
        parts = {"gate_proj": size, "up_proj": size}
        self.gate_up_proj: Projection = Linear(spec.hidden_size, parts, dtype=dtype)
        self.down_proj: Projection = Linear(size, spec.hidden_size, dtype=dtype)
        self.is_silu = spec.activation == "silu"

    def forward(
        self, stream: Tensor, pending: Tensor | None, norm: RMSNorm, out_norm: RMSNorm | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Add the network's answer to the normed stream [T, H], or the norm of that, to the stream."""
        stream, inner = self.gate_up_proj.after_norm(stream, pending, norm, ctx.ops, gated=self.is_silu)
        if not self.is_silu:
            inner = ctx.ops.gelu_mul(inner)
        return self.down_proj.add_to(stream, inner, out_norm, ctx.ops)

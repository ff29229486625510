"""Llama and the models of its shape: Mistral without sliding window, and Qwen3, whose heads are normed (``qk_norm``).

Module names are those of Hugging Face checkpoints, so that weights find their place by name.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.layers.linear import Embedding, Linear
from radixserve.engine.layers.norm import RMSNorm
from radixserve.engine.layers.rotary import rope_table
from radixserve.engine.layers.transformer import GatedMLP, SelfAttention
from radixserve.engine.model_spec import ModelSpec
from radixserve.kernels.interface import Ops


class LlamaLayer(nn.Module):
    """Pre-norm attention, then pre-norm feed-forward, both added to the residual stream."""

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype):
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype=dtype)
        self.self_attn = SelfAttention(spec, index, dtype)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype=dtype)
        self.mlp = GatedMLP(spec, dtype)

    def forward(
        self, stream: Tensor, pending: Tensor | None, cos_sin: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H] and what is still to be added to it; returns the same pair."""
        stream, pending = self.self_attn(stream, pending, self.input_layernorm, cos_sin, ctx)
        stream, pending = self.mlp(stream, pending, self.post_attention_layernorm, ctx)
        return stream, pending


class LlamaTrunk(nn.Module):
    """Everything but the output head."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(LlamaLayer(spec, index, dtype) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_eps, dtype=dtype)

    def forward(self, ids: Tensor, cos_sin: Tensor, ctx: ForwardContext) -> Tensor:
        stream, pending = self.embed_tokens(ids, ctx.ops), None
        for layer in self.layers:
            stream, pending = layer(stream, pending, cos_sin, ctx)
        normed: Tensor = self.norm(stream, pending, ctx.ops)
        return normed


class LlamaForCausalLM(nn.Module):
    """The whole model. Built on the device of the enclosing ``torch.device`` context, without values."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, max_positions: int):
        super().__init__()
        self.model = LlamaTrunk(spec, dtype)
        self.lm_head = None if spec.tie_embeddings else Linear(spec.hidden_size, spec.vocab_size, dtype=dtype)
        self.cos_sin = rope_table(spec.rope, max_positions)

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids int [T] -> final hidden states [T, H]."""
        hidden: Tensor = self.model(ids, self.cos_sin, ctx)
        return hidden

    def logits(self, hidden: Tensor, ops: Ops, out: Tensor | None = None) -> Tensor:
        """hidden [S, H] -> fp32 [S, vocab]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return ops.logits(hidden, head.weight, out)

"""The decoder of all families; a ``ModelSpec`` says what is switched on.

Module names are those of Hugging Face checkpoints, so that weights find their place by name.
"""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.layers.experts import SparseMLP
from radixserve.engine.layers.linear import Embedding, Linear
from radixserve.engine.layers.norm import RMSNorm
from radixserve.engine.layers.rotary import rope_table
from radixserve.engine.layers.transformer import GatedMLP, SelfAttention
from radixserve.engine.model_spec import ModelSpec
from radixserve.kernels.interface import Ops


class DecoderLayer(nn.Module):
    """Attention, then a feed-forward network, both added to the residual stream. Each is normed before, with
    ``spec.sandwich_norms`` also after (which gives ``post_attention_layernorm`` another place)."""

    def __init__(self, spec: ModelSpec, index: int, dtype: torch.dtype):
        super().__init__()

        def norm() -> RMSNorm:
            return RMSNorm(spec, spec.hidden_size, dtype)

        experts = spec.layers[index].experts
        self.input_layernorm = norm()
        self.self_attn = SelfAttention(spec, index, dtype)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm() if spec.sandwich_norms else None
        self.post_feedforward_layernorm = norm() if spec.sandwich_norms else None
        self.mlp = SparseMLP(spec, experts, dtype) if experts else GatedMLP(spec, dtype)

    def forward(
        self, stream: Tensor, pending: Tensor | None, cos_sin: Tensor, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """The residual stream [T, H] and what is still to be added to it; returns the same pair."""
        sandwiched = self.pre_feedforward_layernorm is not None
        after_attention = self.post_attention_layernorm if sandwiched else None
        before_mlp = self.pre_feedforward_layernorm or self.post_attention_layernorm
        stream, pending = self.self_attn(stream, pending, self.input_layernorm, after_attention, cos_sin, ctx)
        stream, pending = self.mlp(stream, pending, before_mlp, self.post_feedforward_layernorm, ctx)
        return stream, pending


class DecoderTrunk(nn.Module):
    """Everything but the output head."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        super().__init__()
        self.embed_tokens = Embedding(spec.vocab_size, spec.hidden_size, spec.embedding_scale, dtype=dtype)
        self.layers = nn.ModuleList(DecoderLayer(spec, index, dtype) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec, spec.hidden_size, dtype)

    def forward(self, ids: Tensor, tables: list[Tensor], ctx: ForwardContext) -> Tensor:
        """``tables``: each layer's cosines and sines."""
        stream, pending = self.embed_tokens(ids, ctx.ops), None
        for layer, cos_sin in zip(self.layers, tables, strict=True):
            stream, pending = layer(stream, pending, cos_sin, ctx)
        normed: Tensor = self.norm(stream, pending, ctx.ops)
        return normed


class Decoder(nn.Module):
    """The whole model. Built on the device of the enclosing ``torch.device`` context, without values; needs its tables
    before it runs."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype):
        super().__init__()
        self.model = DecoderTrunk(spec, dtype)
        self.lm_head = None if spec.tie_embeddings else Linear(spec.hidden_size, spec.vocab_size, dtype=dtype)
        self.ropes = [layer.rope for layer in spec.layers]
        self.tables: list[Tensor] = []
        self.softcap = spec.final_softcap

    def fill_tables(self, max_positions: int) -> None:
        """Make the tables of cosines and sines, on the device of the enclosing context."""
        tables = {rope: rope_table(rope, max_positions) for rope in set(self.ropes)}
        self.tables = [tables[rope] for rope in self.ropes]

    def forward(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids int [T] -> final hidden states [T, H]."""
        hidden: Tensor = self.model(ids, self.tables, ctx)
        return hidden

    def logits(self, hidden: Tensor, ops: Ops, out: Tensor | None = None) -> Tensor:
        """hidden [S, H] -> fp32 [S, vocab], of a rank its part of them."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = ops.logits(hidden, head.weight, out)
        return logits if self.softcap is None else logits.div_(self.softcap).tanh_().mul_(self.softcap)


class CausalLM(Protocol):
    """A language model as the runner sees it."""

    def __call__(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids int [T] -> final hidden states [T, H]; keys and values go to the caches of ``ctx``."""
        ...

    def logits(self, hidden: Tensor, ops: Ops, out: Tensor | None = None) -> Tensor:
        """hidden [S, H] -> fp32 [S, vocab], see ``Ops.logits``."""
        ...


def create_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    quantize: Callable[[nn.Module], None] | None = None,
) -> Decoder:
    """A model without weights on ``device``, for sequences of up to ``max_positions`` tokens. ``quantize`` may give its
    matrices narrower storage; memory is taken only then."""
    with torch.device("meta"):
        model = Decoder(spec, dtype)
    if quantize is not None:
        quantize(model)
    model.to_empty(device=device)
    with device:
        model.fill_tables(max_positions)
    return model

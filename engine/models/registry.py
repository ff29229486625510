"""The interface of a language model, and the one there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.models.decoder import Decoder
from radixserve.kernels.interface import Ops


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

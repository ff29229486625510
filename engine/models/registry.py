"""The interface of a language model, and the one there is."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

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


def create_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_positions: int) -> Decoder:
    """A model without weights on ``device``, for sequences of up to ``max_positions`` tokens."""
    with device:
        return Decoder(spec, dtype, max_positions)

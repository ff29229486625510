"""From an architecture's name to the code that computes it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from radixserve.engine.errors import ModelError
from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.model_spec import ModelSpec
from radixserve.engine.models.llama import LlamaForCausalLM
from radixserve.kernels.interface import Ops


class CausalLM(Protocol):
    """A language model as the runner sees it."""

    def __call__(self, ids: Tensor, ctx: ForwardContext) -> Tensor:
        """ids int [T] -> final hidden states [T, H]; keys and values go to the caches of ``ctx``."""
        ...

    def logits(self, hidden: Tensor, ops: Ops, out: Tensor | None = None) -> Tensor:
        """hidden [S, H] -> fp32 [S, vocab], see ``Ops.logits``."""
        ...


MODELS: dict[str, type[LlamaForCausalLM]] = {"llama": LlamaForCausalLM, "qwen3": LlamaForCausalLM}


def create_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device, max_positions: int) -> LlamaForCausalLM:
    """A model without weights on ``device``. Raises ``ModelError`` for an architecture that has no code."""
    if spec.architecture not in MODELS:
        raise ModelError(f"architecture {spec.architecture} is not supported; supported: {', '.join(sorted(MODELS))}")
    with device:
        return MODELS[spec.architecture](spec, dtype, max_positions)

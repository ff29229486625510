"""RMS norm, of the residual stream or of single heads."""

import torch
from torch import Tensor, nn

from radixserve.engine.layers.parameter import empty_parameter
from radixserve.engine.model_spec import ModelSpec
from radixserve.kernels.interface import Norm, Ops, norm_of_stream


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, spec: ModelSpec, size: int, dtype: torch.dtype):
        super().__init__()
        # Weights that are stored as their distance from 1 have more digits than 16 bits hold once 1 is added.
        self.weight = empty_parameter(size, dtype=torch.float32 if spec.unit_offset_norms else dtype)
        self.eps = spec.rms_eps

    @property
    def rule(self) -> Norm:
        """As kernels take it."""
        return Norm(self.weight, self.eps)

    def forward(self, stream: Tensor, pending: Tensor | None, ops: Ops) -> Tensor:
        """Norm of the stream with what is ``pending`` added. May overwrite both."""
        return norm_of_stream(ops, stream, pending, self.rule)[0]

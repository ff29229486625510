"""RMS norm, of the residual stream or of single heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from radixserve.engine.layers.parameter import empty_parameter
from radixserve.kernels.interface import Ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, stream: Tensor, pending: Tensor | None, ops: Ops) -> Tensor:
        """Norm of the stream with what is ``pending`` added. May overwrite both."""
        if pending is None:
            return ops.rms_norm(stream, self.weight, self.eps)
        return ops.add_rms_norm(pending, stream, self.weight, self.eps)[0]

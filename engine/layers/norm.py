"""RMS norm that also carries the residual stream."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from radixserve.engine.layers.linear import empty_parameter
from radixserve.kernels.interface import Ops


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype):
        super().__init__()
        self.weight = empty_parameter(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor, residual: Tensor | None, ops: Ops) -> tuple[Tensor, Tensor]:
        """Add ``x`` to the residual stream (which starts with it) and return (norm of the stream, the stream).
        May overwrite both."""
        if residual is None:
            return ops.rms_norm(x, self.weight, self.eps), x
        return ops.add_rms_norm(x, residual, self.weight, self.eps)

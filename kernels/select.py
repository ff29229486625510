"""The one place that chooses kernels. A backend that was asked for by name and cannot load is an error."""

from __future__ import annotations

import torch

from radixserve.kernels.interface import AttentionKernel, AttentionShape, Ops
from radixserve.kernels.torch_attention import TorchAttention
from radixserve.kernels.torch_ops import TorchOps


class BackendUnavailable(Exception):
    """A kernel backend cannot be used here; the message says why and what to do."""


def select_ops(device: torch.device) -> Ops:
    """Pointwise operations for ``device``."""
    return TorchOps()


def select_attention(backend: str, shape: AttentionShape, device: torch.device) -> AttentionKernel:
    """The attention kernel named by ``--attention-backend``. Raises ``BackendUnavailable``."""
    match backend:
        case "auto" | "torch":
            return TorchAttention(shape, device)
    raise BackendUnavailable(f"attention backend {backend!r} is not available on {device.type}; use auto or torch")

"""What one forward pass carries from the runner to the layers."""

from dataclasses import dataclass

from torch import Tensor

from radixserve.kernels.interface import AttentionKernel, Ops


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """State of a step, passed down and never fetched. T: tokens of the step. ``attention`` is already planned.

    ``k_caches`` and ``v_caches``: one [pages, page_size, kv_heads, head_dim] for each layer."""

    ops: Ops
    attention: AttentionKernel
    positions: Tensor  # int32 [T]
    slots: Tensor  # int64 [T]
    k_caches: tuple[Tensor, ...]
    v_caches: tuple[Tensor, ...]

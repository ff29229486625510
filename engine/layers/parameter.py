"""Storage of weights."""

import torch
from torch import nn


def empty_parameter(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    """Storage without values, on the device of the enclosing ``torch.device`` context; a loader fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)

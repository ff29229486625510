"""Copies between host and device that do not wait for each other."""

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device, into: Tensor | None = None) -> Tensor:
    """Copy ``array`` in the order of the current stream, to the start of ``into`` if given. On the CPU the result
    shares its memory else."""
    tensor = torch.from_numpy(array)
    # A pinned block returns to torch's cache only after the copy has run.
    pinned = tensor if device.type == "cpu" else tensor.pin_memory()
    if into is None:
        return pinned.to(device, non_blocking=True)
    return into[: len(tensor)].copy_(pinned, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Start a copy to (pinned) host memory; it may be read after an event recorded later is reached."""
    return tensor.to("cpu", non_blocking=True)


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Mark this point of the current stream. None on a device that has no stream: all is done already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event

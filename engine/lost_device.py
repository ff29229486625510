"""Tells errors of a step that pass from those that stay: after an illegal access or a failed assertion on the device
every further call of CUDA fails, and only a new process helps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from radixserve.engine.errors import EngineLost


@contextmanager
def noticing_loss(
    device: torch.device, synchronize: Callable[[torch.device], Any] = torch.cuda.synchronize
) -> Iterator[None]:
    """Scope whose exceptions become ``EngineLost`` if ``device`` is a GPU that does not answer any more."""
    try:
        yield
    except Exception as error:
        if device.type == "cuda" and not _answers(device, synchronize):
            raise EngineLost(f"the CUDA context is lost: {str(error).partition(chr(10))[0]}") from error
        raise


def _answers(device: torch.device, synchronize: Callable[[torch.device], Any]) -> bool:
    try:
        synchronize(device)
    except Exception:  # whatever CUDA says
        return False
    return True

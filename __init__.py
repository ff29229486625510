"""radixserve: an OpenAI-compatible LLM inference server with a radix prefix cache.

``LLM`` and ``SamplingParams`` are imported on first use, so that ``import radixserve`` loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from radixserve.engine.llm import LLM
    from radixserve.engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]

_EXPORTS = {"LLM": "radixserve.engine.llm", "SamplingParams": "radixserve.engine.sampling_params"}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'radixserve' has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name]), name)

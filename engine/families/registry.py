"""The one list of supported families."""

from radixserve.engine.families.base import Family
from radixserve.engine.families.gemma import GEMMA2, GEMMA3
from radixserve.engine.families.llama import LLAMA, MISTRAL, PHI3
from radixserve.engine.families.mixtral import MIXTRAL
from radixserve.engine.families.qwen import QWEN2, QWEN3, QWEN3_MOE
from radixserve.engine.families.smollm3 import SMOLLM3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, MIXTRAL, SMOLLM3, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, PHI3)

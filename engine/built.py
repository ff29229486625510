"""What ``engine/build.py`` (torch) hands to the process that runs the loop (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from radixserve.engine.step import Runner
from radixserve.kvcache.manager import CacheManager


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A loaded model, its KV cache, and the sizes that were "auto" in the configuration.

    ``max_num_batched_tokens`` is the token budget of a step; ``description`` is one line for the log.
    """

    runner: Runner
    cache: CacheManager
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_batched_tokens: int
    overlap: bool
    description: str

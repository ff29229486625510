"""What ``engine/build.py`` (torch) hands to whoever runs the steps, and the scheduler for it. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from radixserve.configs.schema import ServeConfig
from radixserve.engine.constraint import ConstraintSource
from radixserve.engine.scheduler import Scheduler, SchedulerLimits
from radixserve.engine.step import Pulse, Runner
from radixserve.kvcache.manager import CacheManager


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A loaded model, its KV cache, and the sizes that were "auto" in the configuration.

    ``max_num_batched_tokens`` is the token budget of a step, ``target_itl_s`` its time when it also decodes;
    ``reads_shared``: the runner wants to know which decodes share a prefix; ``description`` is one line for people, its
    clauses separated by semicolons; ``pulse`` beats while the runner computes; ``close`` ends what runs beside this
    process.
    """

    runner: Runner
    cache: CacheManager
    grammars: ConstraintSource
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_num_batched_tokens: int
    overlap: bool
    reads_shared: bool
    description: str
    target_itl_s: float | None = None
    pulse: Pulse = field(default_factory=Pulse)
    close: Callable[[], None] = lambda: None


def new_scheduler(built: BuiltEngine, config: ServeConfig) -> Scheduler:
    """The scheduler that feeds ``built.runner``."""
    limits = SchedulerLimits(
        max_model_len=built.max_model_len,
        vocab_size=built.vocab_size,
        step_tokens=built.max_num_batched_tokens,
        eos_token_ids=built.eos_token_ids,
        target_itl_s=built.target_itl_s,
    )
    shares_prefixes = not config.disable_radix_cache
    tells_shared = shares_prefixes and built.reads_shared
    return Scheduler(
        built.cache, limits, config, shares_prefixes=shares_prefixes, tells_shared=tells_shared, seed=config.seed
    )

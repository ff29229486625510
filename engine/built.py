"""What ``engine/build.py`` (torch) hands to whoever runs the steps, and the scheduler for it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

from radixserve.configs.schema import ServeConfig
from radixserve.engine.constraint import ConstraintSource
from radixserve.engine.scheduler import Scheduler, SchedulerLimits
from radixserve.engine.step import Pulse, Runner
from radixserve.kvcache.manager import CacheManager


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """A loaded model, its KV cache, and what was "auto" in the configuration.

    ``reads_shared``: the runner wants to know which decodes share a prefix; ``description`` is one line for people, its
    clauses separated by semicolons; ``pulse`` beats while the runner computes; ``close`` ends what runs beside this
    process.
    """

    runner: Runner
    cache: CacheManager
    grammars: ConstraintSource
    limits: SchedulerLimits
    overlap: bool
    reads_shared: bool
    description: str
    pulse: Pulse = field(default_factory=Pulse)
    close: Callable[[], None] = lambda: None


def new_scheduler(built: BuiltEngine, config: ServeConfig) -> Scheduler:
    """The scheduler that feeds ``built.runner``."""
    shares = not config.disable_radix_cache
    tells_shared = shares and built.reads_shared
    return Scheduler(
        built.cache, built.limits, config, shares_prefixes=shares, tells_shared=tells_shared, seed=config.seed
    )

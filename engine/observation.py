"""What the engine tells those who watch it. No torch."""

import msgspec

# Named here too, for the server, which knows nothing of the cache.
from radixserve.kvcache.watch import SeenNode as SeenNode
from radixserve.kvcache.watch import TreeEvent as TreeEvent

# What an observation has of each at most; totals are in the statistics.
MAX_REQUESTS = 48
MAX_STEPS = 64
MAX_CHUNKS = 8  # of a step
INTERVAL_S = 0.25  # between two observations, at least
LEASE_S = 5.0  # how long one ``Watch`` lasts


class SeenRequest(msgspec.Struct, frozen=True):
    """``state``: waiting, prefill or decode. Tokens of its prompt: all, found in the cache at admission (None: not yet
    admitted), and computed or cached so far. ``age_s``: since it came to the engine."""

    id: str
    state: str
    prompt_tokens: int
    cached_tokens: int | None
    computed_tokens: int
    output_tokens: int
    age_s: float


class SeenStep(msgspec.Struct, frozen=True):
    """A step planned at ``at``: how many requests decode in it, how many prompt tokens it computes, and ``chunks`` of
    which requests that are: (id, first token, number of tokens)."""

    step: int
    at: float
    num_decodes: int
    num_prompt_tokens: int
    chunks: list[tuple[str, int, int]]


class EngineView(msgspec.Struct, frozen=True):
    """Times (``at``, and those in the tree) are seconds of the engine's monotonic clock. ``tree``: all of it, as far as
    it is told; None: it follows from the last one and ``events``."""

    at: float
    page_size: int
    tree: list[SeenNode] | None
    events: list[TreeEvent]
    steps: list[SeenStep]
    requests: list[SeenRequest]

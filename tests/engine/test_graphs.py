"""What captures need that can be seen without a GPU."""

import gc
import weakref

import pytest

from radixserve.engine.graphs import mixed_token_counts, no_collection


class Loop:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_stays_until_a_capture_has_ended() -> None:
    thresholds = gc.get_threshold()
    gc.set_threshold(1)  # else it may not run in so short a time
    try:
        with pytest.raises(ValueError), no_collection():
            garbage = weakref.ref(Loop())
            objects = [[number] for number in range(100)]
            assert garbage() is not None
            raise ValueError
        objects += [[number] for number in range(100)]
        assert gc.isenabled() and garbage() is None
    finally:
        gc.set_threshold(*thresholds)


def test_graphs_hold_only_steps_whose_sums_fit_unless_none_does() -> None:
    """1,638 tokens of 5,120 values of two bytes take 16 MiB."""
    assert mixed_token_counts(8192, lambda count: count <= 1638) == mixed_token_counts(1536)
    assert mixed_token_counts(8192, lambda count: False) == mixed_token_counts(8192)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()

"""What captures need that can be seen without a GPU."""

import gc
import weakref

import pytest

from radixserve.engine.graphs import no_collection


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


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()

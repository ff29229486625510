"""The KV buffer."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from radixserve.kvcache.mha import KVShape, MHAKVCache, pages_that_fit

CPU = torch.device("cpu")


@pytest.mark.parametrize("room", [None, partial(torch.zeros, dtype=torch.uint8)])
def test_keys_and_values_are_found_at_their_slots_and_nowhere_else(room: Callable[[int], torch.Tensor] | None) -> None:
    cache = MHAKVCache.allocate(KVShape(3, 4, 2, 8, torch.float32), 5, CPU, room)
    cache.buffer.zero_()
    k, v = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    slots = torch.tensor([2 * 4 + 1, 0, 4 * 4 + 3])  # page 2 offset 1, page 0 offset 0, page 4 offset 3
    cache.store_kv(k, v, slots, layer=1)
    keys, values = cache.layer(1)
    assert keys.shape == values.shape == (5, 4, 2, 8)
    places = ((2, 1), (0, 0), (4, 3))
    for token, (page, offset) in enumerate(places):
        assert torch.equal(keys[page, offset], k[token])
        assert torch.equal(values[page, offset], v[token])
    assert int((keys != 0).any(-1).any(-1).sum()) == 3
    assert not cache.layer(0)[0].any() and not cache.layer(2)[1].any()


def test_a_layer_is_a_view_of_the_buffer() -> None:
    cache = MHAKVCache.allocate(KVShape(2, 16, 1, 8, torch.bfloat16), 4, CPU)
    cache.layer(1)[1].fill_(3)
    assert (cache.buffer[1, 1] == 3).all()
    assert cache.buffer.shape == (2, 2, 4, 16, 1, 8)


def test_all_of_a_page_lies_together_in_a_given_room() -> None:
    shape = KVShape(2, 16, 1, 8, torch.bfloat16)
    room = torch.zeros(4 * shape.page_bytes, dtype=torch.uint8)
    cache = MHAKVCache.allocate(shape, 4, CPU, lambda num_bytes: room[:num_bytes])
    cache.buffer[:, :, 2] = 1
    assert room.view(4, shape.page_bytes).any(-1).tolist() == [False, False, True, False]
    assert room.view(4, shape.page_bytes).view(torch.bfloat16)[2].eq(1).all()


def test_page_bytes_are_those_of_the_buffer() -> None:
    shape = KVShape(3, 4, 2, 8, torch.bfloat16)
    assert 7 * shape.page_bytes == MHAKVCache.allocate(shape, 7, CPU).buffer.nbytes


def test_as_many_pages_fit_as_free_memory_holds() -> None:
    assert pages_that_fit(1000, page_bytes=100) == 10
    assert pages_that_fit(1099, page_bytes=100) == 10
    assert pages_that_fit(-100, page_bytes=100) == 0


def test_a_buffer_that_does_not_fit_is_an_error_with_a_remedy() -> None:
    with pytest.raises(MemoryError, match="lower --num-pages"):
        MHAKVCache.allocate(KVShape(64, 16, 8, 128, torch.float32), 2**32, CPU)

"""Products cut evenly, against torch, on a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_even_products.py``.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
IS_HOPPER = DEVICE.type == "cuda" and torch.cuda.get_device_capability() >= (9, 0)
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter has no bf16 products
TOLERANCE = 1e-2 if DEVICE.type == "cuda" else 1e-5
pytestmark = pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("default")


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


@pytest.mark.parametrize("tma", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tokens", "n", "k", "multiprocessors"),
    [
        (2, 64, 256, 1),  # a share of all columns
        (17, 128, 512, 2),  # shares of whole columns
        (64, 192, 512, 7),  # shares that end in the middle of some
        (3, 64, 1024, 132),  # as many parts of a column as there may be
    ],
)
def test_even_shares_make_the_product_each_time_alike(
    tokens: int, n: int, k: int, multiprocessors: int, gated: bool, tma: bool
) -> None:
    from radixserve.kernels.triton_even import EvenProducts, EvenTile

    if tma and not (INTERPRETED or IS_HOPPER):
        pytest.skip("tensor maps need compute capability 9.0")
    products = EvenProducts(multiprocessors, DEVICE, pdl=IS_HOPPER)
    tile = EvenTile(columns=64, depth=64, stages=3, warps=4, blocks=1, early_kib=16, tma=tma)
    x, weight = randn(tokens, k), randn(n * (2 if gated else 1), k) / k**0.5
    product = x.float() @ weight.float().T
    reference = F.silu(product[:, :n]) * product[:, n:] if gated else product
    results = [products.linear(x, weight, tile, gated=gated) for _ in range(2 if INTERPRETED else 20)]
    error = (results[0].float() - reference).norm() / reference.norm()
    assert error < TOLERANCE
    assert all(torch.equal(result, results[0]) for result in results)

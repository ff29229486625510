"""Products cut evenly, against torch, on an H100 or H200 or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_even_products.py``.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from radixserve.kernels.interface import Norm

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter has no bf16 products
TOLERANCE = 1e-2 if DEVICE.type == "cuda" else 1e-5
pytestmark = pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("default")
if DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs compute capability 9.0", allow_module_level=True)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


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
    tokens: int, n: int, k: int, multiprocessors: int, gated: bool
) -> None:
    from radixserve.kernels.triton_even import EvenProducts, EvenTile

    products = EvenProducts(multiprocessors, DEVICE, pdl=not INTERPRETED)
    tile = EvenTile(columns=64, depth=64, stages=3)
    x, weight = randn(tokens, k), randn(n * (2 if gated else 1), k) / k**0.5
    product = x.float() @ weight.float().T
    reference = F.silu(product[:, :n]) * product[:, n:] if gated else product
    results = [products.linear(x, weight, tile, gated=gated) for _ in range(2 if INTERPRETED else 20)]
    error = (results[0].float() - reference).norm() / reference.norm()
    assert error < TOLERANCE
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("tokens", [2, 8, 20, 48, 64])
def test_a_layer_is_the_same_with_even_products(tokens: int) -> None:
    from radixserve.kernels.cuda_ops import CudaOps
    from radixserve.kernels.triton_even import EvenProducts

    if INTERPRETED:
        pytest.skip("norms start early only on a device")
    for hidden, inner in ((4096, 4096), (1024, 3072)):
        stream, y, norm = randn(tokens, hidden), randn(tokens, inner), Norm(randn(hidden), 1e-6)
        down, gate_up = randn(hidden, inner) / inner**0.5, randn(2 * inner, hidden) / hidden**0.5
        results = []
        for even in (None, EvenProducts(132, DEVICE)):
            ops = CudaOps(pdl=True, even=even)
            results.append(ops.project(*ops.add_linear(stream.clone(), y, down), norm, gate_up, None, gated=True))
        for plain, cut in zip(*results, strict=True):
            assert (plain.float() - cut.float()).norm() / plain.float().norm() < 2 * TOLERANCE

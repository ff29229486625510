"""Quantized matrices: how they are rounded and packed, and the Triton products against torch.

The Triton kernels run on a GPU or, where triton is installed, in its interpreter:
``TRITON_INTERPRET=1 scripts/test tests/kernels/test_quantized.py``.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from radixserve.kernels.interface import Norm
from radixserve.kernels.quantized import (
    FP8,
    Form,
    Product,
    QuantizedMatrix,
    choose_product,
    pack_nibbles,
    quantize,
    unpack_nibbles,
)
from radixserve.kernels.torch_ops import TorchOps

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32  # the interpreter has no bf16 products
TOLERANCE = 1e-2 if DEVICE.type == "cuda" else 1e-5
ROUNDING = max(TOLERANCE, 1e-3)  # of activations to 16 bits, which some kernels ask for
triton_test = pytest.mark.gpu if not INTERPRETED else pytest.mark.filterwarnings("default")
FORMS = [Form(8, None), Form(8, 128), Form(8, 32), Form(4, 32), Form(4, 64), Form(4, 128)]
BLOCKS = Form(8, 128, height=128)


@pytest.fixture(autouse=True)
def _the_same_numbers_each_time() -> None:
    torch.manual_seed(0)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def error(out: Tensor, reference: Tensor) -> float:
    return float((out.float() - reference.float()).norm() / reference.float().norm())


def matrix_of(form: Form, rows: int, cols: int) -> QuantizedMatrix:
    """With zero points that differ, and columns in another order where the form says so."""
    matrix = quantize(torch.randn(rows, cols, device=DEVICE), form)
    if matrix.zeros is not None:
        matrix.zeros.copy_(torch.randint(0, 17, matrix.zeros.shape, device=DEVICE))
    if not form.reordered:
        return matrix
    order = torch.randperm(cols, device=DEVICE)
    return QuantizedMatrix(form, matrix.values, matrix.scales, matrix.zeros, order)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_values_are_rounded_by_less_than_a_step(form: Form) -> None:
    values = torch.randn(48, 256, device=DEVICE) * torch.logspace(-3, 3, 48, device=DEVICE)[:, None]
    values[5] = 0
    matrix = quantize(values, form)
    assert matrix.shape == values.shape
    back = matrix.dequantized(torch.float32)
    largest = values.view(48, -1, form.group or 256).abs().amax(2).repeat_interleave(form.group or 256, 1)
    step = values.abs() / 15 + largest / 448 / 64 if form.bits == 8 else largest / 13
    assert ((back - values).abs() <= step).all()


def test_nibbles_are_unpacked_as_they_were_packed() -> None:
    nibbles = torch.randint(0, 16, (6, 96), dtype=torch.uint8, device=DEVICE)
    assert torch.equal(unpack_nibbles(pack_nibbles(nibbles)), nibbles)


def test_columns_in_another_order_are_multiplied_with_their_own_inputs() -> None:
    matrix = matrix_of(Form(4, 32, reordered=True), 24, 64)
    assert matrix.order is not None
    plain = QuantizedMatrix(Form(4, 32), matrix.values, matrix.scales, matrix.zeros)
    x = randn(3, 64)
    ours = TorchOps().linear(x, matrix)
    assert error(ours, TorchOps().linear(x[:, matrix.order], plain)) < TOLERANCE


def test_the_product_is_chosen_by_tokens_and_form() -> None:
    def chosen(tokens: int, form: Form, cols: int = 1024, *, has_scaled: bool = True) -> Product:
        return choose_product(tokens, form, (4096, cols), has_scaled=has_scaled)

    by_row = Form(8, None)
    assert all(chosen(1, form) == Product.VECTOR for form in (*FORMS, BLOCKS))
    assert chosen(1, by_row, 1000) == Product.WIDE
    for form in (by_row, BLOCKS):
        assert chosen(16, form) == chosen(16, form, has_scaled=False) == Product.NARROW
        assert chosen(8192, form) == Product.SCALED and chosen(8192, form, has_scaled=False) == Product.WIDE
    assert chosen(8192, by_row, 1000) == Product.WIDE
    for form in (Form(8, 128), Form(8, 32), Form(4, 128)):
        assert chosen(16, form) == Product.NARROW and chosen(8192, form) == Product.WIDE


# ---- Triton ----


@triton_test
@pytest.mark.parametrize("form", [*FORMS, BLOCKS, Form(4, 64, reordered=True)], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 17, 70, 300])
def test_products_equal_torchs(form: Form, num_tokens: int) -> None:
    cuda_ops = pytest.importorskip("radixserve.kernels.cuda_ops")
    ops = cuda_ops.CudaOps(pdl=not INTERPRETED)
    matrix, x, bias = matrix_of(form, 50, 256), randn(num_tokens, 256), randn(50)
    x[0] *= 1e5  # more than fp16 holds
    for added in (None, bias):
        ours, expected = ops.linear(x, matrix, added), TorchOps().linear(x, matrix, added)
        assert all(error(ours[i], expected[i]) < ROUNDING for i in (0, num_tokens // 2, num_tokens - 1))


@triton_test
@pytest.mark.parametrize("form", [*FORMS, Form(4, 64, reordered=True)], ids=str)
@pytest.mark.parametrize("cols", [256, 320, 5120])
@pytest.mark.parametrize("gated", [False, True])
def test_one_token_takes_norm_gate_and_residual_along(form: Form, cols: int, gated: bool) -> None:
    if form.group and cols % form.group:
        pytest.skip("no whole groups")
    cuda_ops = pytest.importorskip("radixserve.kernels.cuda_ops")
    ops, by_torch = cuda_ops.CudaOps(pdl=not INTERPRETED), TorchOps()
    matrix, stream, norm = matrix_of(form, 52, cols), randn(1, cols), Norm(randn(cols), 1e-5)
    exact = Norm(norm.weight.float(), norm.eps)  # gates of torch's bf16 products would be no better than ours
    # In another order a token is normed by itself, to 16 bits, which differences of large products make larger.
    tolerance = 2 * TOLERANCE if form.reordered else TOLERANCE
    for pending in (None, randn(1, cols)):
        ours = ops.project(stream.clone(), pending, norm, matrix, None, gated=gated)[1]
        whole = stream.float() if pending is None else (stream + pending).float()
        expected = by_torch.project(whole, None, exact, matrix, None, gated=gated)[1]
        assert error(ours, expected) < tolerance
    if not gated:
        wide = randn(1, 52)
        added, pending = ops.add_linear(wide.clone(), stream, matrix)
        added = added if pending is None else added + pending
        assert error(added, wide + by_torch.linear(stream, matrix)) < TOLERANCE


@triton_test
@pytest.mark.parametrize("form", [Form(8, None), BLOCKS, Form(4, 64), Form(4, 64, reordered=True)], ids=str)
@pytest.mark.parametrize("num_parts", [0, 1, 3])  # of what is pending
def test_the_norm_of_a_few_tokens_is_part_of_their_product(form: Form, num_parts: int) -> None:
    cuda_ops = pytest.importorskip("radixserve.kernels.cuda_ops")
    ops, by_torch, norm = cuda_ops.CudaOps(pdl=not INTERPRETED), TorchOps(), Norm(randn(256), 1e-5)
    matrix, stream, bias = matrix_of(form, 72, 256), randn(9, 256), randn(72)
    parts = [randn(9, 256) for _ in range(num_parts)]
    pending = torch.stack(parts) if len(parts) > 1 else parts[0] if parts else None
    whole = stream.float() if pending is None else (stream + pending.view(-1, 9, 256).sum(0)).float()
    exact = Norm(norm.weight.float(), norm.eps)
    expected = by_torch.project(whole, None, exact, matrix, bias.float(), gated=False)[1]
    left, ours = ops.project(stream.clone(), pending, norm, matrix, bias, gated=False)
    assert error(ours, expected) < ROUNDING and error(left, whole) < TOLERANCE


@triton_test
@pytest.mark.parametrize("num_tokens", [2, 17, 70, 200])
@pytest.mark.parametrize("form", [Form(8, None), Form(8, 128), BLOCKS], ids=str)
def test_products_of_narrow_tokens_and_weights_are_exact_up_to_sums(num_tokens: int, form: Form) -> None:
    multiply_scaled = pytest.importorskip("radixserve.kernels.triton_scaled").multiply_scaled
    matrix, bias = matrix_of(form, 200, 384), randn(200)
    x = randn(num_tokens, 384) * torch.logspace(-3, 3, 384, device=DEVICE).to(DTYPE)  # too much for a single scale
    narrow = quantize(x, Form(8, form.group))
    exact = narrow.dequantized(torch.float32) @ matrix.dequantized(torch.float32).T
    rounded = (narrow.values, narrow.scales.T.contiguous(), matrix)
    for added in (None, bias):
        ours = multiply_scaled(*rounded, added, DTYPE, pdl=not INTERPRETED)
        assert error(ours, exact if added is None else exact + added) < TOLERANCE
    parts = multiply_scaled(*rounded, None, DTYPE, pdl=not INTERPRETED, parts=2)
    assert parts.shape == (2, *exact.shape) and error(parts.float().sum(0), exact) < TOLERANCE


@triton_test
def test_deterministic_products_do_not_depend_on_the_batch() -> None:
    cuda_invariant = pytest.importorskip("radixserve.kernels.cuda_invariant")
    ops = cuda_invariant.InvariantCudaOps(pdl=not INTERPRETED)
    matrix, x = matrix_of(Form(4, 64), 48, 128), randn(70, 128)
    whole = ops.linear(x, matrix)
    assert error(whole, TorchOps().linear(x, matrix)) < TOLERANCE
    assert all(torch.equal(ops.linear(x[i : i + 1], matrix)[0], whole[i]) for i in (0, 33, 69))


@triton_test
@pytest.mark.parametrize(("group", "cols"), [(None, 100), (128, 384), (32, 64)])
def test_tokens_are_rounded_to_e4m3_one_by_one(group: int | None, cols: int) -> None:
    round_tokens = pytest.importorskip("radixserve.kernels.triton_rounding").round_tokens
    x = randn(9, cols) * torch.logspace(-4, 4, 9, device=DEVICE)[:, None].to(DTYPE)
    x[4] = 0
    narrow, scales = round_tokens(x, group, pdl=not INTERPRETED)
    expected = quantize(x, Form(8, group))
    torch.testing.assert_close(scales.T, expected.scales)
    assert narrow.dtype == FP8
    # Triton's interpreter rounds up to powers of two wrongly, and a quotient's last bit may differ.
    assert (narrow.float() == expected.values.float()).float().mean() > 0.96


@triton_test
@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("num_parts", [0, 1, 3])  # of what is pending
def test_tokens_are_rounded_along_with_their_norm(group: int | None, num_parts: int) -> None:
    round_tokens = pytest.importorskip("radixserve.kernels.triton_rounding").round_tokens
    stream, parts = randn(5, 384), [randn(5, 384) for _ in range(num_parts)]
    norm, whole = Norm(randn(384), 1e-5), (stream.float() + sum(part.float() for part in parts)).to(DTYPE)
    residual = stream if parts else None
    x = torch.stack(parts) if len(parts) > 1 else parts[0] if parts else stream
    narrow, scales = round_tokens(x, group, not INTERPRETED, norm, residual)
    expected = quantize(TorchOps().rms_norm(whole.float(), Norm(norm.weight.float(), norm.eps)), Form(8, group))
    torch.testing.assert_close(scales.T, expected.scales, rtol=TOLERANCE, atol=0)
    # As above; and on a GPU the sum may be rounded the other way.
    assert (narrow.float() == expected.values.float()).float().mean() > 0.9
    assert residual is None or error(residual, whole) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_scaled_products_are_within_the_rounding_of_their_inputs() -> None:
    from radixserve.kernels.triton_scaled import scaled_linear

    matrix, x, bias = matrix_of(Form(8, None), 96, 256), randn(70, 256), randn(96)
    ours = scaled_linear(x, matrix, bias, pdl=True)
    exact = quantize(x, Form(8, None)).dequantized(torch.float32) @ matrix.dequantized(torch.float32).T + bias
    assert error(ours, exact) < TOLERANCE
    assert error(ours, TorchOps().linear(x, matrix, bias)) < 0.05


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("form", [Form(8, None), BLOCKS], ids=str)
@pytest.mark.parametrize("num_tokens", [100, 300])
def test_layers_of_scaled_products_are_within_the_rounding_of_their_inputs(form: Form, num_tokens: int) -> None:
    from radixserve.kernels.cuda_ops import CudaOps

    ops, by_torch, norm = CudaOps(pdl=True, multiplies_fp8=True), TorchOps(), Norm(randn(1024), 1e-5)
    matrix, back = matrix_of(form, 512, 1024), matrix_of(form, 1024, 2048)
    stream, y = randn(num_tokens, 1024), randn(num_tokens, 2048)
    for pending in (None, randn(num_tokens, 1024)):
        expected, ours = (
            each.project(stream.clone(), None if pending is None else pending.clone(), norm, matrix, None, gated=True)
            for each in (by_torch, ops)
        )
        assert error(ours[0], expected[0]) < TOLERANCE and error(ours[1], expected[1]) < 0.08
    _, added = ops.add_linear(stream, y, back)
    assert added is not None
    assert error(added if added.dim() == 2 else added.float().sum(0), by_torch.linear(y, back)) < 0.05

"""Weights that multiply: linear layers, some of which merge several matrices of a checkpoint, and the embedding."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from radixserve.engine.layers.norm import RMSNorm
from radixserve.engine.layers.parameter import empty_parameter
from radixserve.kernels.interface import Ops, Weight
from radixserve.kernels.quantized import Form, QuantizedMatrix

_TENSORS = ("values", "scales", "zeros", "order")  # of a QuantizedMatrix


class Projection(nn.Module):
    """y = x W^T (+ b). ``parts``: where several matrices of one input are merged, the checkpoint's names and output
    sizes, in row order; else empty."""

    parts: Mapping[str, int] = {}
    bias: nn.Parameter | None

    @property
    def matrix(self) -> Weight:
        """W, [out, in]."""
        raise NotImplementedError

    def after_norm(
        self, stream: Tensor, pending: Tensor | None, norm: RMSNorm, ops: Ops, *, gated: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Apply to the norm of the residual stream, see ``Ops.project``: (the stream, the product)."""
        return ops.project(stream, pending, norm.rule, self.matrix, self.bias, gated=gated)

    def add_to(self, stream: Tensor, x: Tensor, out_norm: RMSNorm | None, ops: Ops) -> tuple[Tensor, Tensor | None]:
        """Add the product, or its norm, to the stream, see ``Ops.add_linear``: (the stream, what is pending)."""
        if out_norm is not None:
            return stream, out_norm(ops.linear(x, self.matrix, self.bias), None, ops)
        return ops.add_linear(stream, x, self.matrix, self.bias)


class Linear(Projection):
    """Of weights of one type, or packed. ``out``: rows, or the ``parts``."""

    def __init__(self, in_features: int, out: int | Mapping[str, int], *, bias: bool = False, dtype: torch.dtype):
        super().__init__()
        self.in_features = in_features
        self.parts = {} if isinstance(out, int) else out
        out_features = out if isinstance(out, int) else sum(out.values())
        self.weight = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias = empty_parameter(out_features, dtype=dtype) if bias else None

    @property
    def matrix(self) -> Tensor:
        return self.weight


class MatrixStorage(nn.Module):
    """Holds a quantized matrix of so many rows and columns."""

    def __init__(self, form: Form, rows: int, cols: int):
        super().__init__()
        self._form = form
        matrix = QuantizedMatrix.empty(form, rows, cols)
        for name in _TENSORS:
            self.register_buffer(name, getattr(matrix, name))

    @property
    def matrix(self) -> QuantizedMatrix:
        return QuantizedMatrix(self._form, *(getattr(self, name) for name in _TENSORS))


class QuantizedLinear(MatrixStorage, Projection):
    """What stands in for a ``Linear`` whose weights are 8 or 4 bits wide."""

    def __init__(self, linear: Linear, form: Form):
        with linear.weight.device:
            super().__init__(form, *linear.weight.shape)
        self.parts, self.bias = linear.parts, linear.bias


class Embedding(nn.Module):
    """Rows of a table [vocab, hidden] by token id, times ``scale``."""

    def __init__(self, vocab_size: int, hidden_size: int, scale: float | None = None, *, dtype: torch.dtype):
        super().__init__()
        self.hidden_size = hidden_size
        self.weight = empty_parameter(vocab_size, hidden_size, dtype=dtype)
        # Rounded to the type of the weights, as the models were trained.
        self.scale = torch.tensor(scale or 1.0, dtype=dtype, device="cpu").item()

    def forward(self, ids: Tensor, ops: Ops) -> Tensor:
        return ops.embed(ids, self.weight, self.hidden_size, self.scale)

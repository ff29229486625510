"""A mixture of experts in the place of the feed-forward network."""

import torch
from torch import Tensor, nn

from radixserve.engine.layers.context import ForwardContext
from radixserve.engine.layers.linear import Linear, MatrixStorage
from radixserve.engine.layers.norm import RMSNorm
from radixserve.engine.layers.parameter import empty_parameter
from radixserve.engine.model_spec import ExpertsSpec, ModelSpec
from radixserve.kernels.interface import norm_of_stream
from radixserve.kernels.quantized import Form, Stack


class Experts(nn.Module):
    """The weights of E networks as two stacks: ``gate_up_proj`` [E, 2 I, H], first the gates, and ``down_proj``
    [E, H, I]."""

    def __init__(self, count: int, hidden_size: int, intermediate_size: int, *, dtype: torch.dtype):
        super().__init__()
        self.count = count
        self.gate_up_proj = empty_parameter(count, 2 * intermediate_size, hidden_size, dtype=dtype)
        self.down_proj = empty_parameter(count, hidden_size, intermediate_size, dtype=dtype)

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        return self.gate_up_proj, self.down_proj


class QuantizedExperts(nn.Module):
    """What stands in for ``Experts`` whose weights are 8 or 4 bits wide, the rows of all networks in one matrix each.
    ``gate_up`` and ``down``: forms of the same bits."""

    def __init__(self, experts: Experts, gate_up: Form, down: Form):
        super().__init__()
        assert gate_up.bits == down.bits
        self.count, hidden_size, inner_size = experts.down_proj.shape
        with experts.down_proj.device:
            self.gate_up_proj = MatrixStorage(gate_up, self.count * 2 * inner_size, hidden_size)
            self.down_proj = MatrixStorage(down, self.count * hidden_size, inner_size)

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        return self.gate_up_proj.matrix, self.down_proj.matrix


class SparseMLP(nn.Module):
    """Each token goes to the few networks that its router likes best; their answers are summed up by its weights."""

    def __init__(self, spec: ModelSpec, experts: ExpertsSpec, dtype: torch.dtype):
        super().__init__()
        assert spec.activation == "silu", "no family has experts with another activation"
        self.per_token, self.normalized = experts.per_token, experts.normalized
        self.gate = Linear(spec.hidden_size, experts.count, dtype=dtype)
        self.experts: Experts | QuantizedExperts = Experts(
            experts.count, spec.hidden_size, experts.intermediate_size, dtype=dtype
        )

    def forward(
        self, stream: Tensor, pending: Tensor | None, norm: RMSNorm, out_norm: RMSNorm | None, ctx: ForwardContext
    ) -> tuple[Tensor, Tensor | None]:
        """Add the networks' answer to the normed stream [T, H] to the stream."""
        assert out_norm is None, "no family has experts between two norms"
        x, stream = norm_of_stream(ctx.ops, stream, pending, norm.rule)
        gate_up, down = self.experts.stacks
        return stream, ctx.ops.experts(x, self.gate.weight, gate_up, down, self.per_token, self.normalized, ctx.slots)

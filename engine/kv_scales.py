"""Keys and values that fit e4m3 whatever the prompt: factors in the weights around a narrow KV cache.

Attention does not change when all keys of a layer are divided by a number that its queries are multiplied by, or all
values by one that the output projection is multiplied by. Powers of two do so without rounding, so the kernels need no
scales: they store and load the cache with a cast. The numbers follow from the weights. A normed token x has a length of
at most sqrt(H), so a row w of a product makes at most |w| sqrt(H) of it (Cauchy and Schwarz); a bias adds to that, and
rope turns pairs, which lengthens one of the two by at most sqrt(2). Nothing is ever cut off; and since e4m3 is a
floating type, values far below the bound are as precise as those near it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from radixserve.engine.decoder import Decoder, DecoderLayer
from radixserve.engine.layers.norm import RMSNorm
from radixserve.engine.layers.transformer import SelfAttention
from radixserve.kernels.interface import Weight
from radixserve.kernels.quantized import FP8_MAX

_ROUNDING = 1.05  # what activations of 16 bits may add to the bound
_SMALLEST = 2.0**-30  # of weights that are all zero


@torch.no_grad()
def scale_kv(model: Decoder) -> None:
    """Change the weights of ``model`` so that keys and values lie within e4m3's range and use it."""
    for layer, table in zip(model.model.layers, model.tables, strict=True):
        assert isinstance(layer, DecoderLayer)
        _scale_layer(layer.self_attn, layer.input_layernorm, float(table.abs().max()))


def _scale_layer(attention: SelfAttention, norm: RMSNorm, stretch: float) -> None:
    """``stretch``: the largest of rope's cosines and sines, which some scalings lengthen."""
    projection, parts = attention.qkv_proj, attention.qkv_proj.parts
    sizes = list(parts.values())
    biases = [None] * len(sizes) if projection.bias is None else projection.bias.split(sizes)
    rows = dict(zip(parts, map(_Rows, projection.matrix.split(sizes), biases), strict=True))
    stretch *= math.sqrt(2)
    if attention.q_norm is not None and attention.k_norm is not None:
        weight = attention.k_norm.weight
        factor = _power_of_two(float(weight.abs().max()) * math.sqrt(len(weight)) * stretch)
        attention.q_norm.weight.mul_(factor)
        weight.div_(factor)
    else:
        factor = _power_of_two(rows["k_proj"].largest_after(norm) * stretch)
        rows["q_proj"].multiply(factor)
        rows["k_proj"].multiply(1 / factor)
    factor = _power_of_two(rows["v_proj"].largest_after(norm))
    rows["v_proj"].multiply(1 / factor)
    _multiply(attention.o_proj.matrix, factor)


def _power_of_two(largest: float) -> float:
    """What to divide values of up to ``largest`` by."""
    return 2.0 ** math.ceil(math.log2(max(largest * _ROUNDING / FP8_MAX, _SMALLEST)))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a matrix and of its bias, if there is one."""

    weight: Weight
    bias: Tensor | None

    def multiply(self, factor: float) -> None:
        _multiply(self.weight, factor)
        if self.bias is not None:
            self.bias.mul_(factor)

    def largest_after(self, norm: RMSNorm) -> float:
        """What they make of a normed token is no larger."""
        weight = self.weight.float() if isinstance(self.weight, Tensor) else self.weight.dequantized(torch.float32)
        bounds = (weight * norm.weight.float()).norm(dim=1) * math.sqrt(weight.shape[1])
        return float((bounds if self.bias is None else bounds + self.bias.abs()).max())


def _multiply(weight: Weight, factor: float) -> None:
    (weight if isinstance(weight, Tensor) else weight.scales).mul_(factor)

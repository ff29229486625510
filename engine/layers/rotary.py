"""Rotary position embedding: the table of cosines and sines."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from radixserve.engine.model_spec import FrequencyDivisors, LinearScaling, Llama3Scaling, RopeSpec


def rope_table(rope: RopeSpec, max_positions: int) -> Tensor:
    """fp32 [max_positions, rotary_dim]: for each position the cosines, then the sines, of rotary_dim / 2 angles."""
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), rope_frequencies(rope))
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rope_frequencies(rope: RopeSpec) -> Tensor:
    """fp32 [rotary_dim / 2], radians a position, after scaling."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case FrequencyDivisors(divisors):
            return frequencies / torch.tensor(divisors)
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1 (Meta's reference code): long wavelengths are stretched, short ones kept, a ramp between."""
    turns = scaling.original_max_position * frequencies / (2 * math.pi)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)

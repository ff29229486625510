"""Rotary position embedding: the table of cosines and sines."""

import math

import torch
from torch import Tensor

from radixserve.engine.rope_spec import (
    DynamicScaling,
    FrequencyDivisors,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)


def rope_table(rope: RopeSpec | None, max_positions: int) -> Tensor:
    """fp32 [max_positions, rotary_dim]: for each position the cosines, then the sines, of rotary_dim / 2 angles.
    Without ``rope`` one angle, always 0. Where the scaling depends on the context length, that is ``max_positions``:
    tokens in the cache keep their angles however long a sequence grows."""
    device = torch.get_default_device()
    with torch.device("cpu"):  # on "meta", arange loads a package for symbolic algebra, which takes a second
        frequencies = torch.zeros(1) if rope is None else rope_frequencies(rope, max_positions)
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        table = torch.cat((angles.cos(), angles.sin()), dim=-1) * (_attention_factor(rope.scaling) if rope else 1.0)
    return table.to(device)


def rope_frequencies(rope: RopeSpec, max_positions: int) -> Tensor:
    """fp32 [rotary_dim / 2], radians a position, after scaling; rounded as in transformers, whose every last bit counts
    at distant positions."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / rope.rotary_dim
    periods = rope.theta**exponents
    frequencies = 1.0 / periods
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case FrequencyDivisors(divisors):
            return frequencies / torch.tensor(divisors)
        case Llama3Scaling():
            return _llama3(frequencies, rope.scaling)
        case YarnScaling():
            return _yarn(periods, rope, rope.scaling)
        case LongRopeScaling(short, long, original):
            return 1.0 / (torch.tensor(long if max_positions > original else short) * periods)
        case DynamicScaling(factor, original):
            # The base is raised so that the lowest frequency is divided by the stretch.
            stretch = factor * max(max_positions, original) / original - (factor - 1)
            raised: float = rope.theta * stretch ** (rope.rotary_dim / (rope.rotary_dim - 2))
            return 1.0 / raised**exponents


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Llama 3.1 (Meta's reference code): long wavelengths are stretched, short ones kept, a ramp between."""
    turns = scaling.original_max_position / (2 * math.pi / frequencies)  # in the original context
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1.0 - kept) * frequencies / scaling.factor + kept * frequencies


def _yarn(periods: Tensor, rope: RopeSpec, scaling: YarnScaling) -> Tensor:
    """YaRN (Peng et al. 2023), with the ramp over the frequencies' numbers as its authors' code has it."""

    def index_of(turns: float) -> float:
        """Of the frequency that makes so many turns in the original context."""
        wavelength = scaling.original_max_position / (turns * 2 * math.pi)
        return rope.rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    first, last = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rope.rotary_dim - 1)
    width = last - first if last != first else 0.001
    kept = 1.0 - ((torch.arange(rope.rotary_dim // 2) - first) / width).clamp(0.0, 1.0)
    return 1.0 / (scaling.factor * periods) * (1.0 - kept) + 1.0 / periods * kept


def _attention_factor(scaling: RopeScaling | None) -> float:
    """By what queries and keys are multiplied, each."""
    match scaling:
        case YarnScaling(attention_factor=float(given)) | LongRopeScaling(attention_factor=float(given)):
            return given
        case YarnScaling(factor):
            return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
        case LongRopeScaling(original_max_position=original, stretch=stretch):
            return math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1.0 else 1.0
    return 1.0

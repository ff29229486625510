"""Reads ``quantization_config`` of a checkpoint: how its matrices are stored. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from radixserve.engine.config_reader import ConfigReader
from radixserve.engine.errors import ModelError

_REMEDY = "use a checkpoint of the model that is not quantized, in fp8 (e4m3), in AWQ or GPTQ of 4 bits, or a GGUF file"


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """What the tensors of a quantized matrix mean. ``block``: rows and columns that share a scale of fp8, where not all
    or each row do. ``group``: columns that share a scale of 4 bits; None: all. ``zero_offset``: added to zero points as
    they are stored (GPTQ stores them less 1)."""

    layout: Literal["fp8", "awq", "gptq", "packed"]
    block: tuple[int, int] | None = None
    group: int | None = None
    zero_offset: int = 0

    @property
    def description(self) -> str:
        """For people."""
        if self.layout == "fp8":
            return "fp8" if self.block is None else f"fp8 in blocks of {self.block[0]} x {self.block[1]}"
        name = {"awq": "AWQ", "gptq": "GPTQ", "packed": "compressed-tensors"}[self.layout]
        return f"int4 ({name}{'' if self.group is None else f', groups of {self.group}'})"


def read_quantization(config: ConfigReader) -> StoredQuantization | None:
    """None for a checkpoint that is not quantized. Raises ``ModelError`` naming what is not supported."""
    section = config.section("quantization_config") or config.section("compression_config")
    if section is None:
        return None
    match section.values.get("quant_method"):
        case "fp8":
            _require(section, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
            return StoredQuantization("fp8", block=_block(section, "weight_block_size"))
        case "awq":
            _require(section, "bits", (4,))
            _require(section, "version", ("gemm",), "gemm")
            return StoredQuantization("awq", group=_group(section))
        case "gptq":
            return _gptq(section)
        case "compressed-tensors":
            return _compressed(section)
        case method:
            raise ModelError(f"{section.source}: quantization {method!r} is not supported; {_REMEDY}")


def _gptq(section: ConfigReader) -> StoredQuantization:
    _require(section, "bits", (4,))
    _require(section, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    dynamic = section.section("dynamic")
    for rule in dynamic.values.values() if dynamic else ():
        if isinstance(rule, Mapping) and rule.get("bits", 4) != 4:
            raise _refused(section, "dynamic bits", rule["bits"])
    is_v2 = section.values.get("checkpoint_format") == "gptq_v2"
    return StoredQuantization("gptq", group=_group(section), zero_offset=0 if is_v2 else 1)


def _compressed(section: ConfigReader) -> StoredQuantization:
    if (sparsity := section.section("sparsity_config")) and sparsity.values.get("format", "dense") != "dense":
        raise _refused(section, "sparsity_config", sparsity.values.get("format"))
    groups = section.section("config_groups")
    named = groups.values.items() if groups else ()
    found = {_compressed_group(group, f"{section.source}, {name}") for name, group in named} - {None}
    if len(found) != 1:
        raise _refused(section, "config_groups", f"with {len(found)} kinds of weights")
    quantization = found.pop()
    assert quantization is not None
    if quantization.layout == "packed":
        _require(section, "format", ("pack-quantized",), "pack-quantized")
    return quantization


def _compressed_group(group: Any, source: str) -> StoredQuantization | None:
    weights = ConfigReader(group, source).section("weights") if isinstance(group, Mapping) else None
    if weights is None:
        return None
    match weights.values.get("type", "int"), weights.values.get("num_bits", 8):
        case "float", 8:
            _require(weights, "strategy", ("tensor", "channel", "block"), "tensor")
            return StoredQuantization("fp8", block=_block(weights, "block_structure"))
        case "int", 4:
            _require(weights, "strategy", ("channel", "group"), "group")
            return StoredQuantization("packed", group=_group(weights))
        case kind, bits:
            raise _refused(weights, "weights", f"{kind} of {bits} bits")


def _block(section: ConfigReader, key: str) -> tuple[int, int] | None:
    sizes = section.items(key, int)
    if sizes is None:
        return None
    if len(sizes) != 2 or min(sizes) <= 0:
        raise _refused(section, key, sizes)
    return sizes[0], sizes[1]


def _group(section: ConfigReader) -> int | None:
    """AWQ calls it ``q_group_size`` at times; -1 is a whole row."""
    size = section.optional_integer("group_size") or section.optional_integer("q_group_size")
    return size if size and size > 0 else None


def _require(section: ConfigReader, key: str, supported: tuple[Any, ...], default: Any = None) -> None:
    value = section.values.get(key, default)
    if (value.lower() if isinstance(value, str) else value) not in supported:
        raise _refused(section, key, value)


def _refused(section: ConfigReader, key: str, value: Any) -> ModelError:
    return ModelError(f"{section.source}: {key} {value!r} is not supported; {_REMEDY}")

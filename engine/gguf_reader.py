"""Reads the header of a GGUF file: metadata and the table of tensors, without touching tensor data. No torch.

The gguf package's own reader wraps every array element in an object and takes seconds on a vocabulary; this one walks
the bytes once (a 49k-token vocabulary: tens of milliseconds). Layout: the GGUF specification, versions 2 and 3.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from radixserve.engine.errors import ModelError

MAGIC = b"GGUF"
_DEFAULT_ALIGNMENT = 32
_UINT32, _BOOL, _STRING, _ARRAY, _UINT64 = 4, 7, 8, 9, 10
# GGUF value type -> numpy type of a scalar.
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_MAX_DIMENSIONS = 8


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies. ``shape``: outermost dimension first, in elements (torch order); ``offset``: bytes from
    the start of the file."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A parsed header. ``metadata``: numbers, strings, bools, lists of strings, numpy arrays of numbers."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor, mapped read-only from the file: [num_bytes] uint8."""
        tensor = self.tensors[name]
        mapped = np.memmap(self.path, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,))
        return mapped.view(np.ndarray)  # numpy works on the other type for longer than on small arrays themselves


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of ``path``. Raises ``ModelError`` if it is no GGUF file, is damaged, or ends too early."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
    except (struct.error, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"{path} is not a usable GGUF file (damaged, cut off, or empty): {error}") from error


def _parse(path: Path, data: mmap.mmap) -> GGUFFile:
    if data[:4] != MAGIC:
        raise ModelError(f"{path} is not a GGUF file")
    cursor = _Cursor(data, len(MAGIC))
    version, num_tensors, num_fields = cursor.number(_UINT32), cursor.number(_UINT64), cursor.number(_UINT64)
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported (supported: 2, 3, little-endian)")
    metadata: dict[str, Any] = {}
    for _ in range(num_fields):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number(_UINT32))
    if metadata.get("split.count", 0) > 1:
        raise ModelError(f"{path} is one part of a split GGUF; join the parts with llama-gguf-split --merge")
    table = [cursor.tensor() for _ in range(num_tensors)]
    alignment = int(metadata.get("general.alignment", _DEFAULT_ALIGNMENT))
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: GGUFTensor(name, shape, kind, start + at, size) for name, shape, kind, at, size in table}
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=start)
    if end > len(data):
        raise ModelError(f"{path} is truncated: {len(data)} bytes of at least {end}; download it again")
    return GGUFFile(path, metadata, tensors)


class _Cursor:
    """A position in the header; each method reads one thing and moves past it."""

    def __init__(self, data: mmap.mmap, position: int):
        self.data = data
        self.position = position

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return bool(self.number(kind)) if kind == _BOOL else self.number(kind)
        kind, count = self.number(_UINT32), self.number(_UINT64)
        return self.strings(count) if kind == _STRING else self.numbers(kind, count)

    def number(self, kind: int) -> Any:
        return self.numbers(kind, 1)[0].item()

    def numbers(self, kind: int, count: int) -> NDArray[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"unknown value type {kind}")
        # Copied, since the mapping is closed.
        found = np.frombuffer(self.data, _SCALARS[kind], count, self.position).copy()
        self.position += found.nbytes
        return found

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Written for speed: vocabularies and merges are ~10^5 strings."""
        data, position, read_length = self.data, self.position, struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + read_length(data, position)[0]
            found.append(data[start:position].decode("utf-8", "replace"))
        self.position = position
        return found

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
        """A row of the table: as in ``GGUFTensor``, but the offset counts from the start of the data."""
        name, num_dimensions = self.string(), self.number(_UINT32)
        if num_dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self.numbers(_UINT64, num_dimensions)[::-1].tolist())
        quantization = GGMLQuantizationType(self.number(_UINT32))
        block_elements, block_bytes = GGML_QUANT_SIZES[quantization]
        return name, shape, quantization, self.number(_UINT64), math.prod(shape) // block_elements * block_bytes

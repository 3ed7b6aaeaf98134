"""Reads the header of a GGUF file: metadata and where each tensor lies. Knows the container only: no model family, no tensor values.

`gguf.GGUFReader` makes several numpy views for each string, 3 s for a vocabulary of 49k tokens; this takes 0.1 s, and checks every length
against the file, so that a truncated or corrupt file is an error and never a crash or a hang.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

Scalar = bool | int | float | str
Value = Scalar | list[bool] | list[int] | list[float] | list[str]

_MAX_ENTRIES = 1 << 20  # metadata entries and tensors; far above any real file
_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


class GGUFError(ValueError):
    """What is wrong with a GGUF file, in one line without the file's name."""


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor of the file. `shape` is in torch order (GGUF's own reversed): [out, in] for a matrix."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata by key, and tensors by name, both in file order."""

    metadata: dict[str, Value]
    tensors: dict[str, TensorPlace]


def read_header(path: Path) -> GGUFHeader:
    """Return the header of `path`, having checked that all of the tensor data is there. Raises GGUFError, OSError."""
    with path.open("rb") as file:
        if file.seek(0, 2) < 24:
            raise GGUFError("too short for a GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data).header()


class _Cursor:
    """Walks over the mapped file; every read is bounded by its length."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GGUFHeader:
        if self._take(4) != b"GGUF":
            raise GGUFError("not a GGUF file")
        version = self._u32()
        if version not in (2, 3):
            raise GGUFError(f"GGUF version {version} is not supported (only little-endian 2 and 3)")
        tensor_count, entry_count = self._u64(), self._u64()
        if max(tensor_count, entry_count) > _MAX_ENTRIES:
            raise GGUFError("corrupt header: too many entries")
        metadata: dict[str, Value] = {}
        for _ in range(entry_count):
            key = self._text()
            metadata[key] = self._value(self._u32())
        raw = [self._tensor() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise GGUFError("corrupt header: bad alignment")
        start = -(-self._at // alignment) * alignment
        return GGUFHeader(metadata, {name: self._placed(name, kind, dims, start + offset) for name, kind, dims, offset in raw})

    def _placed(self, name: str, kind_number: int, dims: tuple[int, ...], offset: int) -> TensorPlace:
        try:
            kind = GGMLQuantizationType(kind_number)
            block_elements, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise GGUFError(f"tensor {name[:80]!r} has the unknown type {kind_number}") from None
        size = prod(dims) // block_elements * block_bytes
        if offset + size > self._size:
            raise GGUFError(f"truncated: tensor {name[:80]!r} ends at byte {offset + size} of {self._size}")
        return TensorPlace(name, kind, tuple(reversed(dims)), offset, size)

    def _tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, rank = self._text(), self._u32()
        if rank > 8:
            raise GGUFError(f"corrupt header: tensor {name[:80]!r} has {rank} dimensions")
        dims = struct.unpack(f"<{rank}Q", self._take(8 * rank))
        return name, self._u32(), dims, self._u64()

    def _value(self, kind_number: int) -> Value:
        if kind_number == GGUFValueType.STRING:
            return self._text()
        if kind_number == GGUFValueType.ARRAY:
            return self._array(self._u32(), self._u64())
        value: Scalar = self._numbers(kind_number, 1)[0]
        return value

    def _array(self, kind_number: int, count: int) -> Value:
        if kind_number != GGUFValueType.STRING:
            numbers: list[int] = self._numbers(kind_number, count)
            return numbers
        if count * 8 > self._size - self._at:
            raise GGUFError("truncated or corrupt header")
        return [self._text() for _ in range(count)]

    def _numbers(self, kind_number: int, count: int) -> list[int]:
        """Numbers as Python values; floats and booleans too, which the callers' types allow for."""
        try:
            dtype = np.dtype(_SCALARS[GGUFValueType(kind_number)])
        except (ValueError, KeyError):
            raise GGUFError(f"corrupt header: value type {kind_number}") from None
        values: list[int] = np.frombuffer(self._take(dtype.itemsize * count), dtype).tolist()
        return values

    def _text(self) -> str:
        try:
            return self._take(self._u64()).decode()
        except UnicodeDecodeError:
            raise GGUFError("corrupt header: a string is not UTF-8") from None

    def _u32(self) -> int:
        return int.from_bytes(self._take(4), "little")

    def _u64(self) -> int:
        return int.from_bytes(self._take(8), "little")

    def _take(self, count: int) -> bytes:
        end = self._at + count
        if end > self._size:
            raise GGUFError("truncated or corrupt header")
        taken = self._data[self._at : end]
        self._at = end
        return taken

"""GGUF files: metadata and the tensor directory, read by a strict and bounded parser; no tensor data.

Owns: `ModelFile`. Runs in: front ends (vocabulary, template, limits) and the worker (hyper-parameters,
where each tensor lies). Source: the GGUF specification in ggml (docs/gguf.md), versions 2 and 3,
little endian.

A model file comes from strangers, so nothing in it is believed: every count, length and offset is
checked against the bytes that are really there and against fixed limits before anything is
allocated. Whatever is wrong ends in one `ModelFileError` that names the file and the fault.
"""

import hashlib
import math
import mmap
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from ds4.errors import ModelFileError
from ds4.ggml_types import BLOCK_SIZES, GgmlType

__all__ = ["BLOCK_SIZES", "GgmlType", "ModelFile", "TensorInfo"]

MAX_KEYS: Final = 1 << 16
MAX_TENSORS: Final = 1 << 16
MAX_KEY_BYTES: Final = (1 << 16) - 1  # the specification's own limit
MAX_TENSOR_NAME_BYTES: Final = 255
MAX_STRING_BYTES: Final = 1 << 26
MAX_ARRAY_ITEMS: Final = 1 << 24
MAX_TOTAL_ITEMS: Final = 1 << 25  # of all arrays together: bounds what a hostile file makes us hold
MAX_DIMENSIONS: Final = 4
MAX_ALIGNMENT: Final = 1 << 16
DEFAULT_ALIGNMENT: Final = 32


_STRING: Final = 8
_BOOL: Final = 7
_ARRAY: Final = 9
# Value type to (struct code, NumPy dtype); string and array have their own readers.
_SCALARS: Final[Mapping[int, tuple[struct.Struct, str]]] = MappingProxyType(
    {
        0: (struct.Struct("<B"), "<u1"),
        1: (struct.Struct("<b"), "<i1"),
        2: (struct.Struct("<H"), "<u2"),
        3: (struct.Struct("<h"), "<i2"),
        4: (struct.Struct("<I"), "<u4"),
        5: (struct.Struct("<i"), "<i4"),
        6: (struct.Struct("<f"), "<f4"),
        7: (struct.Struct("<B"), "<u1"),
        10: (struct.Struct("<Q"), "<u8"),
        11: (struct.Struct("<q"), "<i8"),
        12: (struct.Struct("<d"), "<f8"),
    }
)
_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_SPLIT_NAME: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_TOKENIZER_PREFIX: Final = "tokenizer.ggml."

_Required = object()
_Value = TypeVar("_Value")


class TensorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor lies. `shape` is row-major, outputs first; `offset` counts from the file's start."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int
    num_bytes: int


class _FaultError(Exception):
    """What is wrong, without the path; becomes a ModelFileError at `ModelFile.open`."""


class _Reader:
    """A cursor over the mapped file that never reads past its end. Used once, by `_parse`."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.size = len(data)
        self.position = 0
        self.num_items = 0

    def need(self, num_bytes: int, what: str) -> int:
        """Position of the next `num_bytes`, which are then consumed."""
        start = self.position
        if num_bytes > self.size - start:
            raise _FaultError(
                f"truncated: {what} needs {num_bytes} bytes at offset {start}, but the file has {self.size}"
            )
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.data, self.need(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.data, self.need(8, what))[0]
        return value

    def string(self, what: str, limit: int) -> str:
        length = self.u64(what)
        if length > limit:
            raise _FaultError(f"{what} is {length} bytes long; the limit is {limit}")
        start = self.need(length, what)
        try:
            return str(self.data[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise _FaultError(f"{what} is not valid UTF-8") from None

    def value(self, value_type: int, what: str) -> Any:
        if value_type == _STRING:
            return self.string(what, MAX_STRING_BYTES)
        if value_type == _ARRAY:
            return self.array(what)
        scalar = _SCALARS.get(value_type)
        if scalar is None:
            raise _FaultError(f"{what} has the unknown value type {value_type}")
        value = scalar[0].unpack_from(self.data, self.need(scalar[0].size, what))[0]
        if value_type == _BOOL:
            if value > 1:
                raise _FaultError(f"{what} is a truth value of {value}")
            return bool(value)
        return value

    def array(self, what: str) -> list[Any]:
        item_type = self.u32(what)
        length = self.u64(what)
        self.num_items += length
        if length > MAX_ARRAY_ITEMS or self.num_items > MAX_TOTAL_ITEMS:
            raise _FaultError(
                f"{what} has {length} items; the limit is {MAX_ARRAY_ITEMS} ({MAX_TOTAL_ITEMS} in all)"
            )
        if item_type == _STRING:
            return self.strings(length, what)
        scalar = _SCALARS.get(item_type)
        if scalar is None:
            kind = "arrays" if item_type == _ARRAY else f"the unknown value type {item_type}"
            raise _FaultError(f"{what} is an array of {kind}, which is not supported")
        start = self.need(length * scalar[0].size, what)
        items = np.frombuffer(self.data[start : self.position], scalar[1])
        if item_type == _BOOL:
            if length and int(items.max()) > 1:
                raise _FaultError(f"{what} holds a truth value other than 0 and 1")
            return [bool(item) for item in items.tolist()]
        values: list[Any] = items.tolist()
        return values

    def strings(self, length: int, what: str) -> list[str]:
        """The hot loop: a vocabulary has hundreds of thousands of these."""
        if length * 8 > self.size - self.position:
            raise _FaultError(f"truncated: {what} claims {length} strings at offset {self.position}")
        data, size, position = self.data, self.size, self.position
        unpack = _U64.unpack_from
        values: list[str] = []
        append = values.append
        try:
            for _ in range(length):
                (num_bytes,) = unpack(data, position)
                position += 8
                end = position + num_bytes
                if end > size:
                    raise _FaultError(
                        f"truncated: item {len(values)} of {what} at offset {position} passes the end"
                    )
                append(str(data[position:end], "utf-8"))
                position = end
        except struct.error:
            raise _FaultError(f"truncated: item {len(values)} of {what} at offset {position}") from None
        except UnicodeDecodeError:
            raise _FaultError(f"item {len(values)} of {what} is not valid UTF-8") from None
        self.position = position
        return values


class _Contents(msgspec.Struct, frozen=True):
    """What `_parse` finds."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    tokenizer_hash: str


def _read_metadata(reader: _Reader, num_keys: int) -> tuple[dict[str, Any], str]:
    """All keys, and the digest of those that decide which id means which text."""
    metadata: dict[str, Any] = {}
    tokenizer_parts: dict[str, bytes] = {}
    for index in range(num_keys):
        key = reader.string(f"key {index}", MAX_KEY_BYTES)
        if not key:
            raise _FaultError(f"key {index} has no name")
        if key in metadata:
            raise _FaultError(f"the key {key!r} appears twice")
        start = reader.position
        metadata[key] = reader.value(reader.u32(f"type of {key!r}"), f"value of {key!r}")
        if key.startswith(_TOKENIZER_PREFIX):
            tokenizer_parts[key] = reader.data[start : reader.position]
    digest = hashlib.sha256()
    for key in sorted(tokenizer_parts):
        for part in (key.encode(), tokenizer_parts[key]):
            digest.update(_U64.pack(len(part)))
            digest.update(part)
    return metadata, digest.hexdigest()


def _read_tensor(reader: _Reader, index: int) -> TensorInfo:
    """One entry of the directory; its offset still counts from the start of the data section."""
    name = reader.string(f"name of tensor {index}", MAX_TENSOR_NAME_BYTES)
    num_dimensions = reader.u32(f"tensor {name!r}")
    if not 1 <= num_dimensions <= MAX_DIMENSIONS:
        raise _FaultError(
            f"tensor {name!r} has {num_dimensions} dimensions; 1 to {MAX_DIMENSIONS} are possible"
        )
    sizes = [reader.u64(f"shape of tensor {name!r}") for _ in range(num_dimensions)]
    raw_type = reader.u32(f"type of tensor {name!r}")
    offset = reader.u64(f"offset of tensor {name!r}")
    try:
        ggml_type = GgmlType(raw_type)
    except ValueError:
        raise _FaultError(f"tensor {name!r} has the unknown type {raw_type}") from None
    block_values, block_bytes = BLOCK_SIZES[ggml_type]
    if 0 in sizes:
        raise _FaultError(f"tensor {name!r} has an empty dimension in its shape {sizes[::-1]}")
    if sizes[0] % block_values:
        raise _FaultError(
            f"tensor {name!r} has rows of {sizes[0]} values; {ggml_type.name} needs a multiple of {block_values}"
        )
    return TensorInfo(
        name=name,
        shape=tuple(reversed(sizes)),
        ggml_type=int(ggml_type),
        offset=offset,
        num_bytes=math.prod(sizes) // block_values * block_bytes,
    )


def _read_tensors(reader: _Reader, num_tensors: int, metadata: Mapping[str, Any]) -> dict[str, TensorInfo]:
    """The directory, with absolute offsets, all tensors inside the file and apart from each other."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if (
        not isinstance(alignment, int)
        or isinstance(alignment, bool)
        or not 1 <= alignment <= MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        raise _FaultError(
            f"general.alignment is {alignment!r}; it must be a power of two up to {MAX_ALIGNMENT}"
        )
    relative = [_read_tensor(reader, index) for index in range(num_tensors)]
    data_start = -(-reader.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    for tensor in relative:
        if tensor.name in tensors:
            raise _FaultError(f"tensor {tensor.name!r} appears twice")
        if tensor.offset % alignment:
            raise _FaultError(
                f"tensor {tensor.name!r} at offset {tensor.offset} is not aligned to {alignment}"
            )
        start = data_start + tensor.offset
        if start + tensor.num_bytes > reader.size:
            raise _FaultError(
                f"truncated: tensor {tensor.name!r} ends at byte {start + tensor.num_bytes}, "
                f"but the file has {reader.size}; was the download complete?"
            )
        tensors[tensor.name] = msgspec.structs.replace(tensor, offset=start)
    end, before = 0, ""
    for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            raise _FaultError(f"the tensors {before!r} and {tensor.name!r} overlap")
        end, before = tensor.offset + tensor.num_bytes, tensor.name
    return tensors


def _parse(reader: _Reader) -> _Contents:
    magic = reader.data[: reader.need(4, "magic") + 4]
    if magic != b"GGUF":
        raise _FaultError(f"not a GGUF file: it begins with {magic!r}")
    version = reader.u32("version")
    if version and version & 0xFFFF == 0:
        raise _FaultError("a big-endian GGUF file; convert the model for this machine")
    if version not in (2, 3):
        raise _FaultError(f"GGUF version {version} is not supported; versions 2 and 3 are")
    num_tensors, num_keys = reader.u64("number of tensors"), reader.u64("number of keys")
    if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
        raise _FaultError(
            f"{num_tensors} tensors and {num_keys} keys; the limits are {MAX_TENSORS} and {MAX_KEYS}"
        )
    metadata, tokenizer_hash = _read_metadata(reader, num_keys)
    split_count = metadata.get("split.count", 1)
    if split_count not in (0, 1):
        raise _FaultError(
            f"one part of a model split into {split_count!r} files; merge them (gguf-split --merge)"
        )
    return _Contents(metadata, _read_tensors(reader, num_tensors, metadata), tokenizer_hash)


def _load(path: Path) -> _Contents:
    try:
        if not (path.is_file() or path.is_dir()) and path.exists():
            raise _FaultError("not a regular file")  # opening a FIFO would wait for ever
        # mmap: a model is far larger than its metadata, and only the pages that are read are loaded.
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(_Reader(data))
    except FileNotFoundError:
        raise ModelFileError("no such file", path=str(path)) from None
    except IsADirectoryError:
        raise ModelFileError("is a directory, not a GGUF file", path=str(path)) from None
    except OSError as error:
        raise ModelFileError(f"cannot be read: {error.strerror or error}", path=str(path)) from None
    except ValueError as error:  # mmap's word for an empty file, or a path with a null byte
        reason = "is empty" if "empty" in str(error) else str(error)
        raise ModelFileError(reason, path=str(path)) from None
    except _FaultError as fault:
        raise ModelFileError(str(fault), path=str(path)) from None


class ModelFile:
    """One opened GGUF file. Immutable; holds no file handle and no mapping."""

    def __init__(
        self, path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, TensorInfo], tokenizer_hash: str
    ) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        # SHA-256 of the `tokenizer.ggml.*` keys: equal hashes give equal ids for equal text.
        self.tokenizer_hash = tokenizer_hash
        self.architecture = self.get_str("general.architecture")

    @classmethod
    def open(cls, path: Path) -> "ModelFile":
        """Read and check `path`. Raises ModelFileError naming the file and what is wrong with it."""
        split = _SPLIT_NAME.search(path.name)
        if split and int(split.group(2)) > 1:
            raise ModelFileError(
                f"one of {int(split.group(2))} parts of a split model; merge them (gguf-split --merge)",
                path=str(path),
            )
        contents = _load(path)
        return cls(
            path,
            MappingProxyType(contents.metadata),
            MappingProxyType(contents.tensors),
            contents.tokenizer_hash,
        )

    def fault(self, message: str) -> ModelFileError:
        """An error about this file, to be raised by whoever found it."""
        return ModelFileError(message, path=str(self.path))

    def key(self, suffix: str) -> str:
        """A hyper-parameter's key: the architecture's prefix before `suffix`."""
        return f"{self.architecture}.{suffix}"

    def _get(self, key: str, kind: type[_Value], default: Any) -> Any:
        value = self.metadata.get(key)
        if value is None:
            if default is _Required:
                raise self.fault(f"the key {key!r} is missing")
            return default
        if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            raise self.fault(f"the key {key!r} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def get_int(self, key: str, default: Any = _Required, *, low: int = 0, high: int = 1 << 32) -> int:
        """A whole number within [low, high]. Without `default` the key must exist."""
        value: int = self._get(key, int, default)
        if value is not default and not low <= value <= high:
            raise self.fault(f"the key {key!r} is {value}; it must be between {low} and {high}")
        return value

    def get_float(self, key: str, default: Any = _Required) -> float:
        """A finite number. Without `default` the key must exist."""
        if isinstance(self.metadata.get(key), int):
            return float(self.get_int(key, low=-(1 << 32)))
        value: float = self._get(key, float, default)
        if value is not default and not math.isfinite(value):
            raise self.fault(f"the key {key!r} is {value}")
        return value

    def get_str(self, key: str, default: Any = _Required) -> str:
        """A text. Without `default` the key must exist."""
        value: str = self._get(key, str, default)
        return value

    def get_bool(self, key: str, default: Any = _Required) -> bool:
        """A truth value. Without `default` the key must exist."""
        value: bool = self._get(key, bool, default)
        return value

    def get_list(self, key: str, kind: type[_Value], default: Any = _Required) -> list[_Value]:
        """An array whose items are all of `kind` (int, float, str or bool). Not to be changed."""
        value: list[_Value] = self._get(key, list, default)
        # Arrays have one item type, so the first item speaks for all.
        if value is not default and value and type(value[0]) is not kind:
            raise self.fault(f"the key {key!r} holds {type(value[0]).__name__} items, not {kind.__name__}")
        return value

    @property
    def name(self) -> str:
        """What the model calls itself, else the file's name."""
        return self.get_str("general.name", "") or self.path.stem

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        if "tokenizer.ggml.tokens" in self.metadata:
            return len(self.get_list("tokenizer.ggml.tokens", str))
        return self.get_int(self.key("vocab_size"), low=1)

    @property
    def max_context_tokens(self) -> int:
        """The context the model was trained for."""
        return self.get_int(self.key("context_length"), low=1)

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template."""
        template: str | None = self._get("tokenizer.chat_template", str, None)
        return template

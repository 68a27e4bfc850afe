"""GGUF files from pieces, right or wrong, and real files cut into such pieces.

Runs in: tests of what reads model files. Source: the GGUF specification in ggml (docs/gguf.md).
"""

import struct
from typing import Final

import msgspec

UINT32: Final = 4
FLOAT32: Final = 6
BOOL: Final = 7
STRING: Final = 8
ARRAY: Final = 9
FIXED_BYTES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT: Final = 32


def text(value: str) -> bytes:
    """A string with its length before it."""
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, value_type: int, value: bytes) -> bytes:
    """One entry of the metadata."""
    return text(key) + struct.pack("<I", value_type) + value


def tensor(name: str, sizes: list[int], ggml_type: int, offset: int) -> bytes:
    """One entry of the directory; `sizes` with the rows' length first."""
    shape = b"".join(struct.pack("<Q", size) for size in sizes)
    return text(name) + struct.pack("<I", len(sizes)) + shape + struct.pack("<IQ", ggml_type, offset)


LLAMA: Final = pair("general.architecture", STRING, text("llama"))


def gguf_bytes(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_pairs: int | None = None,
    num_tensors: int | None = None,
    data: int | bytes = 0,
) -> bytes:
    """A file with the given parts; `data`, or so many zeros, after the aligned directory."""
    pairs = [LLAMA] if pairs is None else pairs
    tensors = tensors or []
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % _ALIGNMENT) + bytes(data)


class TensorPiece(msgspec.Struct):
    """One entry of the directory, as it stands in the file."""

    name: str
    sizes: list[int]
    ggml_type: int
    offset: int


class Pieces(msgspec.Struct):
    """A file to change and to put together again. `pairs`: key to value type and raw value; `sound`: as
    they were at first.
    """

    pairs: dict[str, tuple[int, bytes]]
    sound: dict[str, tuple[int, bytes]]
    tensors: list[TensorPiece]
    data: bytes


class _Cursor:
    """Reads a file that is known to be right."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0

    def take(self, num_bytes: int) -> bytes:
        self.position += num_bytes
        return self.content[self.position - num_bytes : self.position]

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self) -> str:
        return self.take(self.number(8)).decode()

    def skip_value(self, value_type: int) -> None:
        if value_type == STRING:
            self.take(self.number(8))
        elif value_type == ARRAY:
            item_type, length = self.number(4), self.number(8)
            for _ in range(length):
                self.skip_value(item_type)
        else:
            self.take(FIXED_BYTES[value_type])


def cut(content: bytes) -> Pieces:
    """The pieces of a sound file with the usual alignment."""
    cursor = _Cursor(content)
    cursor.take(8)
    num_tensors, num_pairs = cursor.number(8), cursor.number(8)
    pairs = {}
    for _ in range(num_pairs):
        key, value_type = cursor.text(), cursor.number(4)
        start = cursor.position
        cursor.skip_value(value_type)
        pairs[key] = value_type, content[start : cursor.position]
    tensors = []
    for _ in range(num_tensors):
        name = cursor.text()
        sizes = [cursor.number(8) for _ in range(cursor.number(4))]
        tensors.append(TensorPiece(name, sizes, cursor.number(4), cursor.number(8)))
    cursor.take(-cursor.position % _ALIGNMENT)
    return Pieces(pairs, dict(pairs), tensors, content[cursor.position :])

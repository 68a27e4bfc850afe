"""A request on its way to the worker: parameters and prompt, in its slot or in a file of its own.

Owns: the descriptor format. Runs in: front ends (write), worker (read). Source: ours.

The front end writes a descriptor only between claiming the slot and moving the command tail past its
SUBMIT. The worker copies it out, then checks it: the other side cannot change what is being parsed.
Payload: parameters, zero bytes up to a multiple of four, then the prompt as little-endian u32.
"""

import errno
import os
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ds4.errors import RequestError, RingError, RingFullError, RingUnavailableError
from ds4.ring import layout
from ds4.ring.directory import prompt_path
from ds4.ring.segment import Segment


class DescriptorError(RingError):
    """A descriptor is not what its SUBMIT command promised."""


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 4) * 4


def write_descriptor(
    directory: Path,
    segment: Segment,
    index: int,
    slot: int,
    request_id: int,
    params: bytes,
    prompt: NDArray[np.uint32],
) -> None:
    """Put a request where the worker will look for it. `prompt` [num_tokens] uint32.

    Raises RequestError when it is beyond any limit, RingFullError when the shared directory is full,
    RingUnavailableError when the worker has just taken the prompt folder away.
    """
    if len(params) > layout.MAX_PARAMS_BYTES:
        raise RequestError(
            f"the request's parameters take {len(params)} bytes, {layout.MAX_PARAMS_BYTES} are allowed"
        )
    if prompt.ndim != 1 or len(prompt) > layout.MAX_PROMPT_TOKENS:
        raise RequestError(f"the prompt has more than {layout.MAX_PROMPT_TOKENS} tokens")
    tokens = np.ascontiguousarray(prompt, dtype="<u4").tobytes()
    padding = bytes(_padded(len(params)) - len(params))
    checksum = zlib.crc32(tokens, zlib.crc32(padding, zlib.crc32(params)))
    size = len(params) + len(padding) + len(tokens)
    start = segment.offsets.descriptors + slot * segment.shape.descriptor_bytes
    if size <= segment.shape.descriptor_bytes - layout.DESCRIPTOR_HEAD_BYTES:
        kind = layout.KIND_INLINE
        at = start + layout.DESCRIPTOR_HEAD_BYTES
        segment.map[at : at + size] = b"".join((params, padding, tokens))
    else:
        kind = layout.KIND_FILE
        _write_file(prompt_path(directory, index, request_id), (params, padding, tokens), size)
    words, at = segment.words, start // 8
    words[at + layout.DESCRIPTOR_REQUEST_ID] = request_id
    words[at + layout.DESCRIPTOR_PARAMS_BYTES] = len(params)
    words[at + layout.DESCRIPTOR_PROMPT_TOKENS] = len(prompt)
    words[at + layout.DESCRIPTOR_KIND] = kind
    words[at + layout.DESCRIPTOR_CHECKSUM] = checksum


def _write_file(path: Path, parts: Iterable[bytes], size: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags, 0o600)
    except FileNotFoundError:
        raise RingUnavailableError("the worker has just left") from None
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RingFullError("the shared directory has no room for the prompt") from None
        raise
    try:
        os.posix_fallocate(descriptor, 0, size)
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RingFullError("the shared directory has no room for the prompt") from None
        raise
    finally:
        os.close(descriptor)


def read_descriptor(
    directory: Path, segment: Segment, index: int, slot: int, request_id: int
) -> tuple[bytes, NDArray[np.uint32]]:
    """Copy a request out, check it, delete its file. Returns parameters and prompt [num_tokens] uint32.

    Raises DescriptorError when anything does not fit together.
    """
    start = segment.offsets.descriptors + slot * segment.shape.descriptor_bytes
    words, at = segment.words, start // 8
    if words[at + layout.DESCRIPTOR_REQUEST_ID] != request_id:
        raise DescriptorError("the descriptor is not this request's")
    params_bytes = words[at + layout.DESCRIPTOR_PARAMS_BYTES]
    num_tokens = words[at + layout.DESCRIPTOR_PROMPT_TOKENS]
    kind = words[at + layout.DESCRIPTOR_KIND]
    checksum = words[at + layout.DESCRIPTOR_CHECKSUM]
    if params_bytes > layout.MAX_PARAMS_BYTES or num_tokens > layout.MAX_PROMPT_TOKENS:
        raise DescriptorError("the request is beyond the limits")
    size = _padded(params_bytes) + 4 * num_tokens
    if kind == layout.KIND_INLINE:
        if size > segment.shape.descriptor_bytes - layout.DESCRIPTOR_HEAD_BYTES:
            raise DescriptorError("the request does not fit its descriptor")
        at = start + layout.DESCRIPTOR_HEAD_BYTES
        raw = segment.map[at : at + size]
    else:
        raw = _read_file(prompt_path(directory, index, request_id), size)
    if zlib.crc32(raw) != checksum:
        raise DescriptorError("the request's checksum does not match")
    return raw[:params_bytes], np.frombuffer(raw, dtype="<u4", offset=_padded(params_bytes))


def _read_file(path: Path, size: int) -> bytes:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise DescriptorError(f"the prompt file cannot be opened ({error.strerror})") from None
    with os.fdopen(descriptor, "rb") as file:
        path.unlink(missing_ok=True)
        if os.fstat(descriptor).st_size != size:
            raise DescriptorError("the prompt file has another length")
        return file.read(size)

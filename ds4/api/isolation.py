"""Who shares cached prompt prefixes: a salt per API key, so that timing tells nobody of another's prompts.

Owns: the file `salt` in the shared directory, a random secret that lives as long as the server. Runs in:
front ends. The salt of a key is its keyed hash, the same at every front end; the worker, which sees no
keys, chains it into the digests of its pages (workers/kvcache/prefix.py).
"""

import contextlib
import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

from ds4.errors import ConfigError
from ds4.ring.directory import unusable_directory

FILE_NAME: Final = "salt"
_SECRET_BYTES: Final = 32
SALT_BYTES: Final = 16


class CacheIsolation:
    """Makes the salts. Owned by the front end's state; `open` once the shared directory exists."""

    def __init__(self, mode: str, *, has_keys: bool) -> None:
        """Raises ConfigError where there is nothing to tell clients apart by."""
        if mode == "key" and not has_keys:
            raise ConfigError(
                "--cache-isolation key needs API keys; give some with --api-key or --api-key-file",
                setting="cache_isolation",
            )
        self._is_on = mode == "key"
        self._secret = b""

    def open(self, directory: Path) -> None:
        """Take the server's secret, made by whichever front end comes first. Raises ConfigError."""
        if self._is_on:
            try:
                self._secret = _shared_secret(directory / FILE_NAME)
            except OSError as error:
                raise unusable_directory(directory, error) from None

    def salt(self, key: bytes) -> bytes:
        """What the prefixes of this key are kept apart by; empty where all share."""
        if not self._is_on:
            return b""
        return hashlib.blake2b(key, key=self._secret, digest_size=SALT_BYTES).digest()


def _shared_secret(path: Path) -> bytes:
    """The secret in `path`. A link appears whole or not at all, and only one wins."""
    mine = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(mine, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(_SECRET_BYTES))
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink(missing_ok=True)
    return path.read_bytes()

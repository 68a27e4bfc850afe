"""Who may ask, and how much: API keys, the tenants they belong to, and the key file's format.

Owns: reading `--api-key` and `--api-key-file`. Runs in: front ends, at start. A key file has a key a line,
with options after it, all of them optional; `#` begins a line that says nothing:

    KEY name=alice weight=2 max_concurrent=8 tokens_per_minute=60000

Keys of one name are one tenant: its old key and its new one, say. A key without a name is a tenant of its
own, named by its digest, so that what is stored stays its own wherever it stands in the file. What goes
wrong is told by the number of the line, for no key may get into a log.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from ds4.config import Settings
from ds4.errors import ConfigError
from ds4.generation import MAX_WEIGHT

_NAME: Final = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_MOST: Final = 1 << 40


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """Whose request it is. `number` 0 is everybody, where there are no keys; a limit of 0 is none."""

    number: int = 0
    name: str = ""
    weight: int = 1
    max_concurrent: int = 0
    tokens_per_minute: int = 0

    @property
    def is_limited(self) -> bool:
        """Whether anything has to be counted."""
        return self.max_concurrent > 0 or self.tokens_per_minute > 0


ANYBODY: Final = Tenant()


def _number(low: int, high: int) -> Callable[[str], int]:
    def parse(raw: str) -> int:
        if not raw.isascii() or not raw.isdigit() or not low <= int(raw) <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return int(raw)

    return parse


def _name(raw: str) -> str:
    if not _NAME.fullmatch(raw):
        raise ValueError("must be 1 to 64 of A-Z a-z 0-9 . _ @ -")
    return raw


_OPTIONS: Final[dict[str, Callable[[str], Any]]] = {
    "name": _name,
    "weight": _number(1, MAX_WEIGHT),
    "max_concurrent": _number(1, _MOST),
    "tokens_per_minute": _number(1, _MOST),
}


def _options(words: list[str], where: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words:
        option, has_value, raw = word.partition("=")
        parse = _OPTIONS.get(option)
        if parse is None or not has_value:
            # Not quoted: it may be the rest of a key.
            raise _fault(
                f"{where}: after the key only these may follow: "
                + ", ".join(f"{known}=..." for known in _OPTIONS)
            )
        if option in options:
            raise _fault(f"{where}: {option} is given twice")
        try:
            options[option] = parse(raw)
        except ValueError as error:
            raise _fault(f"{where}: {option} {error}") from None
    return options


def _fault(message: str) -> ConfigError:
    return ConfigError(f"the key file {message}", setting="api_key_file")


def load_keys(settings: Settings) -> dict[bytes, Tenant]:
    """Every key that is accepted and whose it is; empty: none is needed.

    Raises ConfigError for an unusable file.
    """
    found: dict[str, dict[str, Any]] = {key.strip(): {} for key in settings.api_key.split(",")}
    if settings.api_key_file:
        found |= _read(settings.api_key_file)
    found.pop("", None)
    tenants: dict[str, Tenant] = {}
    keys: dict[bytes, Tenant] = {}
    for key, options in found.items():
        name = options.get("name") or _digest(key)
        tenant = Tenant(number=len(tenants) + 1, **{**options, "name": name})
        first = tenants.setdefault(name, tenant)
        if msgspec.structs.replace(tenant, number=first.number) != first:
            raise _fault(f"{settings.api_key_file} gives two keys of {name} different options")
        keys[key.encode()] = first
    return keys


def _digest(key: str) -> str:
    """A name that nobody can be given."""
    return "#" + hashlib.blake2b(key.encode(), digest_size=16, person=b"ds4-tenant").hexdigest()


def _read(path: str) -> dict[str, dict[str, Any]]:
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise _fault(f"{path} cannot be read: {error}") from None
    found: dict[str, dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        options = _options(words[1:], f"{path}, line {number}")
        if found.setdefault(words[0], options) != options:
            raise _fault(f"{path}, line {number}: the key was given before, with other options")
    if not found:
        raise _fault(f"{path} has no key in it")
    return found

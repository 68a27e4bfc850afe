"""The one settings table: variable, flag, default, range, help. Nothing else reads the environment.

Runs in every process. A value comes from the flag, else the `DS4_SERVER_*` variable, else the
default. An unknown or malformed variable is an error at start that names the nearest known one.
"""

import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from ds4.errors import ConfigError

PREFIX: Final = "DS4_SERVER_"
DEFAULT_MODEL: Final = "smollm2-135m"


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every setting in force. Built by `load_settings` only, never written back."""

    # what is served
    model: str = DEFAULT_MODEL
    model_alias: str = ""
    ctx: int = 0
    # where
    host: str = "127.0.0.1"
    port: int = 8080
    shared_dir: str = ""
    # batching
    batched_sessions: int = 32
    decode_coalesce_us: int = 2000
    batch_log: bool = False
    max_batch_tokens: int = 512
    kv_cache_tokens: int = 0
    # engine
    device: str = "auto"
    mock_tokens_per_s: float = 0.0
    threads: int = 0
    gpu_memory_fraction: float = 0.9
    batch_invariant: bool = False
    # processes
    front_ends: int = 0
    max_front_ends: int = 16
    slots_per_front_end: int = 64
    drain_timeout_s: int = 30
    worker_timeout_s: int = 120
    front_end_timeout_s: int = 30
    # requests
    max_body_bytes: int = 32 * 1024 * 1024
    default_max_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    resume_attempts: int = 3
    resume_timeout_s: int = 60
    response_store_mib: int = 32
    response_store_hours: int = 720
    # access
    api_key: str = ""
    api_key_file: str = ""
    cache_isolation: str = "none"
    cors: str = ""
    # logs
    log_level: str = "info"
    log_format: str = "text"


def _text(raw: str) -> str:
    return raw


def _whole(raw: str) -> int:
    try:
        return int(raw)
    except ValueError:
        raise ValueError("must be a whole number") from None


def _number(raw: str) -> float:
    try:
        value = float(raw)
    except ValueError:
        raise ValueError("must be a number") from None
    if value != value:
        raise ValueError("must be a number")
    return value


def _non_empty(raw: str) -> bool:
    """On for any non-empty value, as in the C server: external scripts set it to 1, yes or true."""
    return raw != ""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table. `low`/`high` are inclusive; `choices` closes a text setting."""

    name: str
    help: str
    parse: Callable[[str], Any] = _text
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    secret: bool = False
    aliases: tuple[str, ...] = ()  # further flag spellings, without dashes
    sample: str = ""  # shown in the generated table where the default says little

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[str, ...]:
        """Every accepted spelling of the flag."""
        return (self.flag, *("--" + alias for alias in self.aliases))

    @property
    def is_switch(self) -> bool:
        """True where the flag takes no value."""
        return self.parse is _non_empty

    @property
    def default(self) -> Any:
        """The value without flag and variable."""
        return getattr(_DEFAULTS, self.name)


_DEFAULTS: Final = Settings()

TABLE: Final[tuple[Setting, ...]] = (
    Setting(name="model", help="GGUF file, or the name of a known model (smollm2-135m)"),
    Setting(
        name="model_alias",
        help="names the model answers to in the API, comma-separated; default: its file name",
    ),
    Setting(
        name="ctx",
        parse=_whole,
        low=0,
        high=16_777_216,
        help="context window of one session in tokens; 0: what the model was trained for",
    ),
    Setting(name="host", help="address to listen on"),
    Setting(name="port", parse=_whole, low=0, high=65535, help="port to listen on; 0: any free one"),
    Setting(
        name="shared_dir",
        help="directory of the shared-memory ring, on a tmpfs; default: one under /dev/shm for this user and port",
    ),
    Setting(
        name="batched_sessions",
        parse=_whole,
        low=0,
        high=4096,
        aliases=("batched-session",),
        help="how many sessions one step may hold; 0: batching off, one session at a time",
    ),
    Setting(
        name="decode_coalesce_us",
        parse=_whole,
        low=0,
        high=100_000,
        help="how long an idle worker waits for more requests to start together, in microseconds; 0: off",
    ),
    Setting(
        name="batch_log", parse=_non_empty, help="log one line for every decode batch (any non-empty value)"
    ),
    Setting(
        name="max_batch_tokens",
        parse=_whole,
        low=16,
        high=65_536,
        help="token budget of one step: decode rows first, prompt chunks fill the rest",
    ),
    Setting(
        name="kv_cache_tokens",
        parse=_whole,
        low=0,
        high=1 << 31,
        help="tokens the KV cache holds for all sessions together; 0: what fits in memory",
    ),
    Setting(
        name="device",
        choices=("auto", "cuda", "cpu", "reference", "mock"),
        help="engine that runs the model; mock invents words, for load tests",
    ),
    Setting(
        name="mock_tokens_per_s",
        parse=_number,
        low=0,
        high=1_000_000,
        help="tokens a second that the mock engine gives every session; 0: as fast as it is asked",
    ),
    Setting(
        name="threads", parse=_whole, low=0, high=1024, help="threads of the CPU engine; 0: physical cores"
    ),
    Setting(
        name="gpu_memory_fraction",
        parse=_number,
        low=0.05,
        high=0.99,
        help="share of the GPU's memory that weights, KV cache and buffers may take together",
    ),
    Setting(
        name="batch_invariant",
        parse=_non_empty,
        help="only GPU kernels whose results do not depend on who shares a step (any non-empty value); slower",
    ),
    Setting(
        name="front_ends",
        parse=_whole,
        low=0,
        high=254,
        help="front-end processes that `ds4-server` starts; 0: by the number of cores",
    ),
    Setting(name="max_front_ends", parse=_whole, low=1, high=254, help="front-end places in the ring"),
    Setting(
        name="slots_per_front_end",
        parse=_whole,
        low=1,
        high=4096,
        help="requests one front end may have in flight; more are answered 429",
    ),
    Setting(
        name="drain_timeout_s",
        parse=_whole,
        low=0,
        high=86_400,
        help="how long running requests may take to finish after SIGTERM, in seconds",
    ),
    Setting(
        name="worker_timeout_s",
        parse=_whole,
        low=0,
        high=86_400,
        help="how long one step of the worker may take before it counts as hung and is replaced; 0: for ever",
    ),
    Setting(
        name="front_end_timeout_s",
        parse=_whole,
        low=1,
        high=86_400,
        help="how long a front end may not come round before its requests are dropped and it is replaced",
    ),
    Setting(
        name="max_body_bytes",
        parse=_whole,
        low=1024,
        high=1 << 31,
        help="largest request body in bytes; larger ones are answered 413",
    ),
    Setting(
        name="default_max_tokens",
        parse=_whole,
        low=0,
        high=16_777_216,
        help="output limit of a request that names none; 0: until the context is full",
    ),
    Setting(
        name="temperature",
        parse=_number,
        low=0,
        high=100,
        sample="model's, else 1",
        help="default temperature",
    ),
    Setting(name="top_p", parse=_number, low=0, high=1, sample="model's, else 1", help="default top_p"),
    Setting(name="top_k", parse=_whole, low=0, high=1 << 30, sample="model's, else 0", help="default top_k"),
    Setting(name="min_p", parse=_number, low=0, high=1, sample="model's, else 0.05", help="default min_p"),
    Setting(
        name="resume_attempts",
        parse=_whole,
        low=0,
        high=100,
        help="how many crashes of the worker a running request survives before it counts as their cause",
    ),
    Setting(
        name="resume_timeout_s",
        parse=_whole,
        low=0,
        high=86_400,
        help="how long a running request waits for a new worker, in seconds",
    ),
    Setting(
        name="response_store_mib",
        parse=_whole,
        low=0,
        high=1 << 20,
        help="room for stored responses (/v1/responses) in the shared directory, in MiB; 0: none are stored",
    ),
    Setting(
        name="response_store_hours",
        parse=_whole,
        low=1,
        high=1 << 20,
        help="how long a stored response is kept after its last use, in hours",
    ),
    Setting(
        name="api_key", secret=True, help="keys that clients must send, comma-separated; empty: no key needed"
    ),
    Setting(
        name="api_key_file",
        help="file with one key per line, read at start and at `ds4-server reload`, each with its limits where "
        "it has any: KEY name=alice weight=2 max_concurrent=8 tokens_per_minute=60000",
    ),
    Setting(
        name="cache_isolation",
        choices=("none", "key"),
        help="who shares cached prompt prefixes: everybody, or only requests with the same API key",
    ),
    Setting(name="cors", help="allowed origins, comma-separated, or *; empty: no CORS headers"),
    Setting(
        name="log_level",
        choices=("debug", "info", "warning", "error"),
        help="least severe level that is logged",
    ),
    Setting(name="log_format", choices=("text", "json"), help="log lines as key=value text or JSON"),
)

_BY_NAME: Final = {setting.name: setting for setting in TABLE}
_BY_FLAG: Final = {flag: setting for setting in TABLE for flag in setting.flags}


def _value(setting: Setting, raw: str, source: str) -> Any:
    try:
        value = setting.parse(raw)
        if setting.choices and value not in setting.choices:
            raise ValueError("must be one of " + ", ".join(setting.choices))
        if setting.low is not None and setting.high is not None and not setting.low <= value <= setting.high:
            raise ValueError(f"must be between {setting.low:g} and {setting.high:g}")
    except ValueError as error:
        shown = "(hidden)" if setting.secret else repr(raw)
        raise ConfigError(f"{source}: {error}, got {shown}", setting=setting.name) from None
    return value


def parse_value(name: str, raw: str) -> Any:
    """One setting's value from text. Raises ConfigError naming it."""
    setting = _BY_NAME[name]
    if setting.is_switch and raw in ("0", "off", "false"):
        raw = ""  # a variable is off when it is empty, which nobody wants to type
    return _value(setting, raw, name)


def _nearest(name: str, known: Sequence[str]) -> str:
    by_lower = {entry.lower(): entry for entry in known}  # a wrong case is the nearest miss of all
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.0)
    return f"; did you mean {by_lower[close[0]]}?" if close else ""


def parse_flags(arguments: Sequence[str]) -> dict[str, Any]:
    """Flags to values, as `--name value` or `--name=value`. Raises ConfigError naming the flag."""
    values: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        flag, has_value, raw = rest.pop(0).partition("=")
        if flag == "-m":
            flag = "--model"
        setting = _BY_FLAG.get(flag)
        if setting is None:
            raise ConfigError(f"unknown argument {flag}{_nearest(flag, list(_BY_FLAG))}", setting=flag)
        if not has_value:
            if setting.is_switch:
                raw = "1"
            elif not rest or rest[0] in _BY_FLAG:
                raise ConfigError(f"{flag} needs a value", setting=setting.name)
            else:
                raw = rest.pop(0)
        values[setting.name] = _value(setting, raw, flag)
    return values


def parse_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """`DS4_SERVER_*` variables to values. Raises ConfigError on an unknown or malformed one."""
    values: dict[str, Any] = {}
    for variable in sorted(environment):
        if not variable.startswith(PREFIX):
            continue
        setting = _BY_NAME.get(variable[len(PREFIX) :].lower())
        if setting is None or setting.variable != variable:
            known = [known_setting.variable for known_setting in TABLE]
            raise ConfigError(f"unknown variable {variable}{_nearest(variable, known)}", setting=variable)
        raw = environment[variable]
        if raw != "" or setting.parse is _non_empty:  # compose writes VAR= for "not set"
            values[setting.name] = _value(setting, raw, variable)
    return values


def load_settings(arguments: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> Settings:
    """Settings in force for this process. Raises ConfigError naming the variable or flag and the cure."""
    source = os.environ if environment is None else environment  # noqa: TID251 - the one place
    return Settings(**{**parse_environment(source), **parse_flags(arguments)})


def as_environment(settings: Settings) -> dict[str, str]:
    """The settings that differ from the defaults, as variables for a child process."""
    out: dict[str, str] = {}
    for setting in TABLE:
        value = getattr(settings, setting.name)
        if value != setting.default:
            out[setting.variable] = "1" if value is True else str(value)
    return out


def child_environment(settings: Settings) -> dict[str, str]:
    """The environment of this process, for a child that shall run under exactly these settings."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}  # noqa: TID251
    return inherited | as_environment(settings)


def cache_dir() -> Path:
    """Where this user's downloads live, by the XDG base directory rules. It need not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME", "")  # noqa: TID251
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "ds4-server"

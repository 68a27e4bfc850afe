"""The settings table: precedence, parsing, and what an operator is told about a mistake."""

import pytest

from ds4 import config
from ds4.config import Settings, as_environment, load_settings, parse_environment, parse_flags
from ds4.errors import ConfigError


def test_flag_goes_over_variable_and_variable_over_default() -> None:
    environment = {"DS4_SERVER_PORT": "9000", "DS4_SERVER_CTX": "512"}
    settings = load_settings(["--port", "9001"], environment)
    assert (settings.port, settings.ctx, settings.host) == (9001, 512, "127.0.0.1")


@pytest.mark.parametrize("flag", ["--batched-sessions", "--batched-session"])
def test_both_spellings_of_the_batching_flag_work(flag: str) -> None:
    assert load_settings([flag, "64"], {}).batched_sessions == 64
    assert load_settings([f"{flag}=7"], {}).batched_sessions == 7


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", True), ("", False)])
def test_batch_log_is_on_for_any_non_empty_value(value: str, expected: bool) -> None:
    assert load_settings([], {"DS4_SERVER_BATCH_LOG": value}).batch_log is expected


def test_an_empty_variable_counts_as_not_set() -> None:
    assert load_settings([], {"DS4_SERVER_PORT": "", "DS4_SERVER_MODEL": ""}) == Settings()


def test_variables_of_others_are_none_of_our_business() -> None:
    assert parse_environment({"PATH": "/bin", "DS4_OTHER": "x"}) == {}


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("DS4_SERVER_BATCHED_SESSION", "DS4_SERVER_BATCHED_SESSIONS"),
        ("DS4_SERVER_PROT", "DS4_SERVER_PORT"),
        ("DS4_SERVER_port", "DS4_SERVER_PORT"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(variable: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {variable}; did you mean {nearest}") as caught:
        load_settings([], {variable: "1"})
    assert caught.value.setting == variable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prot", "1"], "unknown argument --prot; did you mean --port"),
        (["--port"], "--port needs a value"),
        (["--port", "--ctx", "5"], "--port needs a value"),
        (["--port", "http"], "--port: must be a whole number, got 'http'"),
        (["--port", "70000"], "--port: must be between 0 and 65535, got '70000'"),
        (["--temperature", "nan"], "--temperature: must be a number"),
        (["--temperature", "-0.5"], "--temperature: must be between 0 and 100, got '-0.5'"),
        (["--top-p", "-1"], "--top-p: must be between 0 and 1, got '-1'"),
        (["--top-k", "-1"], "--top-k: must be between 0 and"),
        (["--min-p", "-0.1"], "--min-p: must be between 0 and 1, got '-0.1'"),
        (["--device", "tpu"], "--device: must be one of auto, cuda, cpu, reference, mock, got 'tpu'"),
        (["--log-level", "loud"], "--log-level: must be one of debug"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(arguments)
    assert str(caught.value).startswith(message)


def test_a_secret_is_never_shown_in_an_error() -> None:
    setting = config.Setting(name="api_key", help="", secret=True, choices=("one", "two"))
    with pytest.raises(ConfigError, match=r"must be one of one, two, got \(hidden\)"):
        config._value(setting, "hunter2", "DS4_SERVER_API_KEY")
    assert next(setting for setting in config.TABLE if setting.name == "api_key").secret


def test_the_environment_of_a_child_gives_the_same_settings() -> None:
    settings = load_settings(
        ["--port", "9001", "--batch-log", "--min-p", "0.25", "--model", "a b.gguf", "--device=cpu"], {}
    )
    assert load_settings([], as_environment(settings)) == settings


def test_a_child_inherits_no_setting_but_those_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS4_SERVER_PORT", "9000")
    monkeypatch.setenv("OTHER", "kept")
    environment = config.child_environment(Settings(ctx=128))
    assert environment["OTHER"] == "kept"
    assert {name for name in environment if name.startswith("DS4_SERVER_")} == {"DS4_SERVER_CTX"}


def test_every_field_has_a_row_and_every_row_a_field() -> None:
    assert [setting.name for setting in config.TABLE] == list(Settings.__struct_fields__)


def test_defaults_are_within_their_own_limits() -> None:
    for setting in config.TABLE:
        if setting.low is not None and setting.high is not None and setting.default is not None:
            assert setting.low <= setting.default <= setting.high, setting.name
        if setting.choices:
            assert setting.default in setting.choices, setting.name

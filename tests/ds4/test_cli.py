"""The command line: help, tables, exit codes, and nothing but one line for a mistake."""

import re
import runpy
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ds4 import __version__, cli, config, supervisor
from ds4.config import Settings

ROOT = Path(__file__).parents[2]


def test_help_names_every_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for setting in config.TABLE:
        assert setting.variable in text
        for flag in setting.flags:
            assert re.search(rf"{flag}\b", text)


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"ds4-server {__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["--prot", "1"], ["front", "--prot", "1"], ["worker", "--prot", "1"], ["serv"]]
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ds4-server: error: ")
    assert captured.err.count("\n") == 1


def test_a_reload_waits_for_a_server_that_is_being_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    def serve(settings: Settings, announce: Callable[[str], None]) -> int:
        for number in cli.RELOAD_SIGNALS:
            signal.raise_signal(number)  # to this thread: others may not hold it back
            assert signal.sigtimedwait([number], 0) is not None, "it waited"
        return 7

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    monkeypatch.setattr(supervisor, "serve", serve)
    assert cli.main([]) == 7
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_config_shows_what_is_in_force_and_hides_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DS4_SERVER_API_KEY", "hunter2")
    assert cli.main(["config", "--port", "9001"]) == 0
    text = capsys.readouterr().out
    assert "DS4_SERVER_PORT=9001\n" in text
    assert "DS4_SERVER_TEMPERATURE=\n" in text  # not set: the model's
    assert "hunter2" not in text


def test_the_env_example_is_current() -> None:
    stored = (ROOT / "configs/env/ds4-server.env.example").read_text()
    assert stored == cli.environment_example(), (
        "run: ds4-server config --env > configs/env/ds4-server.env.example"
    )


def test_the_env_example_is_valid_once_uncommented() -> None:
    lines = [line[1:] for line in cli.environment_example().splitlines() if line.startswith("#DS4_SERVER_")]
    variables = dict(line.split("=", 1) for line in lines)
    assert config.load_settings([], variables) == config.Settings()


def test_the_settings_table_in_the_readme_is_current() -> None:
    readme = (ROOT / "README.md").read_text()
    stored = readme.split("<!-- settings: begin -->\n")[1].split("<!-- settings: end -->")[0]
    assert stored == cli.markdown_table(), "run: ds4-server config --markdown, and put it between the markers"


def test_python_dash_m_is_the_same_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["ds4", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("ds4", run_name="__main__")
    assert caught.value.code == 0
    assert __version__ in capsys.readouterr().out

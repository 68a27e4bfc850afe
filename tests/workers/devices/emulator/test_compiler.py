"""Compiling kernels with g++: the cache, and what the user is told."""

import tempfile
from pathlib import Path

import pytest

from ds4.errors import ConfigError
from tests.workers.kernels.rig import needs_compiler
from workers.devices.emulator import compiler

SOURCE = """#include "prelude.cuh"
extern "C" __global__ void __launch_bounds__(32) value(int* out) { out[threadIdx.x] = VALUE; }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel file, and an empty cache."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = tmp_path / "value.cu"
    path.write_text(SOURCE)
    return str(path)


@needs_compiler
def test_a_module_is_compiled_once_for_each_content(source: str) -> None:
    first = compiler.build(source, [("VALUE", 1)])
    made = first.stat().st_mtime_ns
    assert compiler.build(source, [("VALUE", 1)]) == first
    assert first.stat().st_mtime_ns == made
    assert compiler.build(source, [("VALUE", 2)]) != first
    Path(source).write_text(SOURCE.replace("VALUE;", "VALUE + 1;"))
    assert compiler.build(source, [("VALUE", 1)]) != first


@needs_compiler
def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(source: str) -> None:
    Path(source).write_text(SOURCE.replace("VALUE", "nonsense"))
    with pytest.raises(ConfigError, match=r"value.cu:2:.*nonsense") as caught:
        compiler.build(source, [])
    assert "cannot compile" in str(caught.value)


def test_without_a_compiler_the_user_is_told(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"g\+\+, which is not installed"):
        compiler.build(source, [("VALUE", 1)])


def test_a_cache_folder_that_others_may_write_is_refused(source: str) -> None:
    compiler.cache_folder().chmod(0o777)
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        compiler.cache_folder()


def test_a_cache_folder_that_is_a_link_is_refused(source: str, tmp_path: Path) -> None:
    folder = compiler.cache_folder()
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="belongs to somebody else"):
        compiler.cache_folder()

"""ds4/api/isolation.py: one salt per API key at every front end, and none of it in the clear."""

from pathlib import Path
from typing import Any

import pytest

from ds4.api.isolation import CacheIsolation
from ds4.errors import ConfigError
from tests.support.front_rig import Front, with_front


def _opened(directory: Path) -> CacheIsolation:
    isolation = CacheIsolation("key", has_keys=True)
    isolation.open(directory)
    return isolation


def test_every_front_end_gives_a_key_the_same_salt_and_each_key_another(tmp_path: Path) -> None:
    one, other = _opened(tmp_path), _opened(tmp_path)
    assert one.salt(b"alice") == other.salt(b"alice")
    assert one.salt(b"alice") != one.salt(b"bob")
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


def test_another_server_gives_another_salt(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    assert _opened(tmp_path / "a").salt(b"alice") != _opened(tmp_path / "b").salt(b"alice")


def test_without_keys_there_is_nothing_to_isolate(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs API keys"):
        CacheIsolation("key", has_keys=False)
    shared = CacheIsolation("none", has_keys=False)
    shared.open(tmp_path)
    assert shared.salt(b"alice") == b""
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be used"):
        _opened(tmp_path / "absent")


@pytest.mark.parametrize("mode", ["key", "none"])
def test_the_salt_of_the_clients_key_reaches_the_worker(tmp_path: Path, mode: str) -> None:
    async def scenario(front: Front) -> None:
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
        for key in ("alice", "alice", "bob"):
            response = await front.client.post(
                "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}
            )
            assert response.status_code == 200, response.text
        assert front.worker is not None
        salts = [running.request.cache_salt for running in front.worker.requests]
        if mode == "none":
            assert salts == [b"", b"", b""]
        else:
            assert salts[0] == salts[1] != salts[2]
            assert all(b"alice" not in salt and len(salt) == 16 for salt in salts)

    with_front(tmp_path, scenario, api_key="alice,bob", cache_isolation=mode)

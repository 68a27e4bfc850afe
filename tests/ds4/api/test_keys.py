"""ds4/api/keys.py: the key file's format, and that a key never gets into a message."""

from pathlib import Path

import pytest

from ds4.api.keys import Tenant, load_keys
from ds4.config import Settings
from ds4.errors import ConfigError


def _load(tmp_path: Path, text: str, api_key: str = "") -> dict[bytes, Tenant]:
    path = tmp_path / "keys"
    path.write_text(text)
    return load_keys(Settings(api_key=api_key, api_key_file=str(path)))


def test_a_line_gives_a_key_and_what_its_owner_may(tmp_path: Path) -> None:
    text = "# ours\n\n  sk-a= weight=2 name=alice\tmax_concurrent=8 tokens_per_minute=60000\nplain\n"
    keys = _load(tmp_path, text)
    plain = keys[b"plain"].name
    assert keys == {
        b"sk-a=": Tenant(number=1, name="alice", weight=2, max_concurrent=8, tokens_per_minute=60000),
        b"plain": Tenant(number=2, name=plain),
    }
    assert plain.startswith("#")
    assert "plain" not in plain
    assert _load(tmp_path, "first\nplain\n")[b"plain"].name == plain, "wherever it stands"
    assert keys[b"sk-a="].is_limited
    assert not keys[b"plain"].is_limited


def test_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    keys = _load(tmp_path, "old name=alice weight=3\nother\nnew name=alice weight=3\n")
    assert keys[b"old"] is keys[b"new"]
    assert keys[b"other"].number != keys[b"old"].number


def test_the_file_says_more_of_a_key_that_the_flag_names_too(tmp_path: Path) -> None:
    keys = _load(tmp_path, "one weight=5\n", api_key="one, two,")
    assert {key: tenant.weight for key, tenant in keys.items()} == {b"one": 5, b"two": 1}
    assert load_keys(Settings()) == {}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("secret weigth=2", "line 1: after the key only these may follow: name="),
        ("a\nsecret secret", "line 2: after the key"),
        ("secret weight=0", "line 1: weight must be a whole number from 1"),
        ("secret weight=1.5", "weight must be a whole number"),
        ("secret weight=²", "weight must be a whole number"),
        ("secret max_concurrent=", "max_concurrent must be"),
        ("secret tokens_per_minute=-1", "tokens_per_minute must be"),
        ("secret name=#1", "name must be"),
        ("secret weight=1 weight=1", "weight is given twice"),
        ("secret name=x\nsecret name=y", "line 2: the key was given before"),
        ("secret name=x\nsecret2 name=x weight=2", "two keys of x different options"),
        ("# nothing\n", "has no key in it"),
    ],
)
def test_what_is_wrong_is_told_without_the_key(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _load(tmp_path, text)
    assert told in str(raised.value)
    assert "secret" not in str(raised.value)
    assert raised.value.setting == "api_key_file"

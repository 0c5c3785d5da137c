"""The key of a run directory: how it is made, and the file that holds it."""

from __future__ import annotations

import os
import stat

import pytest

from reef import keys
from reef.errors import ConfigError


def test_the_file_is_for_its_owner_alone_whatever_the_umask(tmp_path) -> None:
    for mask in (0o000, 0o022, 0o077):
        path = tmp_path / f"key {mask:o}"
        before = os.umask(mask)
        try:
            key = keys.make_file(path)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert keys.read_file(path) == key
        assert len(key) > 40
    assert len(list(tmp_path.iterdir())) == 3
    assert len({keys.new_key() for _ in range(1000)}) == 1000


def test_a_file_that_was_left_half_written_is_written_anew(tmp_path) -> None:
    (tmp_path / "api-key.tmp").write_text("half")
    key = keys.make_file(tmp_path / "api-key")
    assert keys.read_file(tmp_path / "api-key") == key
    assert [path.name for path in tmp_path.iterdir()] == ["api-key"]


def test_no_file_is_no_key_and_a_broken_one_is_said(tmp_path) -> None:
    path = tmp_path / "api-key"
    assert keys.read_file(path) is None
    assert keys.read_file(tmp_path / "file" / "api-key") is None
    for content in (b"", b"\n", b"two words\n", b"one\ntwo\n", "schlüssel".encode(), b"\xff"):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(ConfigError, match="expected one key of visible ASCII"):
            keys.read_file(path)
    path.write_text("good")
    for mode in (0o640, 0o604, 0o666):
        path.chmod(mode)
        with pytest.raises(ConfigError, match=f"has mode {mode:o}, .*chmod 600") as said:
            keys.read_file(path)
        assert "good" not in said.value.message
    path.chmod(0o400)
    assert keys.read_file(path) == "good"
    with pytest.raises(ConfigError, match="cannot read the key"):
        keys.read_file(tmp_path)
    with pytest.raises(ConfigError, match="cannot write the key"):
        keys.make_file(tmp_path / "no directory" / "api-key")

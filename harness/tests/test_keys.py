"""Which key goes with requests to a service."""

from pathlib import Path
from typing import Any

import pytest
from reef_harness import Client
from reef_harness.errors import HarnessError
from reef_harness.keys import find_key

HERE = "http://127.0.0.1:8080"


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("REEF_API_KEY", raising=False)
    path = tmp_path / "api-key"
    path.write_text("of-the-file\n")
    return path


def test_a_key_that_is_given_comes_first_then_the_environment_then_the_file(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_key(HERE, None, key_file) == "of-the-file"
    monkeypatch.setenv("REEF_API_KEY", "of-the-environment")
    assert find_key(HERE, None, key_file) == "of-the-environment"
    assert find_key(HERE, "given", key_file) == "given"


@pytest.mark.parametrize("url", ["http://localhost", "http://[::1]:80/x", "https://127.0.0.1"])
def test_the_file_is_for_this_machine(key_file: Path, url: str) -> None:
    assert find_key(url, None, key_file) == "of-the-file"


@pytest.mark.parametrize(
    "url", ["http://reef.example", "http://127.0.0.1.example", "http://127.0.0.1@example", "http://10.0.0.1:8080"]
)
def test_its_key_is_sent_to_no_other_machine(key_file: Path, url: str) -> None:
    assert find_key(url, None, key_file) is None


def test_without_a_file_there_is_no_key_and_one_that_cannot_be_read_is_said(key_file: Path) -> None:
    assert find_key(HERE, None, key_file.with_name("none")) is None
    assert find_key(HERE, None, key_file / "below-a-file") is None
    with pytest.raises(HarnessError, match="cannot read the key in"):
        find_key(HERE, None, key_file.parent)
    key_file.write_bytes(b"\xff")
    with pytest.raises(HarnessError, match="cannot read the key in"):
        find_key(HERE, None, key_file)


def test_white_space_around_a_key_is_none_of_it(key_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Client(HERE, token="sk-SECRET\n")._http.headers["authorization"] == "Bearer sk-SECRET"
    monkeypatch.setenv("REEF_API_KEY", " sk-SECRET\r\n")
    assert find_key(HERE, "\n", key_file) == "sk-SECRET"
    monkeypatch.setenv("REEF_API_KEY", "\n")
    assert find_key(HERE, None, key_file) == "of-the-file"


@pytest.mark.parametrize("key", ["sk SECRET", "sk\nSECRET", "sk\x00SECRET", "sk\u2028SECRET", "sk-\u00e9SECRET"])
def test_what_no_header_can_hold_is_refused_by_where_it_was_found_and_not_told(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    said = []
    with pytest.raises(ValueError, match=r"^token must be printable ASCII") as caught:
        Client(HERE, token=key)
    said.append(str(caught.value))
    key_file.write_text(key, encoding="utf-8")
    with pytest.raises(ValueError, match=r"^the key in .*api-key must be printable ASCII") as caught:
        Client(HERE, key_file=key_file)
    said.append(str(caught.value))
    if "\x00" not in key:  # which no environment holds
        monkeypatch.setenv("REEF_API_KEY", key)
        with pytest.raises(ValueError, match=r"^REEF_API_KEY must be printable ASCII") as caught:
            Client(HERE, key_file=key_file)
        said.append(str(caught.value))
    assert "SECRET" not in "".join(said)


def test_a_client_finds_it_in_the_default_run_directory(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, service: Any
) -> None:
    default = key_file.parent / "work" / "run" / "api-key"
    default.parent.mkdir(parents=True)
    default.write_text("of-the-default")
    monkeypatch.chdir(key_file.parent)
    for options, sent in (({}, "of-the-default"), ({"key_file": key_file}, "of-the-file"), ({"token": "a"}, "a")):
        assert Client(service.url, **options)._http.headers["authorization"] == f"Bearer {sent}"

"""A release on disk: a complete Hugging Face model directory with `manifest.json`, written last, that vouches for it.

    {release_id, content_id, size_bytes, files: {name: {sha256, size_bytes}}, probe: {ids, logprobs} | null}

A trainer checkpoint has such a file too, COMPLETE: {steps_done, files: {name: {sha256, size_bytes}}}.

Needs only the standard library, so that a service which trains nothing can read releases too.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reef.errors import LoadFailedError
from reef.types import Probe, Published

MANIFEST = "manifest.json"
COMPLETE = "COMPLETE"  # the last file of a trainer checkpoint: without it there is none
WEIGHT_SUFFIX = ".safetensors"
_CHUNK_BYTES = 1 << 20
Vouched = tuple[str, int]  # a file's sha256 (hex) and size in bytes


def content_id(digests: Mapping[str, str]) -> str:
    """The name of weights: equal files have equal ids.

    Args:
        digests: sha256 (hex) by file name; only weight files count.
    """
    lines = [f"{name}:{digests[name]}" for name in sorted(digests) if name.endswith(WEIGHT_SUFFIX)]
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def content_id_of(directory: Path) -> str:
    """The content id of any Hugging Face model directory, e.g. the base model's."""
    return content_id({path.name: sha256_of(path) for path in directory.glob("*" + WEIGHT_SUFFIX)})


def sha256_of(path: Path) -> str:
    """The sha256 (hex) of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def dump_manifest(published: Published, files: Mapping[str, tuple[str, int]]) -> bytes:
    """The manifest's text. `files`: (sha256, size in bytes) by name."""
    probe = published.probe
    return json.dumps(
        {
            "release_id": published.release_id,
            "content_id": published.content_id,
            "size_bytes": published.size_bytes,
            "files": {name: {"sha256": sha, "size_bytes": size} for name, (sha, size) in sorted(files.items())},
            "probe": None if probe is None else {"ids": probe.ids, "logprobs": probe.logprobs},
        },
        indent=1,
    ).encode()


def read_manifest(directory: Path) -> Published:
    """Read a release, checking that every file is there with its size (not its bytes: see `verify`).

    Raises:
        LoadFailedError: the directory is not a complete release.
    """
    values = _load_release(directory)
    _check_sizes(f"release {directory}", directory, values["files"])
    probe = values["probe"]
    return Published(
        release_id=values["release_id"],
        path=str(directory),
        content_id=values["content_id"],
        size_bytes=values["size_bytes"],
        probe=None if probe is None else Probe(tuple(probe["ids"]), tuple(probe["logprobs"])),
    )


def verify(directory: Path) -> Published:
    """Read a release and check every byte of it.

    Raises:
        LoadFailedError: the directory is not a complete release, or a file's bytes are not those that were written.
    """
    published = read_manifest(directory)
    entries = _load_release(directory)["files"]
    _check_bytes(f"release {directory}", directory, entries)
    if content_id({name: entry["sha256"] for name, entry in entries.items()}) != published.content_id:
        raise LoadFailedError(f"release {directory}: {MANIFEST} contradicts itself about its content id")
    return published


def vouch(path: Path) -> Vouched:
    """A file's hash and size."""
    return sha256_of(path), path.stat().st_size


def dump_complete(steps_done: int, files: Mapping[str, Vouched]) -> bytes:
    """The text of COMPLETE for the checkpoint whose other files are these."""
    entries = {name: {"sha256": sha, "size_bytes": size} for name, (sha, size) in sorted(files.items())}
    return json.dumps({"steps_done": steps_done, "files": entries}, indent=1).encode()


def check_checkpoint(directory: Path) -> None:
    """Check every byte of a trainer checkpoint against what its COMPLETE says.

    Raises:
        LoadFailedError: it was never finished, or a file is missing or has other bytes than those that were written.
    """
    owner = f"checkpoint {directory}"
    entries = _load(owner, directory / COMPLETE, {"steps_done", "files"})["files"]
    _check_sizes(owner, directory, entries)
    _check_bytes(owner, directory, entries)


def _load_release(directory: Path) -> dict[str, Any]:
    keys = {"release_id", "content_id", "size_bytes", "files", "probe"}
    return _load(f"release {directory}", directory / MANIFEST, keys)


def _load(owner: str, path: Path, keys: set[str]) -> dict[str, Any]:
    """The file that vouches for the others: `keys`, and in `files` a hash and a size for each."""
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadFailedError(f"{owner}: no {path.name}, so it was never finished") from None
    except (OSError, ValueError) as error:
        raise LoadFailedError(f"{owner}: cannot read {path.name}: {error}") from None
    if not isinstance(values, dict):
        raise LoadFailedError(f"{owner}: {path.name} holds {values!r:.40}, expected an object")
    if missing := keys - values.keys():
        raise LoadFailedError(f"{owner}: {path.name} lacks {', '.join(sorted(missing))}")
    if not _vouches(values["files"]):
        raise LoadFailedError(f"{owner}: {path.name} does not give sha256 and size_bytes of each of its files")
    return values


def _vouches(files: Any) -> bool:
    return isinstance(files, dict) and all(
        isinstance(entry, dict) and entry.keys() >= {"sha256", "size_bytes"} for entry in files.values()
    )


def _check_sizes(owner: str, directory: Path, entries: Mapping[str, Any]) -> None:
    for name, entry in entries.items():
        path = directory / name
        if not path.is_file():
            raise LoadFailedError(f"{owner}: {name} is missing")
        size = path.stat().st_size
        if size != entry["size_bytes"]:
            raise LoadFailedError(f"{owner}: {name} has {size} bytes, expected {entry['size_bytes']}")


def _check_bytes(owner: str, directory: Path, entries: Mapping[str, Any]) -> None:
    for name, entry in entries.items():
        try:
            found = sha256_of(directory / name)
        except OSError as error:
            raise LoadFailedError(f"{owner}: cannot read {name}: {error}") from None
        if found != entry["sha256"]:
            raise LoadFailedError(f"{owner}: {name} has sha256 {found}, expected {entry['sha256']}")

"""A release on disk: a complete Hugging Face model directory with `manifest.json`, written last, that vouches for it.

    {release_id, content_id, size_bytes, files: {name: {sha256, size_bytes}}, probe: {ids, logprobs} | null}

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
    values = _load(directory)
    for name, entry in values["files"].items():
        path = directory / name
        if not path.is_file():
            raise LoadFailedError(f"release {directory}: {name} is missing")
        if path.stat().st_size != entry["size_bytes"]:
            raise LoadFailedError(
                f"release {directory}: {name} has {path.stat().st_size} bytes, expected {entry['size_bytes']}"
            )
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
    entries = _load(directory)["files"]
    for name, entry in entries.items():
        found = sha256_of(directory / name)
        if found != entry["sha256"]:
            raise LoadFailedError(f"release {directory}: {name} has sha256 {found}, expected {entry['sha256']}")
    if content_id({name: entry["sha256"] for name, entry in entries.items()}) != published.content_id:
        raise LoadFailedError(f"release {directory}: {MANIFEST} contradicts itself about its content id")
    return published


def _load(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LoadFailedError(f"release {directory}: no {MANIFEST}, so it was never finished") from None
    except (OSError, ValueError) as error:
        raise LoadFailedError(f"release {directory}: cannot read {MANIFEST}: {error}") from None
    missing = {"release_id", "content_id", "size_bytes", "files", "probe"} - set(values)
    if missing:
        raise LoadFailedError(f"release {directory}: {MANIFEST} lacks {', '.join(sorted(missing))}")
    return dict(values)

"""Files and directories that are whole after a crash, or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from reef.errors import UnavailableError


@contextmanager
def storing(target: Path) -> Iterator[None]:
    """What the disk refuses (full, read-only, gone) may be tried again, with the state that was to be stored.

    Raises:
        UnavailableError: it did refuse.
    """
    try:
        yield
    except (OSError, CheckpointException) as error:
        reason = str(error).splitlines()[-1]  # torch tells the story of every rank
        raise UnavailableError(f"cannot write {target}: {reason}", retry_after_s=1) from error


def write(path: Path, data: bytes) -> None:
    """Write a file and wait until it is on disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def begin(directory: Path) -> Path:
    """An empty directory beside `directory`, to be filled and handed to `finish`. One left by a crash is removed."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def finish(partial: Path, directory: Path) -> None:
    """Give a filled directory its name, in the place of one that had it."""
    sync(partial)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)

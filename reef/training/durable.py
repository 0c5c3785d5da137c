"""Files and directories that are whole after a crash, or not there."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reef.errors import UnavailableError


@contextmanager
def storing(target: Path) -> Iterator[None]:
    """What the disk refuses (full, read-only, gone) may be tried again, with the state that was to be stored.

    Raises:
        UnavailableError: it did refuse.
    """
    try:
        yield
    except OSError as error:
        raise UnavailableError(f"cannot write {target}: {error}", retry_after_s=1) from error


def refusal(error: BaseException) -> OSError | None:
    """What the disk said, where a library made another error of it; None: it said nothing."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return found


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


def partial(directory: Path) -> Path:
    """Where `directory` is filled before it has its name."""
    return directory.with_name(f".{directory.name}.partial")


def begin(directory: Path) -> Path:
    """An empty directory beside `directory`, to be filled and handed to `finish`. One left by a crash is removed."""
    made = partial(directory)
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    return made


def finish(filled: Path, directory: Path) -> None:
    """Give a filled directory its name, in the place of one that had it."""
    sync(filled)
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    filled.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)

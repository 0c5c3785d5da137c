"""Keys: how one is made, what is kept of it, and the file that holds the one of a run directory.

A key has 256 random bits, so one round of sha256 is enough: nobody finds it from its hash.
"""

import hashlib
import os
import re
import secrets
from pathlib import Path

from reef.errors import ConfigError

VISIBLE = re.compile(r"[!-~]+")  # what an HTTP header carries as it is
FILE = "api-key"  # of a run directory
MODE = 0o600
MAX_FILE_BYTES = 4096


def new_key() -> str:
    """A key that nobody has had before."""
    return f"reef_{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """What is kept of a key: its sha256 in hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def read_file(path: Path) -> str | None:
    """The key that a file holds; None where there is no such file.

    Raises:
        ConfigError: it cannot be read, holds no key, or others than its owner may read it.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
            content = file.read(MAX_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"cannot read the key in {path}: {error.strerror}") from None
    key = content.strip().decode("ascii", "replace")
    if not VISIBLE.fullmatch(key):
        raise ConfigError(f"{path}: expected one key of visible ASCII characters; without the file a new one is made")
    if mode & ~MODE:
        raise ConfigError(
            f"{path} has mode {mode:o}, and others may have read the key: delete the file (a new one is made), or "
            f"`chmod {MODE:o}` it"
        )
    return key


def make_file(path: Path) -> str:
    """A new key, durable in a file that only its owner may read. Raises ConfigError where it cannot be written."""
    key = new_key()
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # of a start that was killed
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE), "w") as file:
            os.fchmod(file.fileno(), MODE)  # whatever the umask
            file.write(f"{key}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write the key to {path}: {error.strerror}") from None
    return key

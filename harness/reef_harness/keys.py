"""Which key goes with requests to a service."""

import os
from pathlib import Path
from urllib.parse import urlsplit

from reef_harness.errors import HarnessError

KEY_FILE = Path("work/run/api-key")  # where a service with the default run directory keeps the key that it made
_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def is_here(url: str) -> bool:
    """Whether a service is on this machine: then no proxy of the environment is asked, which would get the key."""
    return urlsplit(url).hostname in _THIS_MACHINE


def find_key(url: str, token: str | None = None, key_file: Path = KEY_FILE) -> str | None:
    """``token``, else REEF_API_KEY, else what ``key_file`` holds, which goes to services on this machine only.

    None where there is none of them. Raises HarnessError where the file is there and cannot be read, ValueError where
    what was found is no key.
    """
    if given := checked_key(token or "", "token") or checked_key(os.environ.get("REEF_API_KEY", ""), "REEF_API_KEY"):
        return given
    if not is_here(url):
        return None
    try:
        return checked_key(key_file.read_text(encoding="utf-8"), f"the key in {key_file}") or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise HarnessError(f"cannot read the key in {key_file}: {error}") from error


def checked_key(key: str, what: str) -> str:
    """Without white space around it, as a file's last line has. Raises ValueError, which does not tell the key."""
    key = key.strip()
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(f"{what} must be printable ASCII characters without blanks between them")
    return key

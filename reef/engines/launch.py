"""What starts one engine server: its command line, and how to tell where it listens. A class for each kind."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from reef.config import Config


@dataclass(frozen=True, slots=True)
class Site:
    """Where a server runs: the address that it listens on, who may speak to it, and whose GPUs it sees."""

    host: str = "127.0.0.1"
    key: str | None = None  # that requests must bring as their bearer token; None: whoever reaches it may speak
    own_gpus: bool = False  # it sees those that are its own, and no others

    def write_key(self, directory: Path, text: str) -> str:
        """Write the key into a file, with `text` around it: others can read a command line. The file's path."""
        assert self.key is not None
        path = directory / "key.yaml"
        path.touch(mode=0o600)
        path.write_text(text.format(key=self.key))
        return str(path)


HERE = Site()


class Launch(Protocol):
    """One attempt to start a server, with its files in a directory that goes when it ends."""

    @property
    def title(self) -> str:
        """What to call this kind of server."""

    @property
    def command(self) -> Sequence[str]:
        """The program and its arguments."""

    @property
    def environment(self) -> Mapping[str, str]:
        """What its environment has besides ours."""

    async def url(self) -> str | None:
        """Where it listens; None while it does not, or is not ready for requests."""

    def port_was_taken(self, output: str) -> bool:
        """Whether it ended, with these last lines, for a reason that another attempt need not meet."""

    async def close(self) -> None:
        """Let go of what the attempt held: it listens, or has ended."""


class EmbeddedLaunch:
    """Our own server. It lets the kernel choose its port and writes that to a file once it listens."""

    title = "the embedded engine"

    def __init__(
        self, config: Config, _name: str, model_path: str, version: str, directory: Path, site: Site = HERE
    ) -> None:
        self._host = site.host
        self._port_file = directory / "port"
        self.environment: Mapping[str, str] = {}
        self.command = [sys.executable, "-m", "reef.engines.embedded"]
        self.command += ["--model-path", model_path, "--weight-version", version]
        self.command += ["--host", site.host, "--port", "0", "--port-file", str(self._port_file)]
        if site.key is not None:
            self.command += ["--api-key-file", site.write_key(directory, "{key}")]
        self.command += ["--parent-pid", str(os.getpid()), "--incremental-streaming-output"]
        if config.inference.context_length is not None:
            self.command += ["--context-length", str(config.inference.context_length)]
        self.command += flags(config.inference.options)

    async def url(self) -> str | None:
        try:
            return f"http://{self._host}:{int(self._port_file.read_text())}"
        except FileNotFoundError:
            return None

    def port_was_taken(self, _output: str) -> bool:
        return False

    async def close(self) -> None:
        """It held nothing."""


def flags(options: Mapping[str, Any]) -> list[str]:
    """Command line arguments of a server's options.

    True is a bare flag, false none; a list is as many words, a mapping is one word of JSON.
    """
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        elif isinstance(value, list | tuple):
            words += [flag, *map(_word, value)]
        else:
            words += [flag, _word(value)]
    return words


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)

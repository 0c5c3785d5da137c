"""Starting the trainer where Ray does not come up."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from reef.config import Config
from reef.errors import WorkersLostError
from reef.training.cluster import Trainer


class Silent(Trainer):
    """A trainer whose Ray never answers."""

    def __init__(self, config: Config, model_path: Path) -> None:
        super().__init__(config, model_path)
        self.released = threading.Event()

    def _connect(self) -> None:
        self.released.wait(60)


def test_a_ray_that_does_not_come_up_ends_the_start_in_time(make_model: Callable[..., Path], tmp_path: Path) -> None:
    values = {"reef": {"run-dir": tmp_path}, "training": {"ready-timeout": 0.2}}
    trainer = Silent(Config.model_validate(values), make_model())
    with pytest.raises(WorkersLostError, match=r"Ray did not start within training\.ready-timeout \(0\.2 s\)"):
        trainer.start()
    trainer.released.set()

"""Light rooms stay light: what an import must not bring along (lint-imports sees the static side of it)."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow  # processes that import it all


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("reef.config", ("torch", "ray", "megatron", "transformers", "fastapi", "sqlalchemy")),
        ("reef.cli", ("torch", "ray", "megatron", "transformers", "fastapi", "sqlalchemy")),
        ("reef.ledger.ledger", ("torch", "ray", "megatron", "transformers", "fastapi")),
        ("reef.service.run", ("ray", "megatron")),
    ],
)
def test_an_import_brings_in_nothing_heavy(module: str, heavy: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*(name for name in {heavy!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr

"""What the documents say is so: generated pages are current, links lead somewhere, commands work as they stand."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+)\)")
README_URL = "http://127.0.0.1:8080"


def test_the_configuration_reference_is_what_the_code_generates() -> None:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    assert (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8") == generate.render()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_are_there(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in link]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_tree_of_the_readme_names_what_is_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = readme[readme.index("## The tree") : readme.index("## Read on")]
    inside = list(re.findall(r"^ {6}(\S+)", tree, re.MULTILINE))
    inside += re.findall(r"^ {6}\S+ .* {2,}(\w+\.py) ", tree, re.MULTILINE)
    outside = re.findall(r"^ {4}(\S+)", tree, re.MULTILINE)
    assert [name for name in outside if not (ROOT / name).exists()] == []
    assert [name for name in inside if not (ROOT / "reef" / name).exists()] == []
    parts = {path.name for path in (ROOT / "reef").iterdir() if not path.name.startswith("__")}
    assert parts - {name.rstrip("/") for name in inside} == set(), "in reef/, and not in the README's tree"


@pytest.fixture
def house(make_service: Callable[..., Any]) -> Iterator[Any]:
    """A service with the README's serve.yaml, and a key of its own making."""
    service = make_service("--reef.access", "key")
    service.start("-c", str(ROOT / "serve.yaml"))
    service.client.headers["authorization"] = f"Bearer {(service.run_dir / 'api-key').read_text().strip()}"
    yield service
    service.end()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_commands_of_the_readme_do_what_it_says(house: Any, tmp_path: Path) -> None:
    serve, ask, grade, traffic, _, measure = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    assert serve.strip() == ".venv/bin/reef serve -c serve.yaml"

    answer = run(ask, house)
    assert "200 OK" in answer
    assert "x-reef-release-id: " in answer
    (receipt,) = re.findall(r"x-reef-agent-record-id: (rcp_\w+)", answer)

    graded = json.loads(run(grade.replace("rcp_...", receipt), house))
    assert graded["references"] == [receipt]
    assert graded["state"] == "pending"

    releases = json.loads(run(traffic, house).splitlines()[-1])["releases"]
    assert [release["step"] for release in releases[:3]] == [2, 1, 0]
    assert house.chat().headers["x-reef-release-id"] == releases[0]["release_id"]

    said = run(re.sub(r"work/(items|evaluation)", rf"'{tmp_path}'/\1", measure), house)
    assert f"Evaluation of release {releases[0]['release_id']}" in said
    assert (tmp_path / "evaluation" / "pass-at-k.png").exists()


def run(commands: str, service: Any) -> str:
    """What a block of the README prints, with this service and this Python in place of its own."""
    commands = commands.replace(README_URL, service.url).replace(".venv/bin/python", f"'{sys.executable}'")
    commands = commands.replace("work/run/api-key", f"'{service.run_dir}/api-key'")
    commands = commands.replace(" --releases", f" --run-dir '{service.run_dir}' --releases")
    commands = commands.replace(".venv/bin/reef-harness evaluate", f"'{sys.executable}' -m reef_harness evaluate")
    commands = commands.replace(" --grader", f" --url {service.url} --key-file '{service.run_dir}/api-key' --grader")
    done = subprocess.run(["bash", "-ec", commands], cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout

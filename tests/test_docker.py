"""The container files, as far as that goes without a Docker engine: linted, parsed, and what they name is there."""

import fnmatch
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from reef.config import load

ROOT = Path(__file__).resolve().parents[1]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(path for path in DOCKER.glob("Dockerfile.*") if path.suffix != ".dockerignore")
HADOLINT = Path(sys.executable).with_name("hadolint")
COMPOSE = DOCKER / "compose.yaml"
SECRETS = {"REEF_TOKEN": "hunter2", "REEF_DB_PASSWORD": "hunter3"}
each_dockerfile = pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)


def lint(*words: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HADOLINT, "--no-color", *words], input=text, capture_output=True, text=True, timeout=60)


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Each instruction and its arguments, on one line."""
    text = re.sub(r"^#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]  # type: ignore[misc]


@each_dockerfile
def test_the_linter_has_nothing_to_say(dockerfile: Path) -> None:
    done = lint(str(dockerfile))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_the_linter_would_say_so() -> None:
    done = lint("-", text="FROM python\nRUN sudo make\nRUN pip install reef\n")
    assert done.returncode == 1
    assert {"DL3006", "DL3004", "DL3013", "DL3042"} <= set(re.findall(r"DL\d+", done.stdout))


@each_dockerfile
def test_the_base_is_pinned_and_the_service_runs_as_nobody_special(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    bases = [arguments.split()[0] for word, arguments in found if word == "FROM"]
    assert all(re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+-[\w.-]+", base) for base in bases), bases
    assert [arguments for word, arguments in found if word == "USER"] == ["10001"]
    last = dict(found)
    assert last["ENTRYPOINT"] == '["reef", "serve"]'
    assert "http://127.0.0.1:8080/healthz" in last["HEALTHCHECK"]
    assert last["EXPOSE"] == "8080"


@each_dockerfile
def test_what_is_copied_is_in_the_repository_and_reaches_the_build(dockerfile: Path) -> None:
    ignore = dockerfile.with_name(f"{dockerfile.name}.dockerignore").read_text().splitlines()
    assert ignore[1] == "*"
    sent = [line[1:] for line in ignore if line.startswith("!")]
    copied = [
        source
        for word, arguments in instructions(dockerfile)
        if word == "COPY" and "--from=" not in arguments
        for source in [each for each in arguments.split() if not each.startswith("--")][:-1]
    ]
    assert [source for source in copied if not (ROOT / source).exists()] == []
    assert [source for source in copied if not any(fnmatch.fnmatch(source, pattern) for pattern in sent)] == []
    assert [path for path in sent if not (ROOT / path).exists()] == []


@each_dockerfile
def test_the_configuration_that_it_starts_with_is_copied_and_takes_its_environment(dockerfile: Path) -> None:
    found = instructions(dockerfile)
    option, file = yaml.safe_load(dict(found)["CMD"])
    assert option == "-c"
    environment = dict(
        re.findall(r"(REEF__\w+)=(\S+)", " ".join(arguments for word, arguments in found if word == "ENV"))
    )
    config = load(ROOT / file, environ=environment | {"REEF__REEF__TOKEN": "hunter2"})
    assert (config.reef.host, config.reef.port, str(config.reef.run_dir)) == ("0.0.0.0", 8080, "/srv/reef/work/run")


def test_the_composition_is_one_by_the_specification() -> None:
    assert sorted(PyCompose.from_yaml(COMPOSE.read_text()).service_names()) == ["postgres", "reef", "reef-gpu"]


@pytest.mark.parametrize(
    ("right", "wrong"), [("ports", "prots"), ("2gb", "much"), ("service_healthy", "service_happy")]
)
def test_one_that_is_not_would_be_refused(right: str, wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        PyCompose.from_yaml(COMPOSE.read_text().replace(right, wrong))


def services() -> dict[str, Any]:
    text = re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: SECRETS[match[1]], COMPOSE.read_text())
    found: dict[str, Any] = yaml.safe_load(text)["services"]
    return found


@pytest.mark.parametrize("name", ["reef", "reef-gpu"])
def test_the_services_build_from_a_dockerfile_here_and_are_configured_as_reef_understands_it(name: str) -> None:
    service = services()[name]
    assert (DOCKER / service["build"]["context"] / service["build"]["dockerfile"]).resolve() in DOCKERFILES
    config = load(None, environ=service["environment"])
    assert config.reef.token is not None and config.reef.token.get_secret_value() == "hunter2"
    assert config.ledger_url == "postgresql+psycopg://reef:hunter3@postgres/reef"
    volumes = {volume.split(":")[1] for volume in service["volumes"]}
    assert "/srv/reef/work" in volumes
    assert service["ports"] == ["127.0.0.1:8080:8080"]


def test_the_database_is_the_one_that_the_services_ask_for_and_is_pinned() -> None:
    database = services()["postgres"]
    assert re.fullmatch(r"postgres:\d+\.\d+-\w+", database["image"])
    assert database["environment"] == {"POSTGRES_USER": "reef", "POSTGRES_DB": "reef", "POSTGRES_PASSWORD": "hunter3"}

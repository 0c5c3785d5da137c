"""The files of configs/ pass the check that the service makes, for the machine that each says it is for."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from reef import cli
from reef.cluster.address import find_cluster
from reef.config import Config, load
from reef.memory.fit import Plan, plan
from reef.memory.hardware import Hardware
from reef.memory.parameters import of_model
from reef.training.architecture import read_architecture
from tests import published

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
FILES = sorted(CONFIGS.glob("*.yaml"))
ENVIRONMENT = {
    "REEF_RAY_ADDRESS": "head.cluster:6379",
    "REEF_DATABASE_URL": "postgresql+psycopg://reef:hunter2@db/reef",
    "REEF_TOKEN": "hunter2",
}


def flags_of(file: Path) -> list[str]:
    """The machine that a file says it is for: `--gpus N ...` of the command in its head; [] for one without a GPU."""
    comment = " ".join(re.findall(r"^#(.*)$", file.read_text(encoding="utf-8"), re.MULTILINE))
    found = re.search(r"--gpus \d+ --gpu-memory-gib \d+(?: --nodes \d+)?", comment)
    return shlex.split(found[0]) if found else []


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every published model that a file names."""
    directory = tmp_path_factory.mktemp("models")
    for name in published.CONFIGS:
        published.make(directory / name, name)
    return directory


def with_model(file: Path, models: Path) -> list[str]:
    name = Path(yaml.safe_load(file.read_text())["inference"]["model-path"]).name
    return [] if name == "starter" else ["--inference.model-path", str(models / name)]


def test_there_is_a_file_for_each_class_of_hardware() -> None:
    assert [file.name for file in FILES] == [
        "1-gpu.yaml",
        "2-gpus.yaml",
        "8-gpu-node.yaml",
        "laptop.yaml",
        "several-nodes.yaml",
    ]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_is_a_whole_file_that_says_how_to_check_it(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert set(yaml.safe_load(text)) == {"reef", "inference", "recipe", "training", "storage"}
    assert (f"reef serve --dry-run -c configs/{file.name} --gpus" in text.replace("\\\n#      ", "")) == (
        file.stem != "laptop"
    )
    assert max(len(line) for line in text.splitlines()) <= 120


@pytest.mark.parametrize("name", published.CONFIGS)
def test_the_models_are_those_that_were_published_and_take_no_disk(name: str, models: Path) -> None:
    assert of_model(read_architecture(models / name)) == published.NUM_PARAMETERS[name]
    files = list((models / name).glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) == pytest.approx(2 * published.NUM_PARAMETERS[name], rel=1e-3)
    assert sum(file.stat().st_blocks * 512 for file in files) < 8 * 2**20


@pytest.mark.parametrize(
    "file",
    [pytest.param(f, marks=[] if f.stem == "laptop" else pytest.mark.slow) for f in FILES],
    ids=lambda file: file.stem,
)
def test_each_passes_the_dry_run_of_its_machine(
    file: Path, models: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    words = ["serve", "--dry-run", "-c", str(file), *flags_of(file), *with_model(file, models), "--reef.port", "0"]
    status = cli.main(words)
    output, errors = capsys.readouterr()
    assert (status, errors) == (0, "")
    assert "hunter2" not in output
    assert ("on whatever node Ray gives it" in output) == (file.stem == "several-nodes")
    assert re.search(
        r"trainer rank [\d-]+: .*\n +weights .*, gradients .*, optimizer .*, activations .*, logits ", output
    )
    assert re.search(r"engine [\d-]+: .*\n +weights .*, keys and values ", output)
    assert re.search(r"(GPU \d|memory).* left$", output, re.MULTILINE)


@pytest.mark.parametrize(
    ("stem", "flags", "message"),
    [
        ("1-gpu", "--gpus 1 --gpu-memory-gib 16", "lower inference.options.mem-fraction-static (now 0.18)"),
        ("2-gpus", "--gpus 2 --gpu-memory-gib 24", "GPU 0: trainer rank 0"),
        ("2-gpus", "--gpus 1 --gpu-memory-gib 80", "inference takes GPU 1, and there is GPU 0"),
        ("8-gpu-node", "--gpus 8 --gpu-memory-gib 79", "use more ranks: training.layout.tensor or pipeline"),
        ("several-nodes", "--gpus 8 --gpu-memory-gib 79 --nodes 3", "is too small"),
        ("several-nodes", "--gpus 8 --gpu-memory-gib 40 --nodes 4", "GPU 0: trainer rank 0"),
    ],
)
def test_none_passes_for_a_smaller_machine(stem: str, flags: str, message: str, models: Path) -> None:
    file = CONFIGS / f"{stem}.yaml"
    found = planned(load(file, with_model(file, models), ENVIRONMENT), flags).problems
    assert any(message in problem for problem in found), found


def planned(config: Config, flags: str) -> Plan:
    """The plan for the machine that `--gpus N --gpu-memory-gib N --nodes N` describes."""
    numbers = [int(number) for number in re.findall(r" (\d+)", flags)]
    gpus, gib, nodes = [*numbers, 1][:3]
    hardware = Hardware((gib * 2**30,) * gpus, 64 * 2**30, nodes, simulated=True)
    architecture = read_architecture(config.inference.model_path)
    return plan(config, architecture, "bfloat16", hardware, find_cluster(config, {}))


@pytest.mark.parametrize("file", [file for file in FILES if flags_of(file)], ids=lambda file: file.stem)
def test_the_page_about_hardware_shows_what_the_dry_run_says(file: Path, models: Path) -> None:
    page = (CONFIGS.parent / "docs" / "hardware.md").read_text(encoding="utf-8")
    config = load(file, with_model(file, models), ENVIRONMENT)
    found = planned(config, " ".join(flags_of(file)))
    assert found.problems == ()
    indented = [f"{'' if number else 'memory':<10}{line}" for number, line in enumerate(found.lines)]
    assert "\n".join(indented) in page

"""What can be known before anything starts: is the configuration usable here, and what does this machine have?"""

import argparse
import difflib
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError, safe_open

from reef.config import Config
from reef.engines.host import flags
from reef.errors import ConfigError, LoadFailedError
from reef.types import Operation

# Arguments of the engine's server that Reef sets, and the setting that decides each.
MANAGED = {
    "model-path": "inference.model-path",
    "host": "nothing: engines listen on loopback",
    "port": "nothing: the kernel chooses it",
    "port-file": "nothing",
    "parent-pid": "nothing",
    "weight-version": "nothing: it is the release's id",
    "context-length": "inference.context-length",
    "api-key": "nothing: engines listen on loopback, and only Reef talks to them",
    "incremental-streaming-output": "nothing: Reef reads whole answers",
}
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
LIBRARIES = ("torch", "transformers", "megatron-core", "ray", "fastapi", "sqlalchemy", "sglang", "wandb")


def dry_run(config: Config) -> list[str]:
    """Check a configuration as far as that goes without starting anything; what was found, a line each.

    Raises:
        ConfigError: the model cannot be served or trained, or an engine option is not one.
    """
    inference, training = config.inference, config.training
    path = inference.model_path
    if not path.is_dir():
        raise ConfigError(f"inference.model-path: no directory {path}")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"inference.model-path: {path} holds no .safetensors file")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"inference.model-path: {file} is not a whole safetensors file: {error}") from None
    if not any((path / name).exists() for name in TOKENIZERS):
        raise ConfigError(f"inference.model-path: no tokenizer in {path}: expected {' or '.join(TOKENIZERS)}")
    size = sum(file.stat().st_size for file in files)
    lines = [f"model     {path}: {len(files)} safetensors file(s), {size / 1e6:.1f} MB"]
    if not _has_chat_template(path):
        lines.append("          it has no chat template: /v1/completions works, /v1/chat/completions cannot")
    if inference.url is not None:
        lines.append(f"engine    attached: {inference.url}")
    else:
        check_engine_options(inference.options)
        lines.append(f"engine    {inference.backend}, options {inference.options or 'default'}")
    from reef.ledger.ledger import check_url

    if training.backend == "none":
        lines.append("training  none: records only")
    else:
        from reef.training.architecture import check_layout, read_architecture
        from reef.training.settings import check_options

        check_layout(read_architecture(path), training.layout)
        check_options(training.options)
        lines.append(
            f"training  {config.recipe.implementation} on {training.layout.world_size} Megatron worker(s), "
            f"{config.recipe.config.batch_size} samples a step, scenario {config.recipe.scenario or '(the first)'}"
        )
    if config.evaluation.gate:
        lines.append(_gate(config))
    check_url(config.ledger_url)
    lines.append(f"storage   {config.ledger_url}, releases in {config.releases_dir}")
    lines.append(f"service   http://{config.reef.host}:{config.reef.port}, run directory {config.reef.run_dir}")
    return lines


def ledger(config: Config, say: Callable[[str], None], progress: Callable[[str], None]) -> int:
    """Check the whole ledger, and the directories that it names, beside a running service too. The number of findings.

    Raises:
        ConfigError, LedgerError: there is no ledger to check, or it is one of another version.
    """
    from reef.ledger.audit import audit, counts
    from reef.ledger.reading import open_reading

    num_found = 0
    with open_reading(config.ledger_url) as connection:
        for finding in audit(connection, progress):
            say(str(finding))
            num_found += 1
        rows = counts(connection)
    faults, left = _directories(config)
    if faults:  # a running service prunes: what the ledger does not name by now may be gone
        faults = faults & _directories(config)[0]
    for fault in sorted(faults):
        say(fault)
    for path in left:
        say(f"left over {path}: no release names it; the next start removes it")
    num_found += len(faults)
    say(f"{', '.join(f'{count} {name}' for name, count in rows.items())}: {num_found} findings")
    return num_found


def _directories(config: Config) -> tuple[set[str], list[Path]]:
    """What is wrong with the releases and checkpoints that the ledger names, and those that it does not name."""
    from reef.ledger import releases, scenarios
    from reef.ledger.reading import open_reading, run_id_of
    from reef.storage import checkpoint_of, left_overs, whole
    from reef.training.manifest import check_checkpoint, verify

    with open_reading(config.ledger_url) as connection:
        run_id, scenario = run_id_of(connection), scenarios.training(connection)
        restorable = releases.restorable(connection, scenario) if scenario else []
        checkpoints = releases.checkpoints(connection, scenario) if scenario else []
    faults = set()
    for release in restorable:
        try:
            if release.operation is not Operation.BASE:  # that is the model as it came, checked at every start
                verify(Path(whole(config.releases_dir, release).path))
        except LoadFailedError as error:
            faults.add(f"release {release.id}: {error.message}")
    for release in checkpoints:
        try:
            check_checkpoint(checkpoint_of(config.checkpoints_dir, release))
        except LoadFailedError as error:
            faults.add(f"checkpoint {release.id}: {error.message}")
    left = [
        path
        for parent, named in ((config.releases_dir, restorable), (config.checkpoints_dir, checkpoints))
        if parent.is_dir()
        for path in left_overs(parent, run_id, named)
    ]
    return faults, left


def _gate(config: Config) -> str:
    evaluation = config.evaluation
    if config.training.backend == "none":
        raise ConfigError("evaluation.gate: training.backend is none, so there is never a release to hold")
    if evaluation.command and shutil.which(evaluation.command[0]) is None:
        raise ConfigError(f"evaluation.command: there is no command {evaluation.command[0]}")
    how = f"measured by {' '.join(evaluation.command)}" if evaluation.command else "until results are posted"
    return f"gate      {', '.join(evaluation.gate)}; {how}"


def check_engine_options(options: Mapping[str, Any]) -> None:
    """Raises ConfigError for an option that the server does not have or refuses, or that Reef sets itself."""
    from reef.engines.embedded.__main__ import arguments

    parser = arguments()
    known = {option[2:] for action in parser._actions for option in action.option_strings if option[:2] == "--"}
    known -= {"help", *MANAGED}
    for name in options:
        name = name.replace("_", "-")
        if name in MANAGED:
            raise ConfigError(f"inference.options.{name} is set by Reef; what decides it: {MANAGED[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean inference.options.{near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key inference.options.{name}; {hint}")
    parser.exit_on_error = False
    try:
        parser.parse_args(["--model-path", ".", *flags(options)])
    except argparse.ArgumentError as error:
        raise ConfigError(f"inference.options: {error}") from None


def machine() -> list[str]:
    """Versions, cores, memory and disk, a line each."""
    memory = psutil.virtual_memory()
    lines = [
        f"python    {platform.python_version()} on {platform.platform()}",
        f"machine   {os.cpu_count()} cores, {memory.total / 2**30:.1f} GiB memory "
        f"({memory.available / 2**30:.1f} free), {shutil.disk_usage('.').free / 2**30:.1f} GiB of disk free here",
    ]
    for name in LIBRARIES:
        try:
            lines.append(f"{name:<14}{importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{name:<14}not installed")
    import torch

    lines.append(f"GPUs      {torch.cuda.device_count()}")
    return lines


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").exists():
        return True
    config = path / "tokenizer_config.json"
    return config.exists() and '"chat_template"' in config.read_text(encoding="utf-8")

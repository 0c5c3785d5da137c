"""What can be known before anything starts: is the configuration usable here, and what does this machine have?"""

import argparse
import difflib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from reef.cluster.address import check_cluster, find_cluster
from reef.config import Config, without_password
from reef.engines.launch import flags
from reef.errors import ConfigError, LoadFailedError
from reef.headers import read_headers
from reef.machine import LIBRARIES, check_disks, check_port, version
from reef.memory.hardware import Hardware, size_text
from reef.types import Operation

# Arguments of the embedded engine that Reef sets, and the setting that decides each.
MANAGED = {
    "model-path": "inference.model-path",
    "host": "nothing: engines listen on loopback",
    "port": "nothing: the kernel chooses it",
    "port-file": "nothing",
    "parent-pid": "nothing",
    "weight-version": "nothing: it is the release's id",
    "context-length": "inference.context-length",
    "api-key": "nothing: engines listen on loopback, and only Reef talks to them",
    "api-key-file": "nothing: Reef makes the keys of engines on other machines",
    "incremental-streaming-output": "nothing: Reef reads whole answers",
}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROUNDING = 0.01  # what rounding to bfloat16 moves log-probabilities by, at least, after a few steps
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found, a line each, and what stands in the way."""

    lines: list[str]
    problems: list[str]


def dry_run(config: Config, hardware: Hardware) -> Findings:
    """Check a configuration as far as that goes without starting anything. Problems: what does not fit the hardware.

    Raises:
        ConfigError: the model cannot be served or trained, an engine option is not one, or there is no such cluster.
    """
    lines = [line for check in CHECKS for line in check(config, hardware)]
    found = _fits(config, hardware)
    return Findings([*lines, *found.lines], found.problems)


def doctor(config: Config, hardware: Hardware) -> Findings:
    """As `dry_run`, but nothing ends it: whatever is missing is one of the problems."""
    lines: list[str] = []
    problems: list[str] = []
    for check in CHECKS:
        if problems and check in (_training, _engine):  # they read the model, which is what is wrong
            continue
        try:
            lines += check(config, hardware)
        except ConfigError as error:
            problems += [] if error.message in problems else [error.message]
    if not problems:
        found = _fits(config, hardware)
        lines, problems = [*lines, *found.lines], found.problems
    return Findings(lines, problems)


def port(config: Config, hardware: Hardware) -> None:
    """Raises ConfigError where the service could not listen by now. Nobody asks the ports of a simulated machine."""
    if not hardware.simulated:
        check_port(config.reef.host, config.reef.port)


def _model(config: Config, _hardware: Hardware) -> list[str]:
    path = config.inference.model_path
    if not path.is_dir():
        raise ConfigError(f"inference.model-path: no directory {path}")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"inference.model-path: {path} holds no .safetensors file")
    if not (path / "config.json").exists():
        raise ConfigError(f"inference.model-path: {path} holds no config.json")
    if missing := sorted(_named_by_index(path) - {file.name for file in files}):
        raise ConfigError(f"inference.model-path: {path} lacks {', '.join(missing)}, which its index names")
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"inference.model-path: {file} is not a whole safetensors file: {error}") from None
    if not any((path / name).exists() for name in TOKENIZERS):
        raise ConfigError(f"inference.model-path: no tokenizer in {path}: expected {' or '.join(TOKENIZERS)}")
    lines = [f"model     {path}: {len(files)} safetensors file(s), {_model_bytes(path) / 1e6:.1f} MB"]
    if not _has_chat_template(path):
        lines.append("          it has no chat template: /v1/completions works, /v1/chat/completions cannot")
    return lines


def _engine(config: Config, _hardware: Hardware) -> list[str]:
    inference = config.inference
    if inference.url is not None:
        host = urlsplit(inference.url).hostname
        if config.training.sync.transport == "distributed" and host not in LOOPBACK and find_cluster(config) is None:
            raise ConfigError(
                f"training.sync.transport is distributed, and the trainer's ranks meet on loopback, where {host} "
                "cannot join them: use transport disk, or a Ray cluster (training.ray-address)"
            )
        return [f"engine    attached: {inference.url}"]
    check_engine_options(config)
    if inference.backend == "embedded":
        from reef.engines.embedded.architecture import read_architecture
        from reef.engines.embedded.errors import ModelError

        try:
            read_architecture(inference.model_path)
        except ModelError as error:
            raise ConfigError(str(error), param="inference.model-path") from None
    options = f"options {inference.options or 'default'}"
    where = "on loopback" if find_cluster(config) is None else "on whatever node Ray gives it"
    return [f"engine    {inference.backend}, {options}, {where}, at a port that the kernel gives"]


def _training(config: Config, _hardware: Hardware) -> list[str]:
    training = config.training
    if training.backend == "none":
        return ["training  none: records only"]
    from reef.methods.base import build
    from reef.training.architecture import check_layout, check_recompute, read_architecture
    from reef.training.beside import check_beside
    from reef.training.settings import settings
    from reef.training.tensors import check_weights

    architecture = read_architecture(config.inference.model_path)
    check_layout(architecture, training.layout)
    check_recompute(architecture, training.layout, training.options)
    check_weights(config.inference.model_path, architecture)
    check_beside(build(settings(config)["method"]), architecture)
    _check_rounding(config)
    return [
        f"training  {config.recipe.implementation} on {training.layout.world_size} Megatron worker(s), "
        f"{config.recipe.values.get('batch_size', '?')} samples a step, "
        f"scenario {config.recipe.scenario or '(the first)'}"
    ]


def _check_rounding(config: Config) -> None:
    """Raises ConfigError where rounding alone has engine and trainer differ by more than is allowed after a load.

    A release has the dtype of the model that it began as, and two bfloat16 kernels agree less than two float32 ones.
    """
    path, trained = config.inference.model_path, config.training.dtype
    dtypes = {tensor.dtype for file in read_headers(path).values() for tensor in file.tensors.values()}
    if config.inference.verify_tolerance >= ROUNDING or (trained == "float32" and dtypes == {"F32"}):
        return
    if trained == "float32":
        why = f"training.dtype is float32, but the weights in {path} are {', '.join(sorted(dtypes))}, as each release's"
    else:
        why = f"training.dtype is {trained}"
    raise ConfigError(
        f"{why}: engine and trainer will differ by more than inference.verify-tolerance "
        f"({config.inference.verify_tolerance:g}), and releases be quarantined. Set training.dtype: bfloat16 and "
        "inference.verify-tolerance: 0.5, or train in float32 from a float32 copy of the model",
        param="inference.verify-tolerance",
    )


def _cluster(config: Config, hardware: Hardware) -> list[str]:
    address = (find_cluster if hardware.simulated else check_cluster)(config)
    if address is not None:
        asked = "; GPUs are simulated, so nobody asked it" if hardware.simulated else ", which answers"
        return [f"cluster   Ray at {address} ({address.source}){asked}"]
    return [] if config.training.backend == "none" else ["cluster   Ray, started here, on loopback"]


def _evaluation(config: Config, _hardware: Hardware) -> list[str]:
    return [_gate(config)] if config.evaluation.gate else []


def _storage(config: Config, _hardware: Hardware) -> list[str]:
    from reef.ledger.ledger import check_url

    check_url(config.ledger_url)
    lines = [f"storage   {without_password(config.ledger_url)}, releases in {config.releases_dir}"]
    if config.observability.wandb.enabled and version("wandb") is None:  # ends no start: what is missing comes later
        lines.append("wandb     enabled, but not installed: pip install 'reef[wandb]'")
    return lines


def _service(config: Config, _hardware: Hardware) -> list[str]:
    return [f"service   http://{config.reef.host}:{config.reef.port}, run directory {config.reef.run_dir}"]


def _versions(_config: Config, _hardware: Hardware) -> list[str]:
    return ["versions  " + ", ".join(f"{name} {version(name) or 'not installed'}" for name in LIBRARIES)]


CHECKS: tuple[Callable[[Config, Hardware], list[str]], ...] = (
    _model,
    _training,
    _engine,
    _cluster,
    _evaluation,
    _storage,
    _service,
    _versions,
)


def _fits(config: Config, hardware: Hardware) -> Findings:
    """Memory and disk: who takes how much of what, as far as the model's sizes are known."""
    from reef.memory.fit import plan
    from reef.memory.trainer import checkpoint_bytes
    from reef.training.architecture import read_architecture

    path = config.inference.model_path
    try:
        architecture = read_architecture(path)
    except ConfigError as error:  # only served: SGLang knows more models than Reef trains
        return Findings([f"memory    not known: {error.message}"], [])
    found = plan(config, architecture, _dtype(path), hardware, find_cluster(config))
    lines = [f"{'memory' if number == 0 else '':<10}{line}" for number, line in enumerate(found.lines)]
    releases = (config.storage.keep + config.storage.keep_checkpoints + 1) * _model_bytes(path)
    needs = {config.releases_dir: releases}
    if config.training.backend != "none":
        needs[config.checkpoints_dir] = (config.storage.keep_checkpoints + 1) * checkpoint_bytes(architecture, config)
        wanted = " and ".join(f"{size_text(need)} in {directory}" for directory, need in needs.items())
        lines.append(f"disk      {wanted}, once storage.keep and keep-checkpoints are reached")
    missing = [] if hardware.simulated or config.training.backend == "none" else check_disks(needs)
    return Findings(lines, [*found.problems, *missing])


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


def check_engine_options(config: Config) -> None:
    """Raises ConfigError for an option that the server does not have or refuses, or that Reef sets itself."""
    if config.inference.backend == "sglang":
        from reef.engines.sglang.options import check

        check(config)
        return
    from reef.engines.embedded.__main__ import arguments

    options = config.inference.options
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


def _has_chat_template(path: Path) -> bool:
    if (path / "chat_template.jinja").exists():
        return True
    config = path / "tokenizer_config.json"
    return config.exists() and '"chat_template"' in config.read_text(encoding="utf-8")


def _named_by_index(path: Path) -> set[str]:
    """Files that the weights' index names; none where there is no index."""
    index = path / "model.safetensors.index.json"
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.exists() else set()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"inference.model-path: cannot read {index}: {error!r}") from None


def _model_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.safetensors"))


def _dtype(path: Path) -> str:
    """What config.json says the weights are; transformers takes it for float32 where it says nothing."""
    values = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return str(values.get("dtype") or values.get("torch_dtype") or "float32")

"""Every knob in one place: precedence, spelling, the environment, and messages that say what was expected."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from reef.config import Config, SaoRecipe, load, split_flags
from reef.errors import ConfigError

ROOT = Path(__file__).parents[1]


def write(directory: Path, text: str) -> Path:
    path = directory / "serve.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, *flags: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        load(path, flags, environ or {})
    return refused.value.message


def test_without_a_file_everything_has_its_default() -> None:
    config = load(None, (), {})
    assert config == Config()
    assert (config.reef.host, config.reef.port, config.reef.token) == ("127.0.0.1", 8080, None)
    assert (config.recipe.config.group_size, config.recipe.config.batch_size) == (8, 64)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    path = write(tmp_path, "training: {options: {lr: 1.0e-3, clip-grad: 0.5, weight-decay: 0.1}}")
    environ = {"REEF__TRAINING__OPTIONS__LR": "2e-3", "REEF__TRAINING__OPTIONS__CLIP_GRAD": "0.25"}
    options = load(path, ["--training.options.lr", "3e-3"], environ).training.options
    assert (options.lr, options.clip_grad, options.weight_decay, options.adam_beta2) == (3e-3, 0.25, 0.1, 0.95)


@pytest.mark.parametrize("spelling", ["run-dir", "run_dir"])
def test_keys_may_be_written_with_hyphens_or_underscores(tmp_path: Path, spelling: str) -> None:
    path = write(tmp_path, f"reef: {{{spelling}: a}}")
    assert load(path, (), {}).reef.run_dir == Path("a")
    assert load(path, [f"--reef.{spelling}", "b"], {}).reef.run_dir == Path("b")
    assert load(path, [f"--reef.{spelling}=c"], {}).reef.run_dir == Path("c")
    assert load(path, (), {"REEF__REEF__RUN_DIR": "d"}).reef.run_dir == Path("d")


def test_values_of_the_environment_are_filled_in(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "reef: {port: '${PORT:-8081}', token: '${TOKEN:-}', run-dir: '${HOME_DIR}/runs/${NAME:-a}'}\n"
        "inference: {options: {num-threads: '${THREADS:-2}'}}\n",
    )
    config = load(path, (), {"HOME_DIR": "/home/x"})
    assert (config.reef.port, config.reef.token, config.reef.run_dir) == (8081, None, Path("/home/x/runs/a"))
    assert config.inference.options == {"num-threads": "2"}
    config = load(path, (), {"HOME_DIR": "", "PORT": "9", "TOKEN": "123", "NAME": "b c"})
    assert (config.reef.port, config.reef.run_dir) == (9, Path("/runs/b c"))
    assert config.reef.token is not None
    assert config.reef.token.get_secret_value() == "123"


def test_a_variable_that_is_not_set_and_has_no_default_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "reef: {token: '${REEF_TOKEN}'}")
    said = "the environment variable REEF_TOKEN is not set, and ${REEF_TOKEN} has no default"
    assert refusal(path) == f"{path}: {said}"


@pytest.mark.parametrize("text", ["12345", "007", "1e5", "on", "2024-01-01", "a: b", "[", "'", "#a", "a #b"])
def test_text_that_looks_like_a_number_or_a_date_is_still_text_where_text_is_meant(text: str) -> None:
    for config in (load(None, ["--reef.run-dir", text], {}), load(None, (), {"REEF__REEF__RUN_DIR": text})):
        assert config.reef.run_dir == Path(text)


def test_a_token_of_digits_is_a_token() -> None:
    token = load(None, (), {"REEF__REEF__TOKEN": "0123"}).reef.token
    assert token is not None
    assert token.get_secret_value() == "0123"


def test_flags_take_numbers_booleans_null_and_mappings() -> None:
    flags = ["--reef.port", "0", "--reef.implicit-scenarios", "false", "--storage.url", "null"]
    flags += ["--inference.options", "{num-threads: 2, skip-tokenizer-init: true}", "--training.options.lr", "2e-6"]
    config = load(None, [*flags, "--inference.options.random-seed=7"], {})
    assert (config.reef.port, config.reef.implicit_scenarios, config.storage.url) == (0, False, None)
    assert config.inference.options == {"num-threads": 2, "skip-tokenizer-init": True, "random-seed": "7"}
    assert config.training.options.lr == 2e-6


@pytest.mark.parametrize(
    ("flag", "hint"),
    [
        ("--reef.prot", "unknown key reef.prot; did you mean reef.port?"),
        ("--reef.run-dirs", "unknown key reef.run-dirs; did you mean reef.run-dir?"),
        ("--recipe.config.groupsize", "unknown key recipe.config.groupsize; did you mean recipe.config.group-size?"),
        ("--trainig.seed", "unknown key trainig; did you mean training?"),
        (
            "--training.layout.zzz",
            "unknown key training.layout.zzz; known: context, data, expert, pipeline, sequence-parallel, tensor",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(flag: str, hint: str) -> None:
    assert refusal(None, flag, "1") == hint


def test_an_unknown_key_of_the_file_or_the_environment_is_refused_too(tmp_path: Path) -> None:
    path = write(tmp_path, "storage: {keeps: 3}")
    assert refusal(path) == "unknown key storage.keeps; did you mean storage.keep?"
    assert "did you mean reef.port?" in refusal(None, environ={"REEF__REEF__PORTS": "1"})


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--reef.port", "99999"], ["reef.port", "less than or equal to 65535", "'99999'"]),
        (["--reef.port", "eighty"], ["reef.port", "valid integer", "'eighty'"]),
        (["--training.options.lr", "0"], ["training.options.lr", "greater than 0", "'0'"]),
        (["--training.options.lr", "nan"], ["training.options.lr", "finite number"]),
        (["--training.backend", "torch"], ["training.backend", "'megatron' or 'none'", "'torch'"]),
        (
            ["--recipe.config.batch-size", "60"],
            ["recipe.config.batch-size must be a multiple of group-size (8), got 60"],
        ),
        (["--recipe.scenario", "a b"], ["recipe.scenario: expected 1-64 letters, digits", "'a b'"]),
        (["--reef.host", "0.0.0.0"], ["reef.host 0.0.0.0 is not loopback: set reef.token"]),
        (["--reef.token", ""], ["reef.token is empty"]),
        (["--inference.url", "localhost:30000"], ["inference.url: expected http://HOST:PORT"]),
        (["--reef.port"], ["--reef.port needs a value"]),
        (["--reef.port.x", "1"], ["reef.port: ", "got dict"]),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_key_and_what_came(flags: list[str], parts: list[str]) -> None:
    message = refusal(None, *flags)
    assert all(part in message for part in parts), message


def test_every_wrong_value_is_reported_at_once() -> None:
    message = refusal(None, "--reef.port", "-1", "--storage.keep", "0")
    assert "reef.port" in message
    assert "storage.keep" in message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_loopback_needs_no_token_and_any_address_may_have_one(host: str) -> None:
    assert load(None, ["--reef.host", host], {}).reef.host == host
    assert load(None, ["--reef.host", "0.0.0.0", "--reef.token", "x"], {}).reef.host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n- b\n", "expected a mapping of sections, got list"),
        ("reef: [", "cannot read"),
        ("reef: 3\n", "reef: expected a mapping of settings"),
    ],
)
def test_a_file_of_another_shape_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(write(tmp_path, text))


def test_a_file_that_is_missing_or_no_text_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.yaml") == f"no configuration file at {tmp_path / 'no.yaml'}"
    path = tmp_path / "serve.yaml"
    path.write_bytes(b"\xff\xfe\x00reef")
    assert f"cannot read {path}" in refusal(path)
    assert f"cannot read {tmp_path}" in refusal(tmp_path)


def test_an_empty_file_and_sections_with_every_key_commented_out_are_the_defaults(tmp_path: Path) -> None:
    assert load(write(tmp_path, ""), (), {}) == Config()
    path = write(tmp_path, "reef:\n  # port: 1\nrecipe:\n  config:\n    # group-size: 2\n")
    assert load(path, (), {}) == Config()
    assert load(path, ["--reef.port", "1", "--recipe.config.group-size", "4"], {}).reef.port == 1


def test_secrets_are_in_no_dump_no_text_and_no_message(tmp_path: Path) -> None:
    url = "postgresql+psycopg://reef:hunter2@db:5432/reef"
    config = load(None, ["--reef.token", "hunter2", "--storage.url", url], {})
    assert config.ledger_url == url
    shown = json.dumps(config.dump()) + str(config) + repr(config.reef)
    assert "hunter2" not in json.dumps(config.dump())
    assert "hunter2" not in repr(config.reef)
    assert "postgresql+psycopg://reef:**********@db:5432/reef" in shown
    for text in ("reef: [{token: hunter2}]", "reef: {token: [hunter2]}", "reef: {token: {a: hunter2}}"):
        assert "hunter2" not in refusal(write(tmp_path, text))
    assert "hunter2" not in refusal(None, "--inference.url", "http://reef:hunter2@engine:30000")


def test_what_is_dumped_can_be_read_again(tmp_path: Path) -> None:
    config = load(ROOT / "serve.yaml", (), {})
    path = write(tmp_path, json.dumps(config.dump()))
    assert load(path, (), {}) == config


def test_the_file_in_the_repository_is_complete_and_takes_its_port_from_the_environment() -> None:
    assert load(ROOT / "serve.yaml", (), {}).reef.port == 8080
    config = load(ROOT / "serve.yaml", (), {"REEF_PORT": "9"})
    assert (config.reef.port, config.recipe.scenario) == (9, "arithmetic")


def test_places_are_derived_from_the_run_directory_unless_given() -> None:
    config = load(None, ["--reef.run-dir", "/runs/a"], {})
    places: list[Any] = [config.ledger_url, config.releases_dir, config.checkpoints_dir, config.logs_dir]
    assert places == [
        "sqlite:////runs/a/ledger.db",
        Path("/runs/a/releases"),
        Path("/runs/a/checkpoints"),
        Path("/runs/a/logs"),
    ]
    config = load(None, ["--storage.releases-dir", "/big", "--storage.url", "sqlite:///x.db"], {})
    assert (config.releases_dir, config.ledger_url) == (Path("/big"), "sqlite:///x.db")


def test_a_configuration_cannot_be_changed_once_read() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(None, (), {}).reef.port = 1  # type: ignore[misc]


def test_settings_are_told_apart_from_the_commands_own_options() -> None:
    line = ["serve", "-c", "a.yaml", "--reef.port", "0", "--dry-run", "--training.options.lr=-1", "--url", "http://x.y"]
    assert split_flags(line) == (
        ["--reef.port", "0", "--training.options.lr=-1"],
        ["serve", "-c", "a.yaml", "--dry-run", "--url", "http://x.y"],
    )


def test_every_key_says_what_it_is_for() -> None:
    def undescribed(model: Any, path: str) -> list[str]:
        missing = []
        for name, field in model.model_fields.items():
            if not field.description:
                missing.append(f"{path}.{name}")
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                missing += undescribed(field.annotation, f"{path}.{name}")
        return missing

    assert undescribed(Config, "") == []


@pytest.mark.parametrize(
    "path", [ROOT / "serve.yaml", *sorted((ROOT / "configs").glob("*.yaml"))], ids=lambda p: p.name
)
def test_a_flag_turns_every_shipped_file_to_sao(path: Path) -> None:
    environ = dict.fromkeys(re.findall(r"[$][{]([A-Z_]+)[}]", path.read_text()), "x")
    config = load(path, ["--recipe.implementation", "sao"], environ)
    assert isinstance(config.recipe, SaoRecipe)
    assert config.recipe.config.has_critic


def test_a_method_of_ones_own_gets_what_the_file_says_below_its_settings(tmp_path: Path) -> None:
    text = "recipe:\n  implementation: a.b:C\n  config:\n    per_part: {exact_match: 1.0}\n    top_k: 3\n"
    recipe = load(write(tmp_path, text), ["--recipe.config.top-k", "4"], {}).recipe
    assert recipe.values == {"per_part": {"exact_match": 1.0}, "top_k": "4"}  # its class reads numbers from text
    assert load(write(tmp_path, "recipe: {implementation: 'a.b:C', config: }\n"), [], {}).recipe.values == {}
    with pytest.raises(ConfigError, match=r"recipe\.config\.name: a batch's settings keep the method's own name"):
        load(write(tmp_path, "recipe: {implementation: 'a.b:C', config: {name: x}}\n"), [], {})


def test_what_a_recipe_is_not_is_said_without_names_of_classes(tmp_path: Path) -> None:
    for text in (
        "recipe: 5\n",
        "recipe: {config: [1]}\n",
        "recipe: {implementation: sao, config: {critic-options: 1}}\n",
    ):
        with pytest.raises(ConfigError) as refused:
            load(write(tmp_path, text), [], {})
        assert "expected a mapping of settings" in str(refused.value)
        assert "Recipe" not in str(refused.value)
    with pytest.raises(ConfigError, match="expected grpo, sao or the path of a class"):
        load(None, ["--recipe.implementation", ""], {})

"""Every knob: serve.yaml, the environment and flags, checked in one place.

Precedence: flag (`--training.options.lr 2e-6`) > environment (`REEF__TRAINING__OPTIONS__LR`) > file > default. Keys
are kebab-case, snake_case is accepted. `${NAME}` and `${NAME:-default}` in a value are taken from the environment. An
unknown key is an error that names the nearest known one.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, Discriminator, Field, SecretStr, Tag, ValidationError, field_validator, model_validator

from reef import keys
from reef.errors import ConfigError
from reef.options import OptimizerOptions
from reef.section import Section, kebab
from reef.shelf import GrpoConfig, SaoConfig

SCENARIO_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_WORDS: Mapping[str, bool | None] = {"true": True, "false": False, "null": None, "~": None}
_ENGINE_URL = re.compile(r"https?://[^/@?#\s]+(/[^@?#\s]*)?")
_HASH = re.compile(r"[0-9a-f]{64}")
ROLES = ("infer", "report", "admin")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
KEY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_WANDB_NAME = r"^[^/\\#?%:]{1,128}$"  # what wandb itself takes
_PASSWORD = re.compile(r"(://[^:/@]*:).*@")


class TokenEntry(Section):
    """A key of `reef.tokens`, as `reef token NAME` prints it. What is kept of the key itself is its hash.

    Refuses a hash that is not one, a scenario's name that is none, and an entry without roles.
    """

    name: str = Field(description="What the key is called: in messages, and nowhere else.")
    hash: str = Field(description="sha256 of the key, 64 hexadecimal digits.")
    scenarios: list[str] | None = Field(None, min_length=1, description="All that the key may see; none: everything.")
    roles: list[Literal["infer", "report", "admin"]] = Field(
        min_length=1, description="`infer`, `report`, `admin`: what the key may do."
    )

    @model_validator(mode="after")
    def _well_formed(self) -> "TokenEntry":
        if not KEY_NAME.fullmatch(self.name):
            raise ValueError(f"reef.tokens: a name has 1-64 letters, digits, '_' or '-', got {self.name[:80]!r}")
        if not _HASH.fullmatch(self.hash):
            raise ValueError(
                f"reef.tokens, {self.name}: hash is not the sha256 of a key (64 hexadecimal digits, lower case): make "
                f"one with `reef token {self.name}`"
            )
        for scenario in self.scenarios or ():
            if not SCENARIO_NAME.fullmatch(scenario):
                raise ValueError(f"reef.tokens, {self.name}: {scenario[:80]!r} is no scenario's name")
        return self


class ReefSection(Section):
    """The service: where it listens, who may ask, where it keeps its files, and how much it takes on at once.

    Refuses an empty token, one that cannot travel in an HTTP header, a name or a key that stands twice in `tokens`, a
    host that is not loopback without a key, and open access with a key or beyond loopback.
    """

    host: str = Field("127.0.0.1", description="Address to listen on. Anything but loopback needs a key.")
    port: int = Field(8080, ge=0, le=65535, description="Port to listen on; 0 lets the kernel choose one.")
    access: Literal["key", "open"] = Field(
        "key", description="Whether clients must send a key; `open`: none is asked, on loopback only."
    )
    token: SecretStr | None = Field(
        None,
        description="A key with every role. Without it and `tokens`, one is made at the first start: RUN-DIR/api-key.",
    )
    tokens: list[TokenEntry] = Field(
        default_factory=list, description="More keys, each with a name, a hash, roles and scenarios: `reef token NAME`."
    )
    run_dir: Path = Field(Path("work/run"), description="Holds the ledger, releases, checkpoints and logs. One owner.")
    ready_timeout: float = Field(300, gt=0, description="Seconds that engine and trainer may take to start, in all.")
    implicit_scenarios: bool = Field(True, description="A request that names an unknown scenario creates it.")
    max_body_bytes: int = Field(4 * 1024 * 1024, gt=0, description="Largest request body; over it: 413.")
    max_messages: int = Field(4096, gt=0, description="Messages in one request; over it: 413.")
    max_in_flight: int = Field(512, gt=0, description="Inference requests in work at once; over it: 429.")
    max_pending_writes: int = Field(4096, gt=0, description="Ledger writes waiting for a commit; over it: 503.")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="How much is logged.")

    @model_validator(mode="after")
    def _loopback_or_key(self) -> "ReefSection":
        if self.token is not None and not self.token.get_secret_value():
            raise ValueError("reef.token is empty: give a token, or leave the key out")
        if self.token is not None and not keys.VISIBLE.fullmatch(self.token.get_secret_value()):
            raise ValueError("reef.token: expected visible ASCII characters (it travels in an HTTP header)")
        if self.access == "open" and (self.token is not None or self.tokens):
            raise ValueError("reef.access is open, so nobody is asked for a key: leave reef.token and reef.tokens out")
        if self.host not in LOOPBACK and self.access == "open":
            raise ValueError(f"reef.access is open, but reef.host {self.host} is not loopback: set reef.access to key")
        if self.host not in LOOPBACK and self.token is None and not self.tokens:
            raise ValueError(
                f"reef.host {self.host} is not loopback: set reef.token or reef.tokens, or listen on 127.0.0.1"
            )
        return self

    @model_validator(mode="after")
    def _each_key_once(self) -> "ReefSection":
        hashes = [entry.hash for entry in self.tokens]
        if self.token is not None:
            hashes.append(keys.hash_of(self.token.get_secret_value()))
        names = [entry.name for entry in self.tokens]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"reef.tokens: {twice[0]} is the name of two keys")
        if len(set(hashes)) < len(hashes):
            raise ValueError("reef.tokens: one key stands twice")
        return self


class InferenceSection(Section):
    """The engines: which model they serve, how long requests may take, and how releases are loaded.

    Refuses a url that is not plain http or https, or that has a user, a password or a query; several replicas with one;
    tensor ranks for the embedded engine; and fewer devices than the engines take.
    """

    backend: Literal["embedded", "sglang"] = Field(
        "embedded", description="The server Reef starts when no url is given: ours, or SGLang."
    )
    url: str | None = Field(None, description="Attach to a running engine, e.g. http://127.0.0.1:30000.")
    replicas: int = Field(1, ge=1, description="Engines that Reef starts, each with the whole model; 1 with a url.")
    tensor: int = Field(1, ge=1, description="Tensor-parallel ranks of each engine (SGLang's tp-size).")
    devices: list[int] | None = Field(
        None,
        description="Numbers of the GPUs for the engines, `tensor` for each replica in turn; none: all are visible.",
    )
    model_path: Path = Field(
        Path("recipes/arithmetic/starter"), description="Hugging Face model directory of the base."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="The engine's own server arguments.")
    context_length: int | None = Field(None, gt=0, description="Longest prompt plus answer; none: the model's own.")
    sampling: Literal["honour", "neutral"] = Field(
        "honour", description="Obey a client's top-p and the like, or override them so that every answer can train."
    )
    history: Literal["exact", "template"] = Field(
        "exact", description="A later turn continues the ids of the turn before it, or all messages are rendered anew."
    )
    history_cache_tokens: int = Field(
        4_000_000, ge=0, description="Token ids of recent turns kept in memory (4 bytes each); others are read again."
    )
    tool_call_parser: str = Field("auto", description="How the model writes tool calls; auto: by its template.")
    reasoning_parser: str = Field("auto", description="How the model writes its thinking; auto: by its template.")
    pause_mode: Literal["retract", "in_place", "abort"] = Field("retract", description="What a load does to requests.")
    pause_wait_s: float = Field(30, ge=0, description="Seconds a request waits for a paused engine; then 503.")
    max_waiting: int = Field(512, gt=0, description="Requests that wait for an engine at once; over it: 429.")
    first_token_timeout_s: float = Field(
        300, gt=0, description="Seconds until a stream must have its first token, waiting included; then 504."
    )
    request_timeout_s: float = Field(600, gt=0, description="Seconds an engine may take for one request; then 504.")
    load_timeout_s: float = Field(120, gt=0, description="Seconds an engine may take to load and verify a release.")
    verify_tolerance: float = Field(
        1e-3,
        gt=0,
        description="Largest gap between engine and trainer in the probe's log-probabilities; with bfloat16 0.5 or so.",
    )
    max_restarts: int = Field(5, ge=0, description="Restarts of a dead engine in a row before Reef gives up on it.")

    @model_validator(mode="after")
    def _one_plain_url(self) -> "InferenceSection":
        if self.url is not None and not _ENGINE_URL.fullmatch(self.url):
            raise ValueError("inference.url: expected http://HOST:PORT (https too), without user, password or query")
        if self.url is not None and self.replicas > 1:
            raise ValueError(f"inference.replicas is {self.replicas}: Reef starts none where inference.url names one")
        return self

    @model_validator(mode="after")
    def _ranks_have_devices(self) -> "InferenceSection":
        if self.backend == "embedded" and self.tensor > 1:
            raise ValueError(f"inference.tensor is {self.tensor}: the embedded engine has one rank; use backend sglang")
        if self.devices is not None and len(self.devices) < self.replicas * self.tensor:
            raise ValueError(
                f"inference.devices names {len(self.devices)} GPUs, but {self.replicas} replicas of {self.tensor} "
                f"ranks take {self.replicas * self.tensor}"
            )
        return self


class RecipeSection(Section):
    """Which scenario trains, and by which method.

    Refuses a scenario name that `SCENARIO_NAME` does not match.
    """

    scenario: str | None = Field(None, description="The scenario that trains; none: the first one created.")
    implementation: str = Field(
        "grpo",
        description="The method that turns reports into updates: `grpo`, `sao`, or a class, `my_pkg.file:Class`.",
    )

    @model_validator(mode="after")
    def _scenario_name(self) -> "RecipeSection":
        if self.scenario is not None and not SCENARIO_NAME.fullmatch(self.scenario):
            raise ValueError(f"recipe.scenario: expected 1-64 letters, digits, '.', '_' or '-', got {self.scenario!r}")
        return self

    @property
    def values(self) -> dict[str, Any]:
        """The method's settings as JSON values, in snake_case."""
        return {}

    @property
    def group_size(self) -> int | None:
        """Rollouts of one prompt that are compared; None: the method compares none."""
        found: int | None = self.values.get("group_size")
        return found


class GrpoRecipe(RecipeSection):
    """A recipe with `implementation: grpo`."""

    config: GrpoConfig = Field(default_factory=lambda: GrpoConfig(), description="The method's settings.")

    @model_validator(mode="after")
    def _compares_several(self) -> "GrpoRecipe":
        if self.config.group_size == 1:  # here, since batches of an older Reef may have it
            raise ValueError(
                "recipe.config: group-size is 1, but a rollout alone is compared with nothing: use implementation sao"
            )
        return self

    @property
    def values(self) -> dict[str, Any]:
        """As `RecipeSection.values`."""
        return self.config.model_dump(mode="json")


class SaoRecipe(RecipeSection):
    """A recipe with `implementation: sao`."""

    config: SaoConfig = Field(default_factory=lambda: SaoConfig(), description="The method's settings.")

    @property
    def values(self) -> dict[str, Any]:
        """As `RecipeSection.values`."""
        return self.config.model_dump(mode="json")


class CustomRecipe(RecipeSection):
    """A recipe whose method is a class of the user's own, by its dotted path.

    Refuses a path that is none.
    """

    config: dict[str, Any] = Field(default_factory=dict, description="What the class is made with; it checks it.")

    @property
    def values(self) -> dict[str, Any]:
        """As `RecipeSection.values`."""
        return {name.replace("-", "_"): value for name, value in self.config.items()}

    @field_validator("config", mode="before")
    @classmethod
    def _nothing_is_empty(cls, value: Any) -> Any:
        return {} if value is None else value

    @model_validator(mode="after")
    def _no_name(self) -> "CustomRecipe":
        if "name" in self.config:
            raise ValueError(
                "recipe.config.name: a batch's settings keep the method's own name there; call it otherwise"
            )
        return self

    @model_validator(mode="after")
    def _dotted_path(self) -> "CustomRecipe":
        if not _CLASS_PATH.fullmatch(self.implementation):
            raise ValueError(
                f"recipe.implementation: expected grpo, sao or the path of a class like my_pkg.file:Class, "
                f"got {self.implementation[:80]!r}"
            )
        return self


RECIPES: Mapping[str, type[RecipeSection]] = {"grpo": GrpoRecipe, "sao": SaoRecipe}


def recipe_of(values: Any) -> type[RecipeSection]:
    """The section that a `recipe` is checked by: its `implementation` says."""
    name = values.get("implementation") if isinstance(values, dict) else getattr(values, "implementation", None)
    return RECIPES.get("grpo" if name is None else str(name), CustomRecipe)


class Layout(Section):
    """Ranks per dimension. Expert ranks are a division of the others, as in Megatron; the rest multiply.

    Refuses sequence parallelism without tensor ranks.
    """

    tensor: int = Field(1, ge=1, description="Tensor-parallel ranks.")
    pipeline: int = Field(1, ge=1, description="Pipeline-parallel ranks.")
    data: int = Field(1, ge=1, description="Data-parallel ranks.")
    context: int = Field(1, ge=1, description="Context-parallel ranks; not built yet, so 1.")
    expert: int = Field(1, ge=1, description="Expert-parallel ranks, for mixture-of-experts models.")
    sequence_parallel: bool = Field(False, description="Split norms and dropout over the tensor ranks too.")

    @model_validator(mode="after")
    def _sequence_over_tensor(self) -> "Layout":
        if self.sequence_parallel and self.tensor == 1:
            raise ValueError("training.layout.sequence-parallel splits over tensor ranks, and tensor is 1")
        return self

    @property
    def world_size(self) -> int:
        """The number of workers: tensor * pipeline * data * context."""
        return self.tensor * self.pipeline * self.data * self.context


class SyncSection(Section):
    """How new weights reach the engines.

    Refuses releases that stay off the disk with the disk as their transport.
    """

    transport: Literal["disk", "distributed"] = Field(
        "disk", description="Engines read the release's files, or the trainer sends its tensors (nccl; gloo on a CPU)."
    )
    bucket_bytes: int = Field(256 * 2**20, gt=0, description="Bytes of tensors sent at once by `distributed`.")
    disk_every: int = Field(1, ge=1, description="With `distributed`: write the weights of every Nth release only.")

    @model_validator(mode="after")
    def _disk_reads_files(self) -> "SyncSection":
        if self.transport == "disk" and self.disk_every > 1:
            raise ValueError(
                f"training.sync.disk-every is {self.disk_every}, but transport disk needs the files of every release"
            )
        return self


class TrainingSection(Section):
    """The trainer: its workers, optimizer, precision and checkpoints."""

    backend: Literal["megatron", "none"] = Field("megatron", description="The trainer; none: record only.")
    layout: Layout = Field(default_factory=lambda: Layout(), description="How the model is spread over workers.")
    ray_address: str | None = Field(
        None, description="Join this Ray cluster and leave it running; none: RAY_ADDRESS, else one of our own."
    )
    devices: list[int] | None = Field(
        None, description="Numbers of the GPUs for the workers, without a Ray cluster; none: all are visible."
    )
    options: OptimizerOptions = Field(default_factory=lambda: OptimizerOptions(), description="Optimizer and schedule.")
    sync: SyncSection = Field(default_factory=lambda: SyncSection(), description="How weights reach the engines.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Precision of the trained weights.")
    seed: int = Field(0, ge=0, description="Seed of the trainer's random numbers.")
    threads: int = Field(1, ge=1, description="CPU threads per worker.")
    micro_batch_tokens: int = Field(4096, gt=0, description="Padded tokens per microbatch.")
    checkpoint_every: int = Field(10, ge=1, description="Releases between trainer checkpoints.")
    max_replay_s: float = Field(
        300, gt=0, description="Seconds of steps that a crash may cost: a checkpoint is written before it is more."
    )
    step_timeout_s: float = Field(600, gt=0, description="Seconds a step may take before the workers count as lost.")
    ready_timeout: float = Field(180, gt=0, description="Seconds that Ray and the workers may take to start.")


class StorageSection(Section):
    """Where the ledger and the weights lie, and how much stays on disk."""

    url: str | None = Field(
        None, description="sqlite:///PATH or postgresql+psycopg://...; none: SQLite in the run directory."
    )
    lease_timeout_s: float = Field(
        10, ge=1, description="PostgreSQL: seconds after which a service that does not answer is replaced as the owner."
    )
    releases_dir: Path | None = Field(None, description="Where weights are published; none: RUN-DIR/releases.")
    keep: int = Field(8, ge=1, description="Releases whose weights stay on disk (the head and checkpoints' always do).")
    keep_checkpoints: int = Field(2, ge=1, description="Trainer checkpoints that stay on disk.")
    retention_days: float | None = Field(
        None, gt=0, description="Days after which a receipt's text, ids and log-probabilities go; none: they stay."
    )
    max_ledger_bytes: int | None = Field(
        None, gt=0, description="Over it, those of the oldest receipts go, however young; none: no limit."
    )


class Threshold(Section):
    """What a held-out result must reach: `min` is compared with the lower end of its interval, `max` with the upper."""

    min: float | None = Field(None, description="At least this much.")
    max: float | None = Field(None, description="At most this much.")

    @model_validator(mode="after")
    def _some_bound(self) -> "Threshold":
        if self.min is None and self.max is None:
            raise ValueError("evaluation.gate: each threshold needs min or max (or both)")
        return self


class CanarySection(Section):
    """Traffic that a held release answers, to compare it with the one that is served."""

    share: float = Field(0.0, ge=0, le=1, description="Share of requests that a held release answers.")
    min_reports: int = Field(64, ge=2, description="Scored reports on each side before they are compared.")


class EvaluationSection(Section):
    """The gate: a release is held, and training waits, until its held-out results pass every threshold.

    Refuses a canary without the threshold `canary`, that threshold without a canary, and a command without a gate.
    """

    gate: dict[str, Threshold] = Field(
        default_factory=dict,
        description="Thresholds by metric, e.g. {accuracy: {min: 0.5}, invalid-rate: {max: 0.05}}; none: no gate.",
    )
    command: list[str] = Field(
        default_factory=list,
        description="Run for each held release, with REEF_URL, REEF_SCENARIO, REEF_RELEASE set; prints a JSON result.",
    )
    command_timeout_s: float = Field(3600, gt=0, description="Seconds that the command may take.")
    canary: CanarySection = Field(default_factory=lambda: CanarySection(), description="Compare on live traffic.")
    engine_idle_s: float = Field(
        300, gt=0, description="Without requests for so long, an engine that is lent for an evaluation ends."
    )

    @model_validator(mode="after")
    def _gate_has_a_use(self) -> "EvaluationSection":
        if (self.canary.share > 0) != ("canary" in self.gate):
            raise ValueError(
                "evaluation.canary.share and evaluation.gate.canary belong together: a canary decides nothing without "
                "its threshold, e.g. evaluation.gate.canary: {min: -0.05}, and that threshold needs a share above 0"
            )
        if self.command and not self.gate:
            raise ValueError("evaluation.command: without evaluation.gate no release is held, so it would never run")
        return self


class WandbSection(Section):
    """One Weights & Biases run for the scenario that trains, which goes on after each restart."""

    enabled: bool = Field(False, description="Write each release's metrics to Weights & Biases.")
    project: str = Field("reef", pattern=_WANDB_NAME, description="Project name.")
    entity: str | None = Field(
        None, pattern=_WANDB_NAME, description="User or team that the project is of; none: the key's default."
    )
    mode: Literal["online", "offline"] | None = Field(
        None, description="Whether metrics are sent or kept in files; none: offline where no key is."
    )
    directory: Path | None = Field(None, description="Where its files go; none: RUN-DIR/wandb.")
    tags: list[Annotated[str, Field(min_length=1, max_length=64)]] = Field(
        default_factory=list, description="The run's tags."
    )


class AlarmSection(Section):
    """An alarm: a held-out metric, of which more is better, falls while the reward rises. It marks the release."""

    metric: str = Field(min_length=1, description="A held-out result's figure, e.g. accuracy.")
    drop: float = Field(ge=0, description="It fell by more than this, its interval considered.")
    reward_rise: float = Field(0.0, description="The mean reward rose by this at least.")
    window: int = Field(50, ge=1, description="Steps back to the oldest release that one is compared with.")


class ObservabilitySection(Section):
    """Where metrics go besides the service's own routes."""

    wandb: WandbSection = Field(default_factory=lambda: WandbSection(), description="Weights & Biases.")
    alarms: list[AlarmSection] = Field(
        default_factory=list, description="What marks a release, e.g. [{metric: accuracy, drop: 0.05}]; none: nothing."
    )

    @model_validator(mode="after")
    def _one_alarm_each(self) -> "ObservabilitySection":
        metrics = [kebab(alarm.metric) for alarm in self.alarms]
        for metric in metrics:
            if metrics.count(metric) > 1:
                raise ValueError(f"observability.alarms: {metric} is there more than once; each metric has one alarm")
        return self


class Config(Section):
    """A whole serve.yaml."""

    reef: ReefSection = Field(default_factory=lambda: ReefSection(), description="The service.")
    inference: InferenceSection = Field(default_factory=lambda: InferenceSection(), description="The engine.")
    recipe: Annotated[
        Annotated[GrpoRecipe, Tag("GrpoRecipe")]
        | Annotated[SaoRecipe, Tag("SaoRecipe")]
        | Annotated[CustomRecipe, Tag("CustomRecipe")],
        Discriminator(lambda values: recipe_of(values).__name__),
    ] = Field(default_factory=lambda: GrpoRecipe(), description="What trains, and how.")
    training: TrainingSection = Field(default_factory=lambda: TrainingSection(), description="The trainer.")
    storage: StorageSection = Field(default_factory=lambda: StorageSection(), description="The ledger and the weights.")
    evaluation: EvaluationSection = Field(
        default_factory=lambda: EvaluationSection(), description="What a release must show before it is served."
    )
    observability: ObservabilitySection = Field(
        default_factory=lambda: ObservabilitySection(), description="Metrics that leave the service."
    )

    @model_validator(mode="after")
    def _others_read_files(self) -> "Config":
        every = self.training.sync.disk_every
        readers = {
            "evaluation.gate": bool(self.evaluation.gate) and "a held release is loaded from its files",
            "storage.url": (self.storage.url or "").startswith("postgresql")
            and "other services load releases from their files",
        }
        for setting, why in readers.items():
            if why and every > 1:
                raise ValueError(f"training.sync.disk-every is {every}, but with {setting} {why}: set it to 1")
        return self

    @model_validator(mode="after")
    def _candidates_have_an_engine(self) -> "Config":
        if self.evaluation.gate and self.inference.url is not None:
            raise ValueError(
                "evaluation.gate: a held release is answered by an engine of its own, which Reef must start: "
                "leave inference.url out"
            )
        return self

    @property
    def ledger_url(self) -> str:
        """The ledger's SQLAlchemy URL: `storage.url`, else SQLite in the run directory. It may hold a password."""
        return self.storage.url or f"sqlite:///{self.reef.run_dir / 'ledger.db'}"

    @property
    def releases_dir(self) -> Path:
        """The directory where weights are published: `storage.releases-dir`, else RUN-DIR/releases."""
        return self.storage.releases_dir or self.reef.run_dir / "releases"

    @property
    def checkpoints_dir(self) -> Path:
        """The directory of the trainer's checkpoints: RUN-DIR/checkpoints."""
        return self.reef.run_dir / "checkpoints"

    @property
    def logs_dir(self) -> Path:
        """The directory of the logs: RUN-DIR/logs."""
        return self.reef.run_dir / "logs"

    def dump(self) -> dict[str, Any]:
        """The resolved configuration as JSON values in kebab-case; secrets are hidden."""
        values = self.model_dump(mode="json", by_alias=True)
        if self.storage.url is not None:
            values["storage"]["url"] = without_password(self.storage.url)
        return values


def load(path: Path | None, flags: Sequence[str] = (), environ: Mapping[str, str] | None = None) -> Config:
    """Read serve.yaml (None: all defaults), then the environment, then flags like `--reef.port 0`.

    Raises:
        ConfigError: the file is not there or not YAML, a key is unknown, or a value does not fit.
    """
    environ = os.environ if environ is None else environ
    read = _expand(_read(path), environ, where=str(path))
    values = _normalise(read)
    for dotted, value in [*_from_environ(environ), *_from_flags(flags)]:
        _set(values, dotted, value)
    recipe = values.get("recipe")
    if recipe_of(recipe) is CustomRecipe and isinstance(recipe, dict) and isinstance(recipe.get("config"), dict):
        recipe["config"] |= _as_written(read, recipe["config"])
    _refuse_unknown(Config, values, ())
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        lines = [_explain(detail) for detail in error.errors()]
        raise ConfigError("; ".join(lines)) from None


def _read(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"no configuration file at {path}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of sections, got {type(values).__name__}")
    return values


def _expand(value: Any, environ: Mapping[str, str], where: str) -> Any:
    if isinstance(value, dict):
        return {key: _expand(item, environ, where) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, environ, where) for item in value]
    if not isinstance(value, str):
        return value

    def replace(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        if name in environ:
            return environ[name]
        if default is None:
            raise ConfigError(f"{where}: the environment variable {name} is not set, and ${{{name}}} has no default")
        return default

    expanded = _VARIABLE.sub(replace, value)
    return None if expanded == "" and value != "" else expanded


def _normalise(value: Any) -> Any:
    """Keys to kebab-case, below `inference.options` too (engines take either)."""
    if isinstance(value, dict):
        return {kebab(str(key)): _normalise(item) for key, item in value.items()}
    return value


def _as_written(read: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Of a method of the user's own: what stands below its settings in the file, whose keys are its own affair."""
    written = (read.get("recipe") or {}).get("config") or {}
    kept = {kebab(str(name)): value for name, value in written.items() if isinstance(value, dict | list)}
    return {name: value for name, value in kept.items() if _normalise(value) == config.get(name)}


def _from_environ(environ: Mapping[str, str]) -> list[tuple[str, Any]]:
    return [
        (name.removeprefix("REEF__").replace("__", ".").lower(), _scalar(value))
        for name, value in sorted(environ.items())
        if name.startswith("REEF__")
    ]


def split_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into settings (`--section.key VALUE`, `--section.key=VALUE`) and the rest."""
    settings: list[str] = []
    others: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, _ = word.partition("=")
        if not (name.startswith("--") and "." in name):
            others.append(word)
            continue
        settings.append(word)
        if not equals and rest:
            settings.append(rest.pop(0))
    return settings, others


def _from_flags(flags: Sequence[str]) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    rest = list(flags)
    while rest:
        flag = rest.pop(0)
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"{flag} needs a value")
            value = rest.pop(0)
        found.append((name, _scalar(value)))
    return found


def _scalar(text: str) -> Any:
    """true, false, null, [lists] and {mappings}; anything else stays text until its field is known.

    So a token of digits is a token, and a directory named by a date is a directory.
    """
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if not text.startswith(("[", "{")):
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _set(values: dict[str, Any], dotted: str, value: Any) -> None:
    *parents, last = [kebab(part) for part in dotted.split(".")]
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ConfigError(f"{dotted}: {parent} is not a section")
    values[last] = value


def _refuse_unknown(model: type[BaseModel], values: Any, path: tuple[str, ...]) -> None:
    if not isinstance(values, dict):
        return
    known = {kebab(name): field for name, field in model.model_fields.items()}
    for key, value in values.items():
        dotted = ".".join((*path, key))
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            if path == ("recipe", "config") and (owner := _method_with(key)):
                raise ConfigError(f"{dotted} belongs to implementation {owner}", param=dotted)
            hint = f"; did you mean {'.'.join((*path, near[0]))}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key {dotted}{hint}", param=dotted)
        inner = recipe_of(value) if model is Config and key == "recipe" else known[key].annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            _refuse_unknown(inner, value, (*path, key))
        elif (entry := entries_of(inner)) is not None and isinstance(value, list):
            for item in value:
                _refuse_unknown(entry, item, (*path, key))


def _method_with(key: str) -> str | None:
    """The method that has this setting in its recipe.config."""
    for name, recipe in RECIPES.items():
        config = recipe.model_fields["config"].annotation
        if isinstance(config, type) and issubclass(config, Section) and key in map(kebab, config.model_fields):
            return name
    return None


def entries_of(annotation: Any) -> type[Section] | None:
    """The section that each entry of a list is; None where the field is no list of sections."""
    entry = next(iter(get_args(annotation)), None) if get_origin(annotation) is list else None
    return entry if isinstance(entry, type) and issubclass(entry, Section) else None


def _explain(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"] if not str(part).endswith("Recipe"))
    message = str(detail["msg"]).removeprefix("Value error, ")
    if where.startswith("recipe."):
        message = message.replace("training.options.", "recipe.config.critic-options.")
    if detail["type"] == "value_error":
        return message
    if detail["type"] == "model_type":
        message = "expected a mapping of settings"
    value = detail.get("input")
    shown = type(value).__name__ if isinstance(value, dict | list) else repr(value)
    if where.startswith("reef.token") and not where.endswith((".name", ".roles", ".scenarios")):
        shown = "a secret"  # or perhaps one: a key where its hash belongs
    return f"{where}: {message[:1].lower()}{message[1:]}, got {shown}"


def without_password(url: str) -> str:
    """The URL with its password hidden."""
    return _PASSWORD.sub(r"\1**********@", url)

"""recipe.config: the settings of the methods, and which of them contradict one another.

A method is a way to choose batches (`grpo`: groups of one prompt; `sao`: single rollouts) and a shelf of parts that
both share: advantage, ratio, correction, KL, aggregation. Every published variant is a choice of parts, see
docs/methods.md. What cannot go together is refused when serve.yaml is read, with the reason.
"""

from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from reef.options import OptimizerOptions
from reef.section import Section

GROUP_ADVANTAGES = ("grpo", "dr-grpo", "rloo", "maxrl", "reinforce++-baseline")
Ratio = Literal["ppo-clip", "gspo", "cispo", "sapo", "dis", "decoupled", "dppo", "none"]


class Bounds(NamedTuple):
    """How far a ratio may lie from 1: (1 - low, 1 + high), or for `dppo` how far a probability may have moved."""

    low: float
    high: float


# The sources' own; `dis` is the paper's for reasoning. Ratios that are missing here have no bounds.
BOUNDS: dict[str, Bounds] = {
    "ppo-clip": Bounds(0.2, 0.28),
    "gspo": Bounds(3e-4, 4e-4),
    "cispo": Bounds(1.0, 4.0),
    "dis": Bounds(0.3, 5.0),
    "decoupled": Bounds(0.2, 0.28),
    "dppo": Bounds(0.2, 0.2),
}
DIS_PRESETS: dict[str, Bounds] = {"reasoning": Bounds(0.3, 5.0), "coding": Bounds(0.8, 3.0)}


class CriticOptions(OptimizerOptions):
    """As `training.options`, of the critic."""

    lr: float = Field(5e-4, gt=0, description="Peak learning rate.")


class ShelfConfig(Section):
    """What `grpo` and `sao` share."""

    batch_size: int = Field(64, ge=1, description="Samples per optimizer step.")
    max_staleness: int = Field(4, ge=0, description="Policy updates a sample may lie behind the head.")

    normalize: Literal["none", "rms", "whiten"] = Field(
        "none",
        description="Scale the batch's token advantages: divide by their root mean square, or whiten (mean 0, std 1).",
    )
    gamma: float = Field(1.0, gt=0, le=1, description="Discount per sampled token (gae and reinforce++).")

    ratio: Ratio = Field("ppo-clip", description="How far the policy may move from the one that sampled.")
    old_policy: Literal["engine", "trainer"] = Field(
        "engine",
        description="What ratios divide by: the engine's log-probabilities, or the trainer's before the step.",
    )
    clip_low: float | None = Field(None, ge=0, description="Lower bound: ratios below 1 - clip-low; none: by ratio.")
    clip_high: float | None = Field(None, ge=0, description="Upper bound: ratios above 1 + clip-high; none: by ratio.")
    dual_clip: float | None = Field(
        None, gt=1, description="ppo-clip: a negative advantage costs at most this many times itself."
    )
    dis_preset: Literal["reasoning", "coding"] | None = Field(
        None, description="dis: the paper's bounds, reasoning (0.3, 5.0) or coding (0.8, 3.0)."
    )
    sapo_tau_positive: float = Field(1.0, gt=0, description="sapo: temperature where the advantage is positive.")
    sapo_tau_negative: float = Field(1.05, gt=0, description="sapo: temperature elsewhere.")
    behaviour_cap: float = Field(
        5.0, gt=0, description="decoupled: largest weight proximal / engine; more is left out."
    )
    proximal: Literal["trainer", "interpolated"] = Field(
        "interpolated", description="decoupled: between engine and trainer by a sample's age, or the trainer's own."
    )
    dppo_kl: float = Field(1e-3, ge=0, description="dppo: weight of the squared log-ratio.")

    correction: Literal["none", "tis", "icepop", "mis"] = Field(
        "none",
        description="Engine and trainer disagree: weigh tokens (tis), or weigh and leave out (icepop; mis: by level).",
    )
    correction_level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="mis: by token, by the product over a sequence, or by its geometric mean."
    )
    correction_low: float | None = Field(None, ge=0, description="Lower bound of the weight; none: by correction.")
    correction_high: float | None = Field(None, gt=0, description="Upper bound of the weight; none: by correction.")
    correction_veto: float | None = Field(
        None, gt=0, lt=1, description="mis: a token whose weight is below this leaves its whole sequence out."
    )
    sequence_mask: float | None = Field(
        None,
        gt=0,
        description="Leave out sequences of negative advantage that moved further than this (DeepSeek-V3.2).",
    )

    kl: Literal["none", "loss", "reward"] = Field("none", description="Where the KL to a frozen reference is counted.")
    kl_coef: float = Field(0.0, ge=0, description="Its weight.")
    kl_estimator: Literal["k1", "k2", "k3"] | None = Field(
        None, description="Schulman's estimator; none: k1 in the reward, k3 in the loss."
    )
    kl_reference: Path | None = Field(None, description="The reference's model directory; none: the base model.")

    aggregation: Literal["rollout-mean", "token-mean", "token-sum", "sequence-mean"] = Field(
        "rollout-mean",
        description="Mean over tokens then rollouts then prompts; over all tokens; sum over tokens by a constant; or "
        "mean over tokens then sequences.",
    )
    aggregation_tokens: int | None = Field(
        None, gt=0, description="token-sum: the constant, tokens of the longest answer (Dr.GRPO)."
    )

    overlong_tokens: int | None = Field(
        None, gt=0, description="DAPO's overlong shaping: the longest answer, in sampled tokens; none: no shaping."
    )
    overlong_buffer: int = Field(0, ge=0, description="Tokens before that over which the penalty grows.")
    overlong_penalty: float = Field(1.0, gt=0, description="The penalty at the end of the buffer.")
    overlong_filter: bool = Field(False, description="Leave answers that length cut out of the loss.")

    @property
    def bounds(self) -> Bounds:
        """The bounds of the ratio as configured. Raises KeyError for a ratio without any."""
        if self.dis_preset is not None:
            return DIS_PRESETS[self.dis_preset]
        default = BOUNDS[self.ratio]
        return Bounds(
            default.low if self.clip_low is None else self.clip_low,
            default.high if self.clip_high is None else self.clip_high,
        )

    @property
    def estimator(self) -> Literal["k1", "k2", "k3"]:
        """The KL's estimator: as configured, or what its place asks for.

        In a reward only k1's gradient is that of the KL; in a loss k1's is 0 on average.
        """
        return self.kl_estimator or ("k1" if self.kl == "reward" else "k3")

    @property
    def correction_bounds(self) -> Bounds:
        """The least and the largest weight of the correction as configured."""
        default = {"tis": Bounds(0.0, 2.0), "icepop": Bounds(0.5, 5.0), "mis": Bounds(0.5, 2.0)}[self.correction]
        return Bounds(
            default.low if self.correction_low is None else self.correction_low,
            default.high if self.correction_high is None else self.correction_high,
        )

    @field_validator("kl_reference", "critic_path", mode="after", check_fields=False)
    @classmethod
    def _whole_path(cls, path: Path | None) -> Path | None:
        """Workers may run in another directory, and a replay later."""
        if path is not None and not path.name:
            raise ValueError(f"recipe.config: expected the path of a model directory, got {str(path)!r}")
        return None if path is None else path.absolute()

    @model_validator(mode="after")
    def _ratio_has_its_own(self) -> "ShelfConfig":
        own: dict[str, tuple[str, ...]] = {
            "dual_clip": ("ppo-clip",),
            "dis_preset": ("dis",),
            "clip_low": tuple(BOUNDS),
            "clip_high": tuple(BOUNDS),
        }
        for name, ratios in own.items():
            if getattr(self, name) is not None and self.ratio not in ratios:
                _refuse(f"{_say(name)} is set", f"ratio is {self.ratio}, which has no use for it")
        for name, ratio in (
            ("sapo_tau_positive", "sapo"),
            ("sapo_tau_negative", "sapo"),
            ("behaviour_cap", "decoupled"),
            ("proximal", "decoupled"),
            ("dppo_kl", "dppo"),
        ):
            if self._is_changed(name) and self.ratio != ratio:
                _refuse(f"{_say(name)} is set", f"ratio is {self.ratio}: only {ratio} has a use for it")
        if self.dis_preset is not None and (self.clip_low is not None or self.clip_high is not None):
            _refuse("dis-preset gives both bounds", "clip-low or clip-high is set too: leave one of them out")
        if self.ratio == "dis" and 0.0 in self.bounds:
            _refuse(
                "a bound of dis is 0", "bounds are strict, so that every token of a fresh rollout would be left out"
            )
        if self.ratio == "decoupled" and self.proximal == "trainer" and self._sets_bounds:
            _refuse("clip-low or clip-high is set", "decoupled with proximal trainer clips nothing: its ratio is 1")
        if self.clip_low is not None and self.clip_low >= 1 and self.ratio not in ("cispo", "dppo"):
            _refuse(f"clip-low is {self.clip_low}", f"{self.ratio} needs a lower bound 1 - clip-low above 0")
        return self

    @model_validator(mode="after")
    def _one_correction(self) -> "ShelfConfig":
        if self.correction != "none" and self.ratio in ("dis", "decoupled", "dppo"):
            _refuse(
                f"correction {self.correction} weighs trainer against engine",
                f"{self.ratio} does that already: it would count twice",
            )
        if self.correction != "none" and self.old_policy == "engine" and self.ratio != "none":
            _refuse(
                f"correction {self.correction} weighs trainer against engine, and old-policy engine does that already",
                "set old-policy: trainer, so that the ratio is the trainer's alone",
            )
        if self.old_policy == "trainer" and self.ratio in ("dis", "decoupled", "dppo", "none"):
            _refuse("old-policy is trainer", f"{self.ratio} is defined against the engine's log-probabilities")
        if self.old_policy == "trainer" and self.correction == "none":
            _refuse(
                "old-policy is trainer",
                "correction is none: the ratio is 1 then, and nothing would hold stale rollouts back",
            )
        if self.old_policy == "trainer" and (self._sets_bounds or self.dual_clip is not None):
            _refuse("old-policy is trainer", "clip-low, clip-high or dual-clip is set: the ratio is 1, they do nothing")
        for name in ("correction_low", "correction_high", "correction_veto"):
            if getattr(self, name) is not None and self.correction == "none":
                _refuse(f"{_say(name)} is set", "correction is none")
        if (self.correction_level != "token" or self.correction_veto is not None) and self.correction != "mis":
            _refuse("correction-level and correction-veto belong to mis", f"correction is {self.correction}")
        if self.correction != "none" and self.correction_bounds.low > self.correction_bounds.high:
            low, high = self.correction_bounds
            _refuse(f"correction-low is {low}", f"correction-high is {high}: it must not be below")
        return self

    @model_validator(mode="after")
    def _kl_is_whole(self) -> "ShelfConfig":
        if (self.kl == "none") != (self.kl_coef == 0.0):
            _refuse(f"kl is {self.kl}", f"kl-coef is {self.kl_coef}: a KL needs a weight above 0, and no KL needs none")
        for name in ("kl_reference", "kl_estimator"):
            if self.kl == "none" and self._is_changed(name):
                _refuse(f"{_say(name)} is set", "kl is none, so that nothing is compared with a reference")
        return self

    @model_validator(mode="after")
    def _sums_have_a_constant(self) -> "ShelfConfig":
        if (self.aggregation == "token-sum") != (self.aggregation_tokens is not None):
            _refuse(
                f"aggregation is {self.aggregation}",
                f"aggregation-tokens is {self.aggregation_tokens}: token-sum needs it, nothing else has a use for it",
            )
        return self

    @model_validator(mode="after")
    def _overlong_is_whole(self) -> "ShelfConfig":
        if self.overlong_tokens is None:
            if self._is_changed("overlong_buffer") or self._is_changed("overlong_penalty"):
                _refuse("overlong-buffer and overlong-penalty shape by overlong-tokens", "it is not set")
        elif not 0 < self.overlong_buffer <= self.overlong_tokens:
            _refuse(
                f"overlong-buffer is {self.overlong_buffer}", f"expected 1 to overlong-tokens ({self.overlong_tokens})"
            )
        return self

    @property
    def _sets_bounds(self) -> bool:
        return self.clip_low is not None or self.clip_high is not None

    def _is_changed(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)


class GrpoConfig(ShelfConfig):
    """recipe.config for `implementation: grpo`: rollouts of one prompt are compared with each other."""

    group_size: int = Field(8, ge=1, description="Rollouts of one prompt that are compared.")
    group_deadline_s: float = Field(300, gt=0, description="Seconds after its first report when a group closes.")
    advantage: Literal["grpo", "dr-grpo", "rloo", "maxrl", "reinforce++-baseline"] = Field(
        "grpo", description="How a rollout is compared with its group."
    )
    std: Literal["population", "unbiased"] = Field("population", description="grpo: the deviation that divides.")
    std_eps: float = Field(1e-6, gt=0, description="Added to the variance (population) or to the deviation (unbiased).")
    tie_tolerance: float = Field(1e-6, ge=0, description="Rewards of a group closer than this count as tied.")
    filter_tied: bool = Field(True, description="Leave groups with tied rewards out (DAPO's dynamic sampling).")

    @model_validator(mode="after")
    def _whole_groups(self) -> "GrpoConfig":
        if self.batch_size % self.group_size:
            raise ValueError(
                f"recipe.config.batch-size must be a multiple of group-size ({self.group_size}), got {self.batch_size}"
            )
        return self

    @model_validator(mode="after")
    def _advantage_has_its_own(self) -> "GrpoConfig":
        for name in ("std", "std_eps"):
            if self._is_changed(name) and self.advantage != "grpo":
                _refuse(f"{_say(name)} is set", f"advantage is {self.advantage}, which divides by no deviation")
        if self.gamma != 1.0:
            _refuse(f"gamma is {self.gamma}", f"advantage {self.advantage} gives every token of a rollout the same")
        if self.normalize == "rms" and self.advantage == "reinforce++-baseline":
            _refuse("normalize is rms", "reinforce++-baseline whitens over the batch")
        return self


class SaoConfig(ShelfConfig):
    """recipe.config for `implementation: sao`: single rollouts, each against what a critic expected of it."""

    ratio: Ratio = Field("dis", description="How far the policy may move from the one that sampled.")
    advantage: Literal["gae", "running-mean", "reinforce++"] = Field(
        "gae", description="The baseline: a critic, the mean of the prompt's last rewards, or the batch's."
    )
    baseline_window: int = Field(8, ge=1, description="running-mean: rewards of a prompt that are remembered.")
    lambda_alpha: float | None = Field(
        1.5, gt=0, description="The policy's lambda is 1 - 1 / (alpha * l) for an answer of l tokens; none: it is 1."
    )
    lambda_length: Literal["action", "response"] = Field(
        "action", description="What l counts: sampled tokens, or all from the first to the last of them."
    )
    critic_lambda: float = Field(1.0, ge=0, le=1, description="Lambda of the critic's targets; 1: the returns.")
    values_from: Literal["before", "after"] = Field(
        "before", description="Baselines are the critic's before this step's updates, or after them."
    )
    bootstrap_truncated: bool = Field(
        False, description="An answer that length cut goes on in the critic's eyes; otherwise it ended there."
    )
    critic_updates: int = Field(2, ge=1, description="Updates of the critic per update of the policy.")
    critic_warmup_steps: int = Field(10, ge=0, description="Steps at first that update the critic alone.")
    critic_path: Path | None = Field(None, description="Model directory of the critic's body; none: the base model.")
    critic_freeze: Literal["none", "attention"] = Field("none", description="What of its body does not learn.")
    critic_value_clip: float | None = Field(
        0.2, gt=0, description="PPO's clipped value loss: what this step's updates moved so far gets no more gradient."
    )
    critic_options: CriticOptions = Field(
        default_factory=lambda: CriticOptions(), description="The critic's optimizer and schedule."
    )

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.advantage == "gae"

    @model_validator(mode="after")
    def _critic_or_not(self) -> "SaoConfig":
        only_gae = (
            *("lambda_alpha", "lambda_length", "critic_lambda", "values_from", "bootstrap_truncated", "critic_updates"),
            *("critic_warmup_steps", "critic_path", "critic_freeze", "critic_value_clip"),
        )
        if not self.has_critic:
            changed = [_say(name) for name in only_gae if self._is_changed(name)]
            if self.critic_options != CriticOptions():
                changed.append("critic-options")
            if changed:
                _refuse(f"{changed[0]} is set", f"advantage is {self.advantage}, which has no critic")
        if self._is_changed("lambda_length") and self.lambda_alpha is None:
            _refuse("lambda-length is set", "lambda-alpha is none, so that lambda is 1 for every length")
        if self._is_changed("baseline_window") and self.advantage != "running-mean":
            _refuse("baseline-window is set", f"advantage is {self.advantage}: only running-mean has a use for it")
        if self.critic_updates == 1 and self._is_changed("critic_value_clip") and self.critic_value_clip is not None:
            _refuse("critic-value-clip is set", "critic-updates is 1: at the first update nothing has moved yet")
        if self.advantage == "running-mean" and (self.kl == "reward" or self.overlong_tokens is not None):
            _refuse(
                "advantage running-mean compares with past scores",
                "kl: reward or overlong-tokens changes what new ones are worth, and past ones do not have it",
            )
        if self.gamma != 1.0 and self.advantage == "running-mean":
            _refuse(f"gamma is {self.gamma}", "advantage running-mean gives every token of a rollout the same")
        if self.normalize == "rms" and self.advantage == "reinforce++":
            _refuse("normalize is rms", "reinforce++ whitens over the batch")
        return self

    @model_validator(mode="after")
    def _critic_is_built_as_the_policy(self) -> "SaoConfig":
        plain = OptimizerOptions()
        for name in BUILT_WITH:
            if getattr(self.critic_options, name) != getattr(plain, name):
                _refuse(f"critic-options.{_say(name)} is set", "training.options has it, for policy and critic both")
        return self


# Of OptimizerOptions: how a model is built, the same for policy and critic. The rest is each one's own.
BUILT_WITH = (
    *("use_distributed_optimizer", "overlap_grad_reduce"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
)


def critic_options(config: SaoConfig, policy: OptimizerOptions) -> OptimizerOptions:
    """The critic's optimizer and schedule, built as the policy's model is."""
    built: dict[str, Any] = {name: getattr(policy, name) for name in BUILT_WITH}
    return config.critic_options.model_copy(update=built)


def _say(name: str) -> str:
    return name.replace("_", "-")


def _refuse(what: str, why: str) -> None:
    raise ValueError(f"recipe.config: {what}, but {why}")

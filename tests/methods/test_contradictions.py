"""What recipe.config refuses, each with its reason, and the published variants that it takes. Read as serve.yaml is."""

import shlex
from pathlib import Path

import pytest
import yaml

from reef.config import load
from reef.errors import ConfigError
from reef.methods.base import Method, build
from reef.methods.composed import Composed
from tests.methods.variants import VARIANTS


def method_of(settings: str, implementation: str = "grpo") -> Method:
    """The method of `ratio=gspo clip-low=3e-4 ...`, by flags over the defaults."""
    flags = ["--recipe.implementation", implementation]
    for setting in shlex.split(settings):
        name, _, value = setting.partition("=")
        flags += [f"--recipe.config.{name}", value]
    config = load(None, flags, {})
    return build({"name": implementation, **config.recipe.config.model_dump(mode="json")})  # type: ignore[attr-defined]


BOTH = [
    # a ratio has settings of its own
    ("ratio=gspo dual-clip=3", "dual-clip is set, but ratio is gspo, which has no use for it"),
    ("ratio=ppo-clip dis-preset=coding", "dis-preset is set, but ratio is ppo-clip, which has no use for it"),
    ("ratio=sapo clip-low=0.2", "clip-low is set, but ratio is sapo, which has no use for it"),
    ("ratio=none clip-high=0.2", "clip-high is set, but ratio is none, which has no use for it"),
    ("ratio=ppo-clip sapo-tau-positive=2", "sapo-tau-positive is set, but ratio is ppo-clip: only sapo has a use"),
    ("ratio=ppo-clip sapo-tau-negative=2", "sapo-tau-negative is set, but ratio is ppo-clip: only sapo has a use"),
    ("ratio=ppo-clip behaviour-cap=2", "behaviour-cap is set, but ratio is ppo-clip: only decoupled has a use"),
    ("ratio=dis proximal=trainer", "proximal is set, but ratio is dis: only decoupled has a use"),
    ("ratio=dis dppo-kl=0.1", "dppo-kl is set, but ratio is dis: only dppo has a use"),
    ("ratio=dis dis-preset=coding clip-high=2", "dis-preset gives both bounds, but clip-low or clip-high is set too"),
    ("ratio=dis dis-preset=coding clip-low=0", "dis-preset gives both bounds, but clip-low or clip-high is set too"),
    ("ratio=dis clip-low=0", "a bound of dis is 0, but bounds are strict, so that every token of a fresh rollout"),
    ("ratio=dis clip-high=0", "a bound of dis is 0, but bounds are strict, so that every token of a fresh rollout"),
    ("ratio=decoupled proximal=trainer clip-low=0.1", "decoupled with proximal trainer clips nothing: its ratio is 1"),
    ("ratio=ppo-clip old-policy=trainer", "old-policy is trainer, but correction is none: the ratio is 1 then"),
    ("ratio=ppo-clip old-policy=trainer correction=tis clip-low=0.1", "the ratio is 1, they do nothing"),
    ("ratio=ppo-clip old-policy=trainer correction=tis dual-clip=3", "the ratio is 1, they do nothing"),
    ("ratio=dis clip-low=1", "clip-low is 1.0, but dis needs a lower bound 1 - clip-low above 0"),
    ("ratio=ppo-clip clip-low=1.5", "clip-low is 1.5, but ppo-clip needs a lower bound 1 - clip-low above 0"),
    # the engine's distance from the trainer is counted once
    ("ratio=dis correction=tis", "correction tis weighs trainer against engine, but dis does that already"),
    ("ratio=decoupled correction=icepop", "correction icepop weighs trainer against engine, but decoupled does that"),
    ("ratio=dppo correction=mis", "correction mis weighs trainer against engine, but dppo does that already"),
    ("ratio=ppo-clip correction=tis", "old-policy engine does that already, but set old-policy: trainer"),
    ("ratio=dis old-policy=trainer", "old-policy is trainer, but dis is defined against the engine's"),
    ("ratio=decoupled old-policy=trainer", "old-policy is trainer, but decoupled is defined against the engine's"),
    ("ratio=dppo old-policy=trainer", "old-policy is trainer, but dppo is defined against the engine's"),
    ("ratio=none old-policy=trainer", "old-policy is trainer, but none is defined against the engine's"),
    ("correction-low=0.5", "correction-low is set, but correction is none"),
    ("correction-high=2", "correction-high is set, but correction is none"),
    ("correction-veto=1e-4", "correction-veto is set, but correction is none"),
    (
        "ratio=none correction-level=sequence",
        "correction-level and correction-veto belong to mis, but correction",
    ),
    ("ratio=none correction=tis correction-level=geometric", "correction-veto belong to mis, but correction is tis"),
    ("ratio=none correction=icepop correction-veto=1e-4", "correction-veto belong to mis, but correction is icepop"),
    ("ratio=none correction=mis correction-low=3", "correction-low is 3.0, but correction-high is 2.0: it must not be"),
    # a KL is whole
    ("kl=loss", "kl is loss, but kl-coef is 0.0: a KL needs a weight above 0"),
    ("kl-coef=0.1", "kl is none, but kl-coef is 0.1: a KL needs a weight above 0, and no KL needs none"),
    ("kl-reference=models/frozen", "kl-reference is set, but kl is none, so that nothing is compared with a reference"),
    ("kl-estimator=k1", "kl-estimator is set, but kl is none, so that nothing is compared with a reference"),
    # and so is a sum, and the shaping of long answers
    ("aggregation=token-sum", "aggregation is token-sum, but aggregation-tokens is None: token-sum needs it"),
    ("aggregation-tokens=100", "aggregation is rollout-mean, but aggregation-tokens is 100"),
    ("overlong-buffer=10", "overlong-buffer and overlong-penalty shape by overlong-tokens, but it is not set"),
    ("overlong-penalty=2", "overlong-buffer and overlong-penalty shape by overlong-tokens, but it is not set"),
    ("overlong-tokens=100", "overlong-buffer is 0, but expected 1 to overlong-tokens (100)"),
    ("overlong-tokens=100 overlong-buffer=101", "overlong-buffer is 101, but expected 1 to overlong-tokens (100)"),
]
GRPO = [
    ("batch-size=60", "recipe.config.batch-size must be a multiple of group-size (8), got 60"),
    ("group-size=1", "group-size is 1, but a rollout alone is compared with nothing: use implementation sao"),
    ("advantage=dr-grpo std=unbiased", "std is set, but advantage is dr-grpo, which divides by no deviation"),
    ("advantage=rloo std-eps=1e-4", "std-eps is set, but advantage is rloo, which divides by no deviation"),
    ("gamma=0.9", "gamma is 0.9, but advantage grpo gives every token of a rollout the same"),
    ("advantage=reinforce++-baseline normalize=rms", "normalize is rms, but reinforce++-baseline whitens over"),
    ("advantage=gae", "recipe.config.advantage: input should be 'grpo', 'dr-grpo'"),
]
SAO = [
    ("advantage=reinforce++ lambda-alpha=2", "lambda-alpha is set, but advantage is reinforce++, which has no critic"),
    ("advantage=running-mean lambda-length=response", "lambda-length is set, but advantage is running-mean, which has"),
    ("advantage=running-mean critic-lambda=0.9", "critic-lambda is set, but advantage is running-mean, which has no"),
    ("advantage=running-mean values-from=after", "values-from is set, but advantage is running-mean, which has no"),
    ("advantage=running-mean bootstrap-truncated=true", "bootstrap-truncated is set, but advantage is running-mean"),
    ("advantage=running-mean critic-updates=1", "critic-updates is set, but advantage is running-mean, which has no"),
    ("advantage=running-mean critic-warmup-steps=0", "critic-warmup-steps is set, but advantage is running-mean"),
    ("advantage=running-mean critic-path=models/critic", "critic-path is set, but advantage is running-mean"),
    ("advantage=running-mean critic-freeze=attention", "critic-freeze is set, but advantage is running-mean"),
    ("advantage=running-mean critic-value-clip=0.5", "critic-value-clip is set, but advantage is running-mean"),
    ("advantage=running-mean critic-options.lr=1e-3", "critic-options is set, but advantage is running-mean"),
    ("lambda-alpha=null lambda-length=response", "lambda-length is set, but lambda-alpha is none"),
    ("baseline-window=4", "baseline-window is set, but advantage is gae: only running-mean has a use for it"),
    ("advantage=running-mean gamma=0.9", "gamma is 0.9, but advantage running-mean gives every token of a rollout"),
    ("advantage=reinforce++ normalize=rms", "normalize is rms, but reinforce++ whitens over the batch"),
    (
        "critic-options.use-distributed-optimizer=true",
        "critic-options.use-distributed-optimizer is set, but training.options has it, for policy and critic both",
    ),
    ("group-size=8", "recipe.config.group-size belongs to implementation grpo"),
    ("critic-updates=1 critic-value-clip=0.1", "critic-value-clip is set, but critic-updates is 1: at the first"),
    ("advantage=running-mean kl=reward kl-coef=0.1", "running-mean compares with past scores, but kl: reward or"),
    ("advantage=running-mean overlong-tokens=9 overlong-buffer=3", "compares with past scores, but kl: reward or"),
    ("critic-path=", "expected the path of a model directory, got '.'"),
]


@pytest.mark.parametrize(
    ("implementation", "settings", "reason"),
    [
        *(("grpo", *case) for case in [*BOTH, *GRPO]),
        # what sao has by default, dis, is what grpo has to choose
        *(("sao", f"ratio=ppo-clip {settings}", reason) for settings, reason in BOTH if "ratio=" not in settings),
        *(("sao", *case) for case in [*(case for case in BOTH if "ratio=" in case[0]), *SAO]),
    ],
)
def test_settings_that_contradict_are_refused_with_the_reason(implementation: str, settings: str, reason: str) -> None:
    with pytest.raises(ConfigError) as refused:
        method_of(settings, implementation)
    assert reason in str(refused.value)


@pytest.mark.parametrize("name", ["clip-low", "kl-coef", "overlong-penalty", "correction-high"])
@pytest.mark.parametrize("value", [".nan", ".inf", "-1"])
def test_numbers_that_are_none_or_negative_are_refused(name: str, value: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"recipe:\n  config:\n    {name}: {value}\n")
    with pytest.raises(ConfigError, match=rf"recipe\.config\.{name}"):
        load(path, [], {})


@pytest.mark.parametrize("variant", VARIANTS, ids=[variant.name for variant in VARIANTS])
def test_a_published_variant_loads_from_serve_yaml(variant: object, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"recipe": {"implementation": variant.implementation, "config": variant.config}}))  # type: ignore[attr-defined]
    config = load(path, [], {})
    settings = config.recipe.config.model_dump(mode="json")  # type: ignore[attr-defined]
    method = build({"name": config.recipe.implementation, **settings})
    assert isinstance(method, Composed)
    assert method.config.model_dump(mode="json") == settings  # what a batch keeps says all of it
    for key, value in variant.config.items():  # type: ignore[attr-defined]
        assert settings[key.replace("-", "_")] == value


def test_the_table_in_the_docs_has_the_variants_settings() -> None:
    text = (Path(__file__).parents[2] / "docs/methods.md").read_text()
    for variant in VARIANTS:
        row = next(line for line in text.splitlines() if line.startswith(f"| {variant.name} |"))
        stated = [cell.strip() for cell in row.split("|")][2:4]
        assert stated[0] == f"`{variant.implementation}`"
        assert yaml.safe_load("{" + stated[1].strip("`") + "}") == variant.config, variant.name


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ("", (0.3, 5.0)),
        ("dis-preset=coding", (0.8, 3.0)),
        ("dis-preset=reasoning", (0.3, 5.0)),
        ("clip-high=3", (0.3, 3.0)),
        ("ratio=cispo", (1.0, 4.0)),
        ("ratio=gspo", (3e-4, 4e-4)),
        ("ratio=ppo-clip clip-low=0.1", (0.1, 0.28)),
    ],
)
def test_a_ratio_has_the_bounds_of_its_source_where_none_are_set(settings: str, bounds: tuple[float, float]) -> None:
    method = method_of(settings, "sao")
    assert isinstance(method, Composed)
    assert method.config.bounds == bounds

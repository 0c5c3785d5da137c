"""A class of the user's own is a method: the one that docs/methods.md shows, and those that start from ours."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import Field

from reef.config import load
from reef.errors import ConfigError
from reef.methods.base import Method, Tokens, View, build
from reef.methods.grpo import Grpo
from reef.methods.sao import Sao
from reef.shelf import GrpoConfig, SaoConfig
from reef.types import Candidate, Doubles
from tests.methods import own_method
from tests.methods.samples import make_sample

PATH = "tests.methods.own_method:Imitate"
HERE = "tests.methods.test_own_method"


class RankedConfig(GrpoConfig):
    """Grpo's settings and one more."""

    spread: float = Field(1.0, gt=0, description="Advantage of the best of a group.")


class Ranked(Grpo):
    """GRPO on ranks instead of rewards."""

    config: RankedConfig

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__(RankedConfig.model_validate(config))

    def compare(self, rewards: Sequence[float]) -> Doubles:
        """-spread for the worst to spread for the best."""
        ranks = np.argsort(np.argsort(rewards))
        return np.asarray(self.config.spread * (2 * ranks / max(len(rewards) - 1, 1) - 1))


class Patient(Sao):
    """A method without a constructor of its own."""


class Unaimed(own_method.Imitate):
    """A critic beside it, and nothing that it should learn."""

    def __init__(self, config: dict[str, object]) -> None:
        super().__init__(config)
        self.critic = SaoConfig()


class Silent(Method):
    """A method that misses all but its constructor."""


def test_the_class_in_the_docs_is_the_one_that_is_tested_and_under_40_lines() -> None:
    text = (Path(__file__).parents[2] / "docs/methods.md").read_text()
    source = Path(own_method.__file__).read_text()
    shown = source[source.index("import numpy") :].strip()
    assert f"```python\n{shown}\n```" in text
    assert shown.count("\n") < 40


def test_it_is_chosen_by_its_path_and_takes_recipe_config() -> None:
    flags = ["--recipe.implementation", PATH, "--recipe.config.threshold", "0.5", "--recipe.config.batch-size", "2"]
    recipe = load(None, flags, {}).recipe
    method = build({"name": recipe.implementation, **recipe.config})  # type: ignore[attr-defined]
    assert isinstance(method, own_method.Imitate)
    assert (method.config.threshold, method.config.batch_size) == (0.5, 2)
    assert (method.critic, method.uses_reference, method.history_window) == (None, False, 0)


def test_it_selects_weighs_and_trains() -> None:
    method = build({"name": PATH, "threshold": 0.5, "batch_size": 2})
    pending = [Candidate(f"{k}", k, "g", score, ("r0",), 0.0) for k, score in enumerate([1, 0, 0.5, 1])]
    selection = method.select(pending, dict.fromkeys("0123", 0), 0.0)
    assert [pick.report_id for pick in selection.picks] == ["0", "2"]
    assert [(drop.report_id, drop.reason) for drop in selection.drops] == [("1", "not_imitated")]

    samples = [make_sample("0", "011"), make_sample("2", "001", 0.5)]
    assert [a.tolist() for a in method.advantages(samples, [View()] * 2, {})] == [[0, 1, 1], [0, 0, 1]]
    assert [w.tolist() for w in method.token_weights(samples)] == [[0, 0.25, 0.25], [0, 0, 0.5]]
    assert method.metrics(samples) == {"reward_mean": 0.75}
    logprobs = torch.tensor([-1.0, -2.0, float("nan")], requires_grad=True)
    tokens = Tokens(
        logprobs=logprobs,
        engine_logprobs=torch.zeros(3),
        advantages=torch.ones(3),
        mask=torch.tensor([True, True, False]),
        sequences=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        lags=torch.zeros(3),
    )
    loss, metrics = method.token_loss(tokens)
    loss.sum().backward()
    assert (loss.tolist(), metrics["imitated_logprob"].tolist()) == ([1, 2, 0], [-1, -2, 0])
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-1, -1, 0]


def test_a_class_may_start_from_ours_with_settings_of_its_own() -> None:
    method = build({"name": f"{HERE}:Ranked", "spread": 2.0, "group-size": 4, "batch-size": 8})
    samples = [make_sample(f"{k}", "01", reward) for k, reward in enumerate([0.1, 99.0, 0.2])]
    assert [a[1] for a in method.advantages(samples, [View()] * 3, {})] == [-2, 2, 0]
    assert isinstance(method, Grpo)
    assert (method.config.group_size, method.config.batch_size) == (4, 8)


def test_a_class_that_only_inherits_takes_the_settings_of_ours() -> None:
    method = build({"name": f"{HERE}:Patient", "batch-size": 3, "advantage": "running-mean", "baseline-window": 5})
    assert isinstance(method, Sao)
    assert (method.config.batch_size, method.history_window) == (3, 5)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"name": "tests.methods.nowhere:Imitate"}, "cannot be imported: No module named 'tests.methods.nowhere'"),
        ({"name": "tests.methods.own_method:Nobody"}, "cannot be imported: module .* has no attribute 'Nobody'"),
        ({"name": "reef.shelf:GrpoConfig"}, "is no reef.methods.base.Method"),
        ({"name": "tests.methods.own_method:np"}, "is no reef.methods.base.Method"),
        ({"name": PATH, "threshold": "high"}, "refuses its config: threshold: Input should be a valid number"),
        ({"name": f"{HERE}:Patient", "group_size": 8}, "refuses its config: (?s:.*)Extra inputs are not permitted"),
        ({"name": f"{HERE}:Patient", "clip-low": 2}, "refuses its config: (?s:.*)lower bound 1 - clip-low above 0"),
        ({"name": f"{HERE}:Unaimed"}, "has a critic and no critic_targets"),
        ({"name": f"{HERE}:Silent"}, "refuses its config: Can't instantiate abstract class Silent"),
    ],
)
def test_a_path_that_leads_to_no_method_is_an_error_that_says_so(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(settings)


def test_a_method_without_settings_refuses_any() -> None:
    class Plain(own_method.Imitate):
        __init__ = Method.__init__

    with pytest.raises(ValueError, match="Plain has no settings, got threshold"):
        Plain({"threshold": 1})
    Plain({})

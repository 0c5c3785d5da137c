"""SAO, Single-Rollout Asynchronous Optimization (2607.07508): every graded rollout joins the next step, on its own.

Nothing is grouped and nothing waits: `Sao.select` takes reports in order of arrival, `batch_size` of them at once.
Reports of an abandoned branch are dropped (`abandoned`), and so are those older than `max_staleness` (`stale`).

What a rollout was worth is told by a critic (`gae`), or without one by the prompt's past rewards (`running-mean`) or
the batch (`reinforce++`). Token by token (`gae` and `reinforce++`) the outcome is paid at the last sampled token of a
sequence and a turn's own score at the last token of the turn. A report that gave several sequences (branches) pays
its outcome at the end of each: each of them led to it. `running-mean` compares whole rollouts, by `score` alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from reef.methods.advantages import running_mean_advantages
from reef.methods.base import View
from reef.methods.composed import Composed
from reef.methods.gae import adaptive_lambda, skip_observation_gae, suffix_sums, values_before
from reef.methods.rewards import rollout_of, rollout_rewards, token_rewards
from reef.shelf import SaoConfig
from reef.types import Candidate, Doubles, Drop, Floats, Pick, Sample, Selection


class Sao(Composed):
    """The `sao` method: see the module's docstring and docs/methods.md."""

    config: SaoConfig

    def __init__(self, config: SaoConfig | Mapping[str, Any]) -> None:
        checked = config if isinstance(config, SaoConfig) else SaoConfig.model_validate(config)
        super().__init__(checked)
        self.critic = checked if checked.has_critic else None
        self.history_window = checked.baseline_window if checked.advantage == "running-mean" else 0

    def select(self, candidates: Sequence[Candidate], staleness: Mapping[str, int | None], now: float) -> Selection:
        """The oldest `batch_size` reports that are fresh enough, as soon as there are so many; nothing has a deadline.

        Each is a group of its own, so that `rollout-mean` is the mean over a rollout's tokens and then over rollouts.
        Arguments as in `Method.select`.
        """
        fresh, drops = [], []
        for candidate in candidates:
            lag = staleness[candidate.report_id]
            if lag is None:
                drops.append(Drop(candidate.report_id, "abandoned"))
            elif lag > self.config.max_staleness:
                drops.append(Drop(candidate.report_id, "stale"))
            else:
                fresh.append(Pick(candidate.report_id, candidate.report_id))
        ready = len(fresh) >= self.config.batch_size
        return Selection(picks=tuple(fresh[: self.config.batch_size]) if ready else (), drops=tuple(drops))

    def advantages(
        self, samples: Sequence[Sample], views: Sequence[View], history: Mapping[str, Sequence[float]]
    ) -> list[Floats]:
        """[T] float32 per sample, 0 where its mask is False, by the configured `advantage`; see `Method.advantages`."""
        if self.config.advantage == "gae":
            found = [
                self._gae(sample, view, paid, lam=self._actor_lambda(sample))[0]
                for sample, view, paid in self._paid(samples, views)
            ]
        elif self.config.advantage == "reinforce++":
            found = [self._returns(sample, paid) for sample, _, paid in self._paid(samples, views)]
        else:
            found = self._against_the_past(samples, views, history)
        return self.scaled(found, samples, whitened=self.config.advantage == "reinforce++")

    def critic_targets(self, samples: Sequence[Sample], views: Sequence[View]) -> list[Floats]:
        """Returns by the same recursion with `critic_lambda`: [T] float32 per sample, 0 where its mask is False."""
        return [
            self._gae(sample, view, paid, lam=self.config.critic_lambda)[1].astype(np.float32)
            for sample, view, paid in self._paid(samples, views)
        ]

    def _paid(self, samples: Sequence[Sample], views: Sequence[View]) -> list[tuple[Sample, View, Doubles]]:
        return list(zip(samples, views, token_rewards(samples, views, self.config), strict=True))

    def _gae(self, sample: Sample, view: View, paid: Doubles, *, lam: float) -> tuple[Doubles, Doubles]:
        if view.values is None:
            raise ValueError(f"advantage is gae: expected the critic's values of report {sample.report_id}")
        goes_on = self.config.bootstrap_truncated and sample.truncated
        return skip_observation_gae(
            values_before(view.values),
            sample.mask,
            paid,
            gamma=self.config.gamma,
            lam=lam,
            bootstrap=float(view.values[-1]) if goes_on else 0.0,
        )

    def _actor_lambda(self, sample: Sample) -> float:
        at = np.flatnonzero(sample.mask)
        if self.config.lambda_length == "response" and len(at):
            return adaptive_lambda(self.config.lambda_alpha, int(at[-1] - at[0]) + 1)
        return adaptive_lambda(self.config.lambda_alpha, len(at))

    def _returns(self, sample: Sample, paid: Doubles) -> Doubles:
        """REINFORCE++'s return of each token (2501.03262), discounted per sampled token as in `gae`: a long tool
        result between two actions does not make the first of them worth less."""
        found = np.zeros(len(paid))
        found[sample.mask] = suffix_sums(paid[sample.mask], self.config.gamma)
        return found

    def _against_the_past(
        self, samples: Sequence[Sample], views: Sequence[View], history: Mapping[str, Sequence[float]]
    ) -> list[Doubles]:
        rewards = rollout_rewards(samples, views, self.config)
        earlier = [history.get(report_id, ()) for _, report_id in rewards]
        values = running_mean_advantages(list(rewards.values()), earlier)
        by_rollout = dict(zip(rewards, values, strict=True))
        return [np.full(len(s.mask), by_rollout[rollout_of(s)]) for s in samples]

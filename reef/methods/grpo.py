"""GRPO with DAPO's two clip bounds: rollouts of one prompt are compared with each other.

How a batch comes about (`Grpo.select`):

1. Reports of an abandoned branch are dropped (`abandoned`); later ones of the same key take their places.
2. Reports of one key, in order of arrival, fill a group until it has `group_size` members; the next opens the key's
   next group. A group also closes `group_deadline_s` after its first member was accepted: one that arrives later
   opens the next group, and a group closed with one member is dropped (`group_incomplete`).
3. A closed group of which every member is older than `max_staleness` is dropped (`stale`), and one whose rewards tie
   is dropped (`tied`) if `filter_tied`. In any other, stale members count in the mean and contribute no tokens.
4. Closed groups are taken whole, in order of closing, until one more full group would not fit: the batch is ready with
   more than `batch_size - group_size` and at most `batch_size` training samples. With full groups of fresh samples that
   is `batch_size` exactly; groups closed by deadline or with stale members leave it a little smaller, never waiting.

Rollouts are compared by `score` alone, with overlong shaping and a KL counted in the reward where they are configured;
the scores of single turns are for methods that credit tokens. Whether a group ties is asked of the scores as reported
when a batch is chosen (`filter_tied`), and of the shaped rewards when they are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reef.methods.advantages import (
    centred_advantages,
    group_advantages,
    leave_one_out_advantages,
    maxrl_advantages,
    tied,
)
from reef.methods.base import View
from reef.methods.composed import Composed
from reef.methods.rewards import Rollout, kl_rewards, outcome_rewards, rollout_of, rollout_rewards
from reef.shelf import GrpoConfig
from reef.types import Candidate, Doubles, Drop, Floats, Pick, Sample, Selection


@dataclass(frozen=True, slots=True)
class _Group:
    """One generation of a key. Its name is unique among all generations, past ones included."""

    members: tuple[Candidate, ...]
    closed_at: float | None  # None: still open

    @property
    def name(self) -> str:
        return f"{self.members[0].group}@{self.members[0].seq}"


class Grpo(Composed):
    """The `grpo` method: see the module's docstring and docs/methods.md."""

    config: GrpoConfig

    def __init__(self, config: GrpoConfig | Mapping[str, Any]) -> None:
        super().__init__(config if isinstance(config, GrpoConfig) else GrpoConfig.model_validate(config))

    def select(self, candidates: Sequence[Candidate], staleness: Mapping[str, int | None], now: float) -> Selection:
        """Choose whole closed groups for the next batch, and drop what never trains, by the module's rules 1 to 4.

        Arguments as in `Method.select`. `next_deadline_at` (seconds since the epoch) is when the next open group
        closes; None: none is open.
        """
        drops = [Drop(c.report_id, "abandoned") for c in candidates if staleness[c.report_id] is None]
        groups = self._groups([c for c in candidates if staleness[c.report_id] is not None], now)
        deadlines = [g.members[0].accepted_at + self.config.group_deadline_s for g in groups if g.closed_at is None]
        closed = sorted(
            (group for group in groups if group.closed_at is not None),
            key=lambda group: (group.closed_at, group.members[0].seq),
        )

        picks: list[Pick] = []
        num_training = 0
        for group in closed:
            fresh = [self._is_fresh(staleness[member.report_id]) for member in group.members]
            reason = self._drop_reason(group, fresh)
            if reason is not None:
                drops += [Drop(member.report_id, reason) for member in group.members]
            elif not self._is_ready(num_training):
                picks += [
                    Pick(member.report_id, group.name, trains)
                    for member, trains in zip(group.members, fresh, strict=True)
                ]
                num_training += sum(fresh)
        return Selection(
            picks=tuple(picks) if self._is_ready(num_training) else (),
            drops=tuple(drops),
            next_deadline_at=min(deadlines, default=None),
        )

    def advantages(
        self, samples: Sequence[Sample], views: Sequence[View], history: Mapping[str, Sequence[float]]
    ) -> list[Floats]:
        """The advantage of each rollout within its group, on each of its sampled tokens; see `Method.advantages`.

        [T] float32 per sample, 0 where its mask is False. Samples of one report share one advantage. With `kl: reward`
        a rollout is charged for the KL of all of its tokens before it is compared; `reinforce++-baseline` (2501.03262)
        instead charges each token for its own after the comparison, and then whitens over the batch.
        """
        by_token = self.config.advantage == "reinforce++-baseline"
        if by_token:
            rewards = outcome_rewards(samples, self.config)
        else:
            rewards = rollout_rewards(samples, views, self.config)
        by_rollout: dict[Rollout, float] = {}
        for members in _by_group(rewards).values():
            values = self.compare([rewards[rollout] for rollout in members])
            by_rollout |= {rollout: float(value) for rollout, value in zip(members, values, strict=True)}
        found = [np.full(len(sample.mask), by_rollout[rollout_of(sample)]) for sample in samples]
        if by_token and self.config.kl == "reward":
            found = [a + kl_rewards(s, view, self.config) for a, s, view in zip(found, samples, views, strict=True)]
        return self.scaled(found, samples, whitened=by_token)

    def compare(self, rewards: Sequence[float]) -> Doubles:
        """The advantages of one group's rollouts, [G], by the configured `advantage`. A method of your own may replace
        it.

        Args:
            rewards: one per rollout, not empty.
        """
        tolerance = self.config.tie_tolerance
        if self.config.advantage == "grpo":
            return group_advantages(rewards, std=self.config.std, eps=self.config.std_eps, tie_tolerance=tolerance)
        if self.config.advantage == "rloo":
            return leave_one_out_advantages(rewards, tie_tolerance=tolerance)
        if self.config.advantage == "maxrl":
            return maxrl_advantages(rewards, tie_tolerance=tolerance)
        return centred_advantages(rewards, tie_tolerance=tolerance)  # dr-grpo and reinforce++-baseline

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Over rollouts (stale ones included): scores and lengths; over groups: the share that compares anything.

        Of the batch's groups alone: those that `filter_tied` left out are counted where a release is committed
        (`dropped/tied`, in reports; `num_rollouts` are the batch's).
        """
        scores = {rollout_of(sample): sample.reward for sample in samples}
        groups = [[scores[rollout] for rollout in members] for members in _by_group(scores).values()]
        informative = [not tied(group, self.config.tie_tolerance) for group in groups]
        return {
            **super().metrics(samples),
            "num_groups": float(len(groups)),
            "num_rollouts": float(len(scores)),
            "informative_group_rate": float(np.mean(informative)),
        }

    def _groups(self, candidates: Sequence[Candidate], now: float) -> list[_Group]:
        groups: list[_Group] = []
        filling: dict[str, list[Candidate]] = {}

        def close(key: str, at: float) -> None:
            groups.append(_Group(tuple(filling.pop(key)), at))

        for candidate in candidates:
            members = filling.get(candidate.group)
            if members and candidate.accepted_at > (deadline := self._deadline(members)):
                close(candidate.group, deadline)
            members = filling.setdefault(candidate.group, [])
            members.append(candidate)
            if len(members) == self.config.group_size:
                close(candidate.group, candidate.accepted_at)
        for key, members in list(filling.items()):
            if self._deadline(members) <= now:
                close(key, self._deadline(members))
        return groups + [_Group(tuple(members), None) for members in filling.values()]

    def _deadline(self, members: Sequence[Candidate]) -> float:
        return members[0].accepted_at + self.config.group_deadline_s

    def _drop_reason(self, group: _Group, fresh: Sequence[bool]) -> str | None:
        if len(group.members) < min(2, self.config.group_size):
            return "group_incomplete"
        if not any(fresh):
            return "stale"
        if self.config.filter_tied and tied([m.score for m in group.members], self.config.tie_tolerance):
            return "tied"
        return None

    def _is_fresh(self, staleness: int | None) -> bool:
        return staleness is not None and staleness <= self.config.max_staleness

    def _is_ready(self, num_training: int) -> bool:
        return num_training > self.config.batch_size - self.config.group_size


def _by_group(rollouts: Iterable[Rollout]) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout[0], []).append(rollout)
    return groups

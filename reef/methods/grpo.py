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
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from reef.config import GrpoConfig
from reef.methods.advantages import group_advantages, tied
from reef.methods.weights import token_weights
from reef.types import Candidate, Drop, Floats, Pick, Sample, Selection

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Group:
    """One generation of a key. Its name is unique among all generations, past ones included."""

    members: tuple[Candidate, ...]
    closed_at: float | None  # None: still open

    @property
    def name(self) -> str:
        return f"{self.members[0].group}@{self.members[0].seq}"


class Grpo:
    """The `grpo` method: see the module's docstring and METHODS in the docs."""

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

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

    def advantages(self, samples: Sequence[Sample]) -> list[Floats]:
        """GRPO's advantage of each rollout within its group, on each of its sampled tokens (2402.03300).

        [T] float32 per sample, 0 where its mask is False. Samples of one report share one advantage; see
        `group_advantages`.
        """
        by_rollout: dict[tuple[str, str], float] = {}
        for group, rewards in _rewards(samples).items():
            values = group_advantages(
                list(rewards.values()),
                std=self.config.std,
                eps=self.config.std_eps,
                tie_tolerance=self.config.tie_tolerance,
            )
            by_rollout |= {(group, report_id): float(v) for report_id, v in zip(rewards, values, strict=True)}
        return [np.where(s.mask, np.float32(by_rollout[s.group, s.report_id]), np.float32(0.0)) for s in samples]

    def token_weights(self, samples: Sequence[Sample]) -> list[Floats]:
        """Weights [T] per sample for the configured `aggregation`; see `weights.token_weights`."""
        return token_weights(samples, self.config.aggregation)

    def token_loss(
        self, logprobs: "torch.Tensor", old_logprobs: "torch.Tensor", advantages: "torch.Tensor", mask: "torch.Tensor"
    ) -> tuple["torch.Tensor", dict[str, "torch.Tensor"]]:
        """PPO's clipped loss of each token (1707.06347), with DAPO's two bounds (2503.14476); see `losses.ppo_clip`.

        All arrays are [...] of one shape, as in `Method.token_loss`. The metrics are `pg_clipfrac` and `ratio`.
        """
        from reef.methods.losses import ppo_clip  # here: who only selects has no need of torch

        return ppo_clip(
            logprobs, old_logprobs, advantages, mask, clip_low=self.config.clip_low, clip_high=self.config.clip_high
        )

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Over rollouts (stale ones included): rewards and lengths; over groups: the share that compares anything."""
        groups = [list(rewards.values()) for rewards in _rewards(samples).values()]
        rewards = np.array([reward for group in groups for reward in group])
        rollouts = _rollouts(samples)
        informative = [not tied(group, self.config.tie_tolerance) for group in groups]
        return {
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "num_groups": float(len(groups)),
            "informative_group_rate": float(np.mean(informative)),
            "response_length_mean": float(np.mean([sum(int(s.mask.sum()) for s in rollout) for rollout in rollouts])),
            "truncation_rate": float(np.mean([any(s.truncated for s in rollout) for rollout in rollouts])),
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


def _rollouts(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of each report in its group."""
    found: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.group, sample.report_id), []).append(sample)
    return list(found.values())


def _rewards(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Rewards by group and report: a report that gave several samples counts once."""
    groups: dict[str, dict[str, float]] = {}
    for sample in samples:
        groups.setdefault(sample.group, {})[sample.report_id] = sample.reward
    return groups

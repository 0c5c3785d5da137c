"""SAO in plain PyTorch, token by token: two models of transformers, a linear value head, two AdamWs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from reef.options import OptimizerOptions
from reef.shelf import SaoConfig
from reef.types import Batch, Sample, Turn
from tests.training.test_worker import reference_optimizer

CRITIC_OPTIONS = {"lr": 3e-3, "weight_decay": 0.1, "clip_grad": 0.5}


def method_settings(**changes: Any) -> dict[str, Any]:
    """`Batch.settings["method"]` of SAO without warm-up, with other settings as they are given."""
    values = {"critic_warmup_steps": 0, "critic_options": CRITIC_OPTIONS} | changes
    return {**SaoConfig.model_validate(values).model_dump(mode="json"), "name": "sao"}


def sao_batch(make_batch: Callable[..., Batch], *args: Any, **changes: Any) -> Batch:
    """A batch of single rollouts; every third has two turns, with a tool's answer between them and scores of their own.

    Arguments are `make_batch`'s, and those of `method_settings` as `method`.
    """
    method = method_settings(**changes.pop("method", {}))
    batch = make_batch(*args, method=method, **changes)
    samples = [replace(sample, group=sample.report_id, accepted_at=1.0) for sample in batch.samples]
    samples = [in_two_turns(sample) if i % 3 == 0 else sample for i, sample in enumerate(samples)]
    return replace(batch, samples=tuple(samples), reserved_at=3.0)


def in_two_turns(sample: Sample) -> Sample:
    """The same tokens, of which two in the middle are a tool's answer; the first turn was worth something."""
    first, last = 5, len(sample.tokens)
    mask = sample.mask.copy()
    mask[7:9] = False
    turns = (Turn("a", first, 7, 0.3), Turn("b", 9, last))
    return replace(sample, mask=mask, turns=turns, logprobs=np.where(mask, sample.logprobs, 0).astype(np.float32))


@dataclass(frozen=True, slots=True)
class Stepped:
    """What `PlainSao.step` found."""

    critic_loss: float
    critic_norm: float
    explained_variance: float
    loss: float | None  # None: a warm-up step
    norm: float | None


class PlainSao:
    """Policy and critic of one model directory, and a reference where the method has one."""

    def __init__(self, batch: Batch, model: Path, *, critic: Path | None = None, reference: Path | None = None) -> None:
        self.config = SaoConfig.model_validate({k: v for k, v in batch.settings["method"].items() if k != "name"})
        self.policy = load(model)
        self.body = load(critic or model).model
        self.head = torch.nn.Linear(self.body.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.reference = load(reference or model)
        self.critic = torch.nn.ModuleDict({"body": self.body, "head": self.head})
        self._policy_options = OptimizerOptions.model_validate(batch.settings["optimizer"])
        self._policy_optimizer = reference_optimizer(self.policy, self._policy_options)
        self._critic_optimizer = reference_optimizer(self.critic, self.config.critic_options)
        self._steps = 0

    def step(self, batch: Batch) -> Stepped:
        """One step, as the batch's method says."""
        samples = batch.samples
        views = [self.values(sample).detach().double().numpy() for sample in samples]
        before = [values_before(values) for values in views]
        targets = [
            self.gae(sample, values, self.config.critic_lambda)[1]
            for sample, values in zip(samples, views, strict=True)
        ]
        losses, norms = [], []
        for _ in range(self.config.critic_updates):
            loss = self.critic_loss(samples, before, targets)
            losses.append(loss.item())
            norms.append(update(self._critic_optimizer, loss, self.critic, self.config.critic_options.clip_grad))
        told = np.concatenate([v[s.mask] for v, s in zip(before, samples, strict=True)])
        wanted = np.concatenate([t[s.mask] for t, s in zip(targets, samples, strict=True)])
        variance = 1.0 - np.var(wanted - told) / np.var(wanted)
        policy_loss = norm = None
        if self._steps >= self.config.critic_warmup_steps:
            policy_loss, norm = self.update_policy(samples, views)
        self._steps += 1
        return Stepped(float(np.mean(losses)), float(np.mean(norms)), float(variance), policy_loss, norm)

    def update_policy(self, samples: Sequence[Sample], views: Sequence[np.ndarray]) -> tuple[float, float]:
        if self.config.values_from == "after":
            views = [self.values(sample).detach().double().numpy() for sample in samples]
        rollouts = []
        for sample, values in zip(samples, views, strict=True):
            sampled = int(sample.mask.sum())
            lam = max(0.0, 1.0 - 1.0 / (self.config.lambda_alpha * sampled)) if self.config.lambda_alpha else 1.0
            advantages = torch.from_numpy(self.gae(sample, values, lam)[0].astype(np.float32))
            rollouts.append(self.token_losses(sample, advantages).mean())
        loss = torch.stack(rollouts).mean()
        norm = update(self._policy_optimizer, loss, self.policy, self._policy_options.clip_grad)
        return loss.item(), norm

    def token_losses(self, sample: Sample, advantages: torch.Tensor) -> torch.Tensor:
        """DIS, and where configured the KL to the reference: one number for each sampled token."""
        at = torch.from_numpy(sample.mask)
        new = logprobs(self.policy, sample)[at]
        ratio = (new.detach() - torch.from_numpy(sample.logprobs)[at]).exp()
        low, high = self.config.bounds
        kept = (ratio > 1 - low) & (ratio < 1 + high)
        losses = -(ratio * kept) * advantages[at] * new
        if self.config.kl == "loss":
            losses = losses + self.config.kl_coef * self.divergence(new, self.reference_logprobs(sample)[at])
        return losses

    def divergence(self, logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        d = logprobs - reference
        return {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[self.config.estimator]

    @torch.no_grad()
    def reference_logprobs(self, sample: Sample) -> torch.Tensor:
        return logprobs(self.reference, sample)

    def values(self, sample: Sample) -> torch.Tensor:
        """What the critic says AFTER each token, [T]."""
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        return self.head(self.body(input_ids=ids, use_cache=False).last_hidden_state)[0, :, 0]

    def critic_loss(
        self, samples: Sequence[Sample], before: Sequence[np.ndarray], targets: Sequence[np.ndarray]
    ) -> torch.Tensor:
        """The mean over all sampled tokens of PPO's clipped value loss."""
        found = []
        for sample, old, target in zip(samples, before, targets, strict=True):
            at = torch.from_numpy(sample.mask)
            values = torch.cat([torch.zeros(1), self.values(sample)[:-1]])[at]
            old_values, wanted = (torch.from_numpy(x.astype(np.float32))[at] for x in (old, target))
            losses = (values - wanted) ** 2
            if (clip := self.config.critic_value_clip) is not None:
                held = old_values + (values - old_values).clamp(-clip, clip)
                losses = torch.maximum(losses, (held - wanted) ** 2)
            found.append(losses)
        return torch.cat(found).mean()

    def gae(self, sample: Sample, after: np.ndarray, lam: float) -> tuple[np.ndarray, np.ndarray]:
        """Advantages and returns [T] by the serial definition over sampled tokens, from the last one back.

        Args:
            after: [T] the critic's values after each token.
        """
        values = values_before(after)
        paid = np.zeros(len(sample.tokens))
        if self.config.kl == "reward":
            distance = self.divergence(torch.from_numpy(sample.logprobs), self.reference_logprobs(sample)).double()
            paid -= self.config.kl_coef * distance.numpy()
        for turn in sample.turns:
            paid[turn.end - 1] += turn.reward
        at = np.flatnonzero(sample.mask)
        paid[at[-1]] += sample.reward
        advantages, returns = np.zeros(len(paid)), np.zeros(len(paid))
        goes_on = self.config.bootstrap_truncated and sample.truncated
        next_value, next_advantage = (after[-1] if goes_on else 0.0), 0.0
        for t in reversed(at):
            delta = paid[t] + self.config.gamma * next_value - values[t]
            advantages[t] = delta + self.config.gamma * lam * next_advantage
            returns[t] = advantages[t] + values[t]
            next_value, next_advantage = values[t], advantages[t]
        return advantages, returns


def values_before(after: np.ndarray) -> np.ndarray:
    """Values [T] of the positions BEFORE each token; 0 for the first, which has none."""
    return np.concatenate([[0.0], after[:-1]])


def load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def logprobs(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
    """Log-probabilities [T] of each token at the sample's temperature; 0 for the first."""
    ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1] / sample.temperature
    found = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), found])


def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor, model: torch.nn.Module, clip: float) -> float:
    """Step, with the gradient's norm held to `clip`; the norm before."""
    optimizer.zero_grad()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    return float(norm)

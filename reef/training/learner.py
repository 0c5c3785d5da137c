"""What learns on one rank: the policy and, where the method has use for them, a critic and a frozen reference.

One step on a batch:

    values, reference log-probabilities      of every sample, before anything moves
    K updates of the critic                  on its targets
    one update of the policy                 on the advantages, unless the critic is still warming up

Whatever a step needs, every rank computes for the whole batch; its share of samples is what it brings to the gradient.
"""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state

from reef.errors import ReefError, StepFailedError
from reef.faults import reach
from reef.methods.base import Method, View
from reef.methods.base import build as build_method
from reef.methods.figures import batch_figures
from reef.methods.gae import explained_variance, values_before
from reef.methods.weights import token_weights
from reef.options import OptimizerOptions
from reef.shelf import SaoConfig, critic_options
from reef.training import device, megatron, optimizer
from reef.training.counts import Counts
from reef.training.megatron import Network
from reef.training.padding import Form, Microbatch, collate
from reef.training.passes import critic_pass, score_pass, train_pass, value_pass
from reef.training.random_state import rng_state, set_rng_state
from reef.training.settings import options_of
from reef.types import Batch, Floats, StepResult

Score = Callable[[Network, Sequence[Microbatch]], list[Floats] | None]


class Learner:
    """One rank's share of everything that learns. Every rank must get the same calls in one order."""

    def __init__(
        self,
        policy: Network,
        critic: Network | None,
        reference: Network | None,
        form: Form,
        forget_critic: Callable[[], None],
    ) -> None:
        """`forget_critic` makes the critic what it was at first."""
        self.policy = policy
        self.critic = critic
        self.reference = reference
        self._forget_critic = forget_critic
        self.counts = Counts()
        self._form = form

    def step(self, batch: Batch) -> StepResult:
        """Learn from a batch, as its own settings say. The same batch and state give the same bits.

        Raises:
            StepFailedError: a gradient is not finite, or the batch's method needs a critic that is not there. Unless
                the error says that something `moved`, all is as before.
        """
        before = rng_state(), self.counts.critic_updates
        try:
            return self._step(batch, build_method(batch.settings["method"]))
        except StepFailedError as error:
            set_rng_state(before[0])
            error.moved = self.counts.critic_updates != before[1]
            raise
        except ReefError:
            set_rng_state(before[0])
            raise

    def _step(self, batch: Batch, method: Method) -> StepResult:
        clock = _Clock()
        self._check_models(method)
        views = self._views(batch, method)
        name = batch.settings["method"]["name"].rpartition(":")[2]
        metrics = {**method.metrics(batch.samples), **batch_figures(name, batch)}
        metrics["num_samples"] = float(len(batch.samples))
        clock.lap("views")
        trains_policy = True
        if method.critic is None and self.counts.critic_steps:  # as when a service without a critic had trained it
            self.reset_critic()
        if method.critic is not None:
            trains_policy = self.counts.critic_steps >= method.critic.critic_warmup_steps
            metrics |= self._update_critic(batch, method, method.critic, views)
            metrics[f"{name}/critic_updates"] = float(method.critic.critic_updates)
            metrics[f"{name}/actor_trained"] = float(trains_policy)
            if trains_policy and method.critic.values_from == "after":
                views = self._views(batch, method)
            clock.lap("critic")
        if trains_policy:
            metrics |= self._update_policy(batch, method, views, clock)
            if "effective_token_rate" in metrics:
                metrics[f"{name}/effective_token_rate"] = metrics.pop("effective_token_rate")
        self.counts.steps += 1
        reach("step.done")
        return StepResult(self.counts.steps, metrics, clock.seconds(), trains_policy)

    def reset_critic(self) -> None:
        """The critic begins anew, where there is one."""
        self._forget_critic()
        self.counts.critic_steps = self.counts.critic_updates = 0

    def _check_models(self, method: Method) -> None:
        if method.critic is not None and self.critic is None:
            raise StepFailedError("the batch was reserved for a method with a critic, and the workers have none")
        if method.uses_reference and self.reference is None:
            raise StepFailedError("the batch was reserved for a KL to a reference, and the workers have none")

    def _update_policy(self, batch: Batch, method: Method, views: Sequence[View], clock: "_Clock") -> dict[str, float]:
        planes = {
            "engine_logprobs": [sample.logprobs for sample in batch.samples],
            "advantages": method.advantages(batch.samples, views, batch.history),
            "weights": method.token_weights(batch.samples),
            "lags": [np.full(len(sample.tokens), sample.lag, np.float32) for sample in batch.samples],
        }
        if method.uses_reference:
            planes["reference_logprobs"] = [_there(view.reference_logprobs) for view in views]
        megatron.zero_gradients(self.policy)
        passed = train_pass(self.policy, self._microbatches(batch, planes), method)
        clock.lap("forward_backward")
        lr, grad_norm = self._apply(self.policy, options_of(batch.settings), self.counts.policy_updates, "policy")
        self.counts.policy_updates += 1
        clock.lap("optimizer")
        return {**passed, "grad_norm": grad_norm, "lr": lr}

    def _update_critic(
        self, batch: Batch, method: Method, config: SaoConfig, views: Sequence[View]
    ) -> dict[str, float]:
        """`config.critic_updates` updates on the same targets, which come from the values of before."""
        assert self.critic is not None
        samples = batch.samples
        values = [values_before(_there(view.values)).astype(np.float32) for view in views]
        targets = method.critic_targets(samples, views)
        weights = token_weights(samples, "token-mean", overlong_filter=config.overlong_filter)
        planes = {"old_values": values, "targets": targets, "weights": weights}
        microbatches = self._microbatches(batch, planes)
        options = critic_options(config, options_of(batch.settings))
        passes, norms, lr = [], [], 0.0
        for _ in range(config.critic_updates):
            megatron.zero_gradients(self.critic)
            passes.append(critic_pass(self.critic, microbatches, config.critic_value_clip))
            lr, norm = self._apply(self.critic, options, self.counts.critic_steps, "critic")
            norms.append(norm)
            self.counts.critic_updates += 1
            reach("critic.updated")
        self.counts.critic_steps += 1
        masks = [weight > 0 for weight in weights]
        return {
            "num_tokens": passes[0]["num_tokens"],
            "critic/loss": float(np.mean([passed["loss"] for passed in passes])),
            "critic/clipfrac": passes[-1]["clipfrac"],
            "critic/value_mean": passes[0]["value"],
            "critic/explained_variance": explained_variance(targets, values, masks),
            "critic/grad_norm": float(np.mean(norms)),
            "critic/lr": lr,
        }

    def _apply(self, network: Network, options: OptimizerOptions, done: int, who: str) -> tuple[float, float]:
        """Step the optimizer on the gathered gradients; the learning rate and the gradient's norm."""
        lr = optimizer.apply_options(network.optimizer, options, done)
        try:
            return lr, optimizer.update(network.optimizer)
        except StepFailedError as error:
            raise StepFailedError(f"{who}: {error.message}") from error

    def _views(self, batch: Batch, method: Method) -> list[View]:
        """What critic and reference say of each sample that trains; of others 0."""
        values = references = None
        if method.critic is not None and self.critic is not None:
            values = self._score(batch, self.critic, value_pass)
        if method.uses_reference and self.reference is not None:
            references = [
                np.concatenate([np.zeros(1, np.float32), of_next[:-1]])
                for of_next in self._score(batch, self.reference, score_pass)
            ]
        return [
            View(
                values=None if values is None else values[i],
                reference_logprobs=None if references is None else references[i],
            )
            for i in range(len(batch.samples))
        ]

    def _score(self, batch: Batch, network: Network, score: Score) -> list[Floats]:
        """Some figure [T] of each position of every sample, on every rank."""
        microbatches = self._microbatches(batch, {})
        found = score(network, microbatches)
        mine: dict[int, Floats] = {}
        if found is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
            for rows, microbatch, scored in zip(self._share(batch), microbatches, found, strict=True):
                for i, (row, start) in zip(rows, microbatch.starts, strict=False):
                    mine[i] = scored[row, start : start + len(batch.samples[i].tokens)].copy()
        if dist.get_world_size() > 1:
            everyone: list[dict[int, Floats]] = [{}] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            mine = {i: scored for rank in everyone for i, scored in rank.items()}
        return [mine.get(i, np.zeros(len(sample.tokens), np.float32)) for i, sample in enumerate(batch.samples)]

    def _share(self, batch: Batch) -> list[list[int]]:
        """Positions of this data rank's samples by microbatch, filled up so that every rank makes as many calls."""
        ranks = parallel_state.get_data_parallel_world_size()
        calls = max(1, -(-len(batch.microbatches) // ranks))
        mine = list(batch.microbatches[parallel_state.get_data_parallel_rank() :: ranks])
        mine += [()] * (calls - len(mine))
        return [[i for i in positions if batch.samples[i].trains] for positions in mine]

    def _microbatches(self, batch: Batch, planes: Mapping[str, Sequence[Floats]]) -> list[Microbatch]:
        return [
            collate(
                [batch.samples[i] for i in rows],
                {name: [values[i] for i in rows] for name, values in planes.items()},
                device.current(),
                self._form,
            )
            for rows in self._share(batch)
        ]


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self._started = self._lapped = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        """What was done since the last one was this phase."""
        now = time.perf_counter()
        self._seconds[phase] = now - self._lapped
        self._lapped = now

    def seconds(self) -> dict[str, float]:
        return {**self._seconds, "total": time.perf_counter() - self._started}


def _there(values: Floats | None) -> Floats:
    assert values is not None, "the method asked for it"
    return values

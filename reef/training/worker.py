"""One rank of the trainer: a plain class around its share of the policy. Ray makes actors of it; tests need no Ray."""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from reef.config import Layout, OptimizerOptions
from reef.errors import ReefError
from reef.faults import reach
from reef.methods.base import Method
from reef.methods.base import build as build_method
from reef.training import checkpoint, convert, device, durable, megatron
from reef.training.actor import WorkerSpec
from reef.training.architecture import check_layout, read_architecture
from reef.training.digest import digest
from reef.training.packing import split
from reef.training.padding import Microbatch, collate, collate_ids
from reef.training.passes import score_pass, train_pass
from reef.training.publish import gather, publish
from reef.training.ranks import from_rank_0
from reef.training.weights import open_release, open_weights
from reef.types import Batch, Floats, Ids, Probe, Published, StepResult

PROBE_TOKENS = 32


class MegatronWorker:
    """Trains, scores, publishes and checkpoints one rank's share. Every rank must get the same calls in one order."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Load the base model's share of weights. Blocks until every rank is there.

        Raises:
            ConfigError: the model cannot be trained, or the layout does not divide it.
        """
        self._spec = spec
        torch.set_num_threads(spec.settings["threads"])
        architecture = read_architecture(spec.model_path)
        layout = Layout.model_validate(spec.settings["layout"])
        check_layout(architecture, layout)
        self._weights = open_weights(spec.model_path)
        convert.check_names(architecture, self._weights.files)
        megatron.join_ranks(spec.rank, spec.world_size, layout, spec.rendezvous, spec.settings["seed"])
        try:
            self._policy = megatron.build(architecture, layout, spec.settings["dtype"], self._weights)
        except ReefError:
            megatron.leave_ranks()
            raise
        self._probe_ids = _probe_ids(architecture.vocab_size)
        self._steps_done = 0
        self._first_rng = checkpoint.rng_state()

    def close(self) -> None:
        """Leave the process groups; the worker is of no use afterwards."""
        megatron.leave_ranks()

    def step(self, batch: Batch) -> StepResult:
        """Take one optimizer step on a batch, as its own settings say. The same batch and state give the same bits.

        Raises:
            StepFailedError: the gradient is not finite. Weights, moments, schedule and random state are as before.
        """
        started = time.perf_counter()
        torch.set_num_threads(batch.settings["threads"])
        method = build_method(batch.settings["method"])
        options = OptimizerOptions.model_validate(batch.settings["optimizer"])
        rng = checkpoint.rng_state()
        megatron.zero_gradients(self._policy)
        try:
            passed = train_pass(self._policy, self._microbatches(batch, method), method)
            forward_backward = time.perf_counter()
            lr = megatron.apply_options(self._policy.optimizer, options, self._steps_done)
            grad_norm = megatron.update(self._policy)
        except ReefError:
            checkpoint.set_rng_state(rng)
            raise
        self._steps_done += 1
        reach("step.done")
        finished = time.perf_counter()
        metrics = {
            **passed,
            **method.metrics(batch.samples),
            "grad_norm": grad_norm,
            "lr": lr,
            "num_samples": float(len(batch.samples)),
        }
        seconds = {
            "forward_backward": forward_backward - started,
            "optimizer": finished - forward_backward,
            "total": finished - started,
        }
        return StepResult(self._steps_done, metrics, seconds)

    def _microbatches(self, batch: Batch, method: Method) -> list[Microbatch]:
        """This data rank's share, filled up with empty ones so that every rank makes as many calls."""
        advantages = method.advantages(batch.samples)
        weights = method.token_weights(batch.samples)
        ranks = parallel_state.get_data_parallel_world_size()
        calls = max(1, -(-len(batch.microbatches) // ranks))
        mine = list(batch.microbatches[parallel_state.get_data_parallel_rank() :: ranks])
        mine += [()] * (calls - len(mine))
        collated = []
        for positions in mine:
            rows = [i for i in positions if batch.samples[i].trains]
            collated.append(
                collate(
                    [batch.samples[i] for i in rows],
                    [advantages[i] for i in rows],
                    [weights[i] for i in rows],
                    device.current(),
                )
            )
        return collated

    def logprobs(self, sequences: Sequence[Ids], temperature: float) -> list[Floats] | None:
        """Log-probabilities [T-1] of ids[1:] of each sequence; None on ranks without the last pipeline stage."""
        result: list[Floats] = [np.zeros(0, np.float32)] * len(sequences)
        scored = False
        for positions in split([len(s) for s in sequences], self._spec.micro_batch_tokens):
            microbatch = collate_ids([sequences[i] for i in positions], temperature, device.current())
            logprobs_BT = score_pass(self._policy, microbatch)
            if logprobs_BT is not None:
                scored = True
                for row, i in enumerate(positions):
                    result[i] = logprobs_BT[row, : len(sequences[i]) - 1].copy()
        return result if scored else None

    def probe(self) -> Probe | None:
        """The fixed sequence and its log-probabilities under the current weights; None as for `logprobs`."""
        found = self.logprobs([self._probe_ids], 1.0)
        return None if found is None else Probe(tuple(self._probe_ids.tolist()), tuple(found[0].tolist()))

    def publish(self, release_id: str, directory: Path) -> Published | None:
        """Write the current weights as `directory`/`release_id`; the answer is rank 0's, others return None.

        Raises:
            UnavailableError: the disk refused; nothing has moved, try again.
        """
        probe = self._probe_for_rank_0()
        tensors = gather(self._policy)
        if tensors is None or probe is None:
            return None
        with durable.storing(directory / release_id):
            return publish(tensors, self._weights, probe, release_id, directory)

    def _probe_for_rank_0(self) -> Probe | None:
        probe = self.probe()
        if self._spec.world_size == 1:
            return probe
        found: list[Probe | None] = [None] * self._spec.world_size
        torch.distributed.all_gather_object(found, probe)
        return next(candidate for candidate in found if candidate is not None)

    def save(self, directory: Path) -> None:
        """Write a checkpoint.

        Raises:
            UnavailableError: the disk refused; nothing has moved, try again.
        """
        with durable.storing(directory):
            checkpoint.save(directory, self._policy, self._steps_done)

    def restore(self, directory: Path) -> int:
        """Go back to a checkpoint; return the optimizer steps done by then.

        Raises:
            LoadFailedError: as `checkpoint.restore`, on every rank.
        """
        self._steps_done = checkpoint.restore(directory, self._policy)
        return self._steps_done

    def load_weights(self, directory: Path) -> None:
        """Take a release's weights, as they are in its files. Moments, step count and random state stay.

        Raises:
            LoadFailedError: the directory is not a complete release of this model, on every rank; nothing has moved.
        """
        megatron.load_weights(self._policy, from_rank_0(lambda: open_release(directory, self._weights)))

    def reset(self) -> None:
        """Go back to what the worker was when it was made: the base model's weights, and no step taken."""
        megatron.load_weights(self._policy, self._weights)
        megatron.forget_steps(self._policy.optimizer)
        checkpoint.set_rng_state(self._first_rng)
        self._steps_done = 0

    def digest(self) -> str:
        """The sha256 (hex) of all that decides the next step, over all ranks: see `reef.training.digest`."""
        return digest(self._policy, self._steps_done)


def _probe_ids(vocab_size: int) -> Ids:
    return np.random.default_rng(vocab_size).integers(0, vocab_size, PROBE_TOKENS).astype(np.int32)

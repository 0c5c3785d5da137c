"""One rank of the trainer: a plain class around what learns there. Ray makes actors of it; tests need no Ray."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from reef.config import Layout
from reef.errors import ReefError
from reef.methods.base import Method
from reef.methods.base import build as build_method
from reef.training import checkpoint, device, durable, megatron, optimizer
from reef.training.actor import WorkerSpec
from reef.training.architecture import Architecture, check_layout, check_recompute, read_architecture
from reef.training.beside import check_beside, paths_beside
from reef.training.counts import Counts
from reef.training.digest import digest
from reef.training.gather import gather
from reef.training.learner import Learner
from reef.training.megatron import Network
from reef.training.packing import split
from reef.training.padding import Form, collate_ids
from reef.training.passes import score_pass
from reef.training.publish import publish
from reef.training.random_state import rng_state, set_rng_state
from reef.training.ranks import from_rank_0
from reef.training.saving import Saving
from reef.training.send import Sender
from reef.training.settings import layout_of, options_of
from reef.training.tensors import check_weights
from reef.training.weights import open_release, open_weights
from reef.types import Batch, Bucket, Floats, Ids, Probe, Published, StepResult

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
        layout = layout_of(spec.settings)
        check_layout(architecture, layout)
        check_recompute(architecture, layout, options_of(spec.settings))
        check_weights(spec.model_path, architecture)
        self._weights = open_weights(spec.model_path)
        method = build_method(spec.settings["method"])
        check_beside(method, architecture)
        beside = {setting: open_weights(path) for setting, path in paths_beside(method).items()}
        self._critic_weights = beside.get("recipe.config.critic-path", self._weights)
        self._reference_weights = beside.get("recipe.config.kl-reference", self._weights)
        megatron.join_ranks(spec.rank, spec.world_size, layout, spec.rendezvous, spec.settings["seed"])
        try:
            self._learner = self._build(architecture, layout, method)
        except ReefError:
            megatron.leave_ranks()
            raise
        self._policy = self._learner.policy
        self._probe_ids = _probe_ids(architecture.vocab_size)
        self._first_rng = rng_state()
        self._saving: Saving | None = None
        self._sender = Sender()  # rank 0's

    def _build(self, architecture: Architecture, layout: Layout, method: Method) -> Learner:
        dtype, options = self._spec.settings["dtype"], options_of(self._spec.settings)
        critic: Network | None = None
        reference: Network | None = None
        policy = megatron.build(architecture, layout, dtype, options, self._weights)
        if method.critic is not None:
            freeze = method.critic.critic_freeze
            critic = megatron.build_critic(architecture, layout, dtype, options, self._critic_weights, freeze)
        if method.uses_reference:
            reference = megatron.build_reference(architecture, layout, dtype, options, self._reference_weights)
        divisor = layout.tensor if layout.sequence_parallel else 1
        self._form = Form(packed=megatron.packs(dtype), divisor=divisor)
        return Learner(policy, critic, reference, self._form, self._forget_critic)

    def close(self) -> None:
        """Leave the process groups; the worker is of no use afterwards."""
        if self._saving is not None:
            self._saving.join()
        self._sender.close()
        megatron.leave_ranks()

    def step(self, batch: Batch) -> StepResult:
        """Learn from a batch, as its own settings say. The same batch and state give the same bits.

        Raises:
            StepFailedError: as `Learner.step`.
        """
        torch.set_num_threads(batch.settings["threads"])
        return self._learner.step(batch)

    def logprobs(self, sequences: Sequence[Ids], temperature: float) -> list[Floats] | None:
        """Log-probabilities [T-1] of ids[1:] of each sequence; None on ranks without the last pipeline stage."""
        result: list[Floats] = [np.zeros(0, np.float32)] * len(sequences)
        scored = False
        for positions in split([len(s) for s in sequences], self._spec.micro_batch_tokens):
            microbatch = collate_ids([sequences[i] for i in positions], temperature, device.current(), self._form)
            found = score_pass(self._policy, [microbatch])
            if found is not None:
                scored = True
                logprobs_BT = found[0]
                for (row, start), i in zip(microbatch.starts, positions, strict=True):
                    result[i] = logprobs_BT[row, start : start + len(sequences[i]) - 1].copy()
        return result if scored else None

    def probe(self) -> Probe | None:
        """The fixed sequence and its log-probabilities under the current weights; None as for `logprobs`."""
        found = self.logprobs([self._probe_ids], 1.0)
        return None if found is None else Probe(tuple(self._probe_ids.tolist()), tuple(found[0].tolist()))

    def publish(self, release_id: str, directory: Path, on_disk: bool = True) -> Published | None:
        """Write the current weights as `directory`/`release_id`; the answer is rank 0's, others return None.

        Args:
            on_disk: False only names them: what they would be called and weigh.

        Raises:
            UnavailableError: the disk refused; nothing has moved, try again.
        """
        probe = self._probe_for_rank_0()
        with durable.storing(directory / release_id):
            return publish(self._policy, self._weights, probe, release_id, directory, on_disk=on_disk)

    def listen(self, engine: str, host: str) -> tuple[str, int, str] | None:
        """Begin a group with an engine: where its ranks meet, and the backend. Rank 0 answers, others do nothing.

        Raises:
            EngineError: `host` is no address of rank 0's machine.
        """
        if self._spec.rank:
            return None
        return (*self._sender.listen(engine, host), device.backend())

    def join(self, engine: str, group: str, world_size: int, timeout_s: float) -> None:
        """Join the group with an engine, as its rank 0. Other ranks do nothing.

        Raises:
            EngineError: as `Sender.join`.
        """
        if self._spec.rank == 0:
            self._sender.join(engine, group, world_size, timeout_s)

    def send(self, engine: str, bucket: Bucket) -> None:
        """Bring some tensors to rank 0, which sends them to an engine. Every rank must call.

        Raises:
            EngineError: as `Sender.send`, on rank 0.
        """
        tensors = gather(self._policy, bucket.names)
        if tensors is not None:
            self._sender.send(engine, bucket, tensors)

    def _probe_for_rank_0(self) -> Probe | None:
        probe = self.probe()
        if self._spec.world_size == 1:
            return probe
        found: list[Probe | None] = [None] * self._spec.world_size
        torch.distributed.all_gather_object(found, probe)
        return next(candidate for candidate in found if candidate is not None)

    def save(self, directory: Path) -> None:
        """Write a checkpoint, complete once this returns.

        Raises:
            UnavailableError: the disk refused; nothing has moved, try again.
        """
        self.save_begin(directory)
        try:
            self.save_finish()
        finally:
            self._saving = None

    def save_begin(self, directory: Path) -> None:
        """Copy this rank's share of the state and have it written while other calls go on. One at a time."""
        assert self._saving is None, "the checkpoint before is not finished"
        self._saving = Saving(directory, checkpoint.copy(self._policy, self._learner.critic, self._learner.counts))

    def save_done(self) -> bool:
        """Whether this rank has written its share, or was refused: `save_finish` will not wait for it."""
        return self._saving is None or self._saving.done()

    def save_finish(self) -> None:
        """Wait for what `save_begin` began; the checkpoint is complete once this returns.

        Raises:
            UnavailableError: the disk refused; call again to have the same copies written again.
        """
        assert self._saving is not None, "no checkpoint was begun"
        self._saving.finish()
        self._saving = None

    def restore(self, directory: Path) -> int:
        """Go back to a checkpoint, which any layout may have written; return the steps done by then.

        A critic that the checkpoint knows nothing of begins anew.

        Raises:
            LoadFailedError: as `checkpoint.restore`, on every rank.
        """
        learner = self._learner
        learner.counts, has_critic = checkpoint.restore(directory, self._policy, learner.critic, self._first_rng)
        if not has_critic:
            learner.reset_critic()
        return learner.counts.steps

    def load_weights(self, directory: Path) -> None:
        """Take a release's weights, as they are in its files. Moments, step count and random state stay.

        Raises:
            LoadFailedError: the directory is not a complete release of this model, on every rank; nothing has moved.
        """
        megatron.load_weights(self._policy, from_rank_0(lambda: open_release(directory, self._weights)))

    def reset(self) -> None:
        """Go back to what the worker was when it was made: the base model's weights, and no step taken."""
        megatron.load_weights(self._policy, self._weights)
        optimizer.forget_steps(self._policy.optimizer)
        self._learner.reset_critic()
        set_rng_state(self._first_rng)
        self._learner.counts = Counts()

    def _forget_critic(self) -> None:
        if (critic := self._learner.critic) is not None:
            megatron.load_weights(critic, self._critic_weights)
            optimizer.forget_steps(critic.optimizer)

    def digest(self) -> str:
        """The sha256 (hex) of all that decides the next step, over all ranks: see `reef.training.digest`."""
        return digest(self._policy, self._learner.critic, self._learner.counts)


def _probe_ids(vocab_size: int) -> Ids:
    return np.random.default_rng(vocab_size).integers(0, vocab_size, PROBE_TOKENS).astype(np.int32)

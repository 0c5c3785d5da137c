"""A checkpoint being written while training goes on.

    begin    every rank copies its share (main thread, ranks speak)   -> a thread of each writes its own file
    done     whether this rank's thread is through                       (nobody speaks: ranks may be in a step)
    finish   wait for the threads, then rank 0 writes what all agree on  (main thread, ranks speak)

Files are written beside their place and renamed; the file COMPLETE comes last and vouches for every byte of the others.
A directory without it is not a checkpoint. What the disk refuses is written again from the same copies.

Threads, not processes: Megatron's own writer starts a manager and forks for each save, which takes seconds where a
small model needs milliseconds, and forks a process that holds threads. The files are those it would write.
"""

from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.storage import WriteResult

from reef.faults import reach
from reef.training import durable
from reef.training.checkpoint import Copy
from reef.training.manifest import COMPLETE, Vouched, dump_complete, vouch
from reef.training.ranks import from_rank_0


@dataclass(frozen=True, slots=True)
class Written:
    """What one rank has on disk."""

    items: list[WriteResult]  # where each tensor lies
    files: dict[str, Vouched]


class Saving:
    """One checkpoint in the making; each rank has one. Calls are made by the main thread, on every rank."""

    def __init__(self, directory: Path, copy: Copy) -> None:
        """Begin to write. What the disk refuses is for `finish` to tell."""
        self._directory = directory
        self._copy = copy
        self._partial = durable.partial(directory)
        self._written: Written | None = None
        self._error: BaseException | None = None  # this rank's own, known to no other until `finish`
        self._refused = False  # some rank's disk refused, and all ranks know
        self._thread: Thread | None = None
        self._start()

    def done(self) -> bool:
        """Whether this rank's thread is through, well or not: `finish` will not wait for it."""
        return self._thread is None or not self._thread.is_alive()

    def join(self) -> None:
        """Wait for this rank's thread."""
        if self._thread is not None:
            self._thread.join()

    def finish(self) -> None:
        """Wait for all threads and complete the checkpoint; on every rank it is there afterwards.

        Raises:
            UnavailableError: the disk refused. Call again to try again, with what was copied.
        """
        if self._refused:
            self._start()
        self.join()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error
        with durable.storing(self._directory):
            try:
                written = _gather(self._written, self._error)
                from_rank_0(lambda: self._complete(written))
            except OSError:
                self._refused = True
                raise

    def _start(self) -> None:
        """Every rank must call: whether to, each decides by what all of them know."""
        self._written = self._error = self._thread = None
        self._refused = False
        try:
            from_rank_0(lambda: durable.begin(self._directory))
        except OSError as error:
            self._error = error
            return
        self._thread = Thread(target=self._write, args=(dist.get_rank(),), name="reef-checkpoint", daemon=True)
        self._thread.start()

    def _write(self, rank: int) -> None:
        try:
            self._written = _write(self._partial, self._copy, rank)
        except BaseException as error:  # noqa: BLE001 (told by `finish`)
            self._error = durable.refusal(error) or error

    def _complete(self, written: list[Written]) -> None:
        assert self._copy.metadata is not None  # rank 0 has it
        FileSystemWriter(self._partial).finish(self._copy.metadata, [rank.items for rank in written])
        save_config(CheckpointingConfig("torch_dist", 1), str(self._partial))
        files = {name: vouched for rank in written for name, vouched in rank.files.items()}
        for path in self._partial.iterdir():
            if path.name not in files:
                durable.sync(path)
                files[path.name] = vouch(path)
        durable.finish(self._partial, self._directory)
        reach("checkpoint.writing")
        durable.write(self._directory / COMPLETE, dump_complete(self._copy.steps_done, files))
        durable.sync(self._directory)
        reach("checkpoint.complete")


def _write(partial: Path, copy: Copy, rank: int) -> Written:
    """This rank's file, on disk when it returns. Speaks to no other rank."""
    items: list[WriteResult] = []
    if copy.plan.items:
        writer = FileSystemWriter(partial, thread_count=1, sync_files=True)
        items = writer.write_data(copy.plan, copy.planner).value()
    if rank == 0:
        durable.write(partial / COMMON_STATE_FNAME, copy.common)
    names = {item.storage_data.relative_path for item in items}
    reach("checkpoint.files")
    return Written(items, {name: vouch(partial / name) for name in sorted(names)})


def _gather(written: Written | None, error: BaseException | None) -> list[Written]:
    """What every rank has written. Every rank must call. Raises OSError: what any of them was refused."""
    outcomes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(outcomes, (written, None if error is None else str(error)))
    for rank, (_, refused) in enumerate(outcomes):
        if refused is not None:
            raise OSError(f"rank {rank}: {refused}" if len(outcomes) > 1 else refused)
    return [outcome for outcome, _ in outcomes]

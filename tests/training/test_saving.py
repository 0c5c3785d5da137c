"""A checkpoint that the disk refuses one rank: all ranks learn of it, and write it again together."""

import io
import multiprocessing
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from reef.errors import UnavailableError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

NUM_BYTES = 10_000


def run_rank(rank: int, root: Path, answers: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex
    from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

    from reef.training.checkpoint import Copy, CopyPlanner
    from reef.training.saving import Saving

    dist.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=2)
    index = MetadataIndex(f"state of {rank}")
    planner = CopyPlanner()
    planner._copies[index] = io.BytesIO(bytes(NUM_BYTES))
    plan = SavePlan([WriteItem(index, WriteItemType.BYTE_IO)])
    plan = FileSystemWriter("").prepare_global_plan([plan, plan])[rank]
    metadata = Metadata({f"state of {each}": BytesStorageMetadata() for each in (0, 1)}) if rank == 0 else None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (NUM_BYTES // 2, limits[1]))
    saving = Saving(root / "one", Copy(1, plan, planner, metadata, b"common"))
    saving.join()
    refused = []
    for _ in range(2):
        with pytest.raises(UnavailableError) as error:
            saving.finish()
        refused.append(error.value.message)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    saving.finish()
    answers.put((rank, refused))
    dist.destroy_process_group()


def test_what_the_disk_refuses_one_rank_is_written_again_by_all(tmp_path: Path) -> None:
    from reef.training.manifest import check_checkpoint

    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=run_rank, args=(rank, tmp_path, answers), daemon=True) for rank in (0, 1)]
    for process in processes:
        process.start()
    found = dict(answers.get(timeout=150) for _ in processes)
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    for refused in found.values():
        for message in refused:
            assert "cannot write" in message
            assert "rank 1" in message
            assert "File too large" in message
    check_checkpoint(tmp_path / "one")

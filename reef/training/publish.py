"""Writing a release: the policy's weights as a Hugging Face model directory, under the base's file names and dtypes.

Some of the tensors at a time are brought to rank 0, hashed, and written there, so that no process holds the whole
model.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from reef.faults import reach
from reef.training import durable, manifest
from reef.training.gather import gather
from reef.training.megatron import Network
from reef.training.ranks import from_rank_0
from reef.training.weights import WeightFiles
from reef.types import Probe, Published

PART_BYTES = 256 * 2**20


def publish(
    policy: Network,
    base: WeightFiles,
    probe: Probe | None,
    release_id: str,
    directory: Path,
    *,
    on_disk: bool = True,
    part_bytes: int = PART_BYTES,
) -> Published | None:
    """Name the current weights by their bytes, and write them as `directory`/`release_id`. Every rank must call.

    The directory is written beside its place, put on disk, and renamed into place. Content id and size are the same
    whether it is written or not.

    Args:
        base: the model that training began with; its other files (config, tokenizer) are copied.
        probe: rank 0's; what other ranks bring is ignored.
        directory: where releases live.
        on_disk: False leaves the disk alone.
        part_bytes: of tensors brought to rank 0 at once.

    Returns:
        What was published, on rank 0; None elsewhere.

    Raises:
        OSError: the disk refused; on every rank.
    """
    release = _Release(directory / release_id, on_disk=on_disk)
    from_rank_0(release.begin)
    for file in sorted(base.headers):
        # Names, dtypes and shapes are the base's, and so is all that stands before the tensors.
        from_rank_0(partial(release.add, file, base.headers[file]))
        for names in _parts(base.names_in(file), base, part_bytes):
            tensors = gather(policy, names)
            from_rank_0(partial(release.add_tensors, file, tensors or {}, base))
        from_rank_0(partial(release.end_file, file))
    published = from_rank_0(partial(release.finish, base.directory, probe))
    return published if dist.get_rank() == 0 else None


def _parts(names: Iterable[str], base: WeightFiles, part_bytes: int) -> Iterator[list[str]]:
    """Cut names, in their order, into runs of tensors of `part_bytes` at most; a larger tensor is a run by itself."""
    run: list[str] = []
    size_bytes = 0
    for name in names:
        if run and size_bytes + base.size_bytes(name) > part_bytes:
            yield run
            run, size_bytes = [], 0
        run.append(name)
        size_bytes += base.size_bytes(name)
    if run:
        yield run


class _Release:
    """The files of a release, on rank 0: hashed one after the other, and written if they go to disk."""

    def __init__(self, target: Path, *, on_disk: bool) -> None:
        self._target = target
        self._on_disk = on_disk
        self._partial = Path()
        self._sha256 = hashlib.sha256()
        self._size_bytes = 0  # of the file under way
        self._files: dict[str, tuple[str, int]] = {}

    def begin(self) -> None:
        if self._on_disk:
            self._partial = durable.begin(self._target)

    def add(self, name: str, data: bytes | memoryview) -> None:
        """Append to the file under way, whose name this is."""
        self._sha256.update(data)
        self._size_bytes += len(data)
        if self._on_disk:
            with (self._partial / name).open("ab") as file:
                file.write(data)

    def add_tensors(self, name: str, tensors: Mapping[str, torch.Tensor], base: WeightFiles) -> None:
        for tensor_name, tensor in tensors.items():
            self.add(name, _bytes(tensor.to(device="cpu", dtype=base.dtypes[tensor_name])))

    def end_file(self, name: str) -> None:
        """Close the file under way, and wait until it is on disk."""
        self._files[name] = (self._sha256.hexdigest(), self._size_bytes)
        self._sha256, self._size_bytes = hashlib.sha256(), 0
        if self._on_disk:
            durable.sync(self._partial / name)
        reach("publish.writing")

    def finish(self, base: Path, probe: Probe | None) -> Published:
        """Add the base's other files and the manifest, and give the directory its name."""
        for path in sorted(base.iterdir()):
            if _belongs_to_model(path) and path.name not in self._files:
                self.add(path.name, path.read_bytes())
                self.end_file(path.name)
        published = Published(
            release_id=self._target.name,
            path=str(self._target),
            content_id=manifest.content_id({name: sha for name, (sha, _) in self._files.items()}),
            size_bytes=sum(size for _, size in self._files.values()),
            probe=probe,
            on_disk=self._on_disk,
        )
        if self._on_disk:
            durable.write(self._partial / manifest.MANIFEST, manifest.dump_manifest(published, self._files))
            durable.finish(self._partial, self._target)
            reach("publish.renamed")
        return published


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes as safetensors stores them, without a copy where it is contiguous."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _belongs_to_model(path: Path) -> bool:
    """Config, tokenizer, templates and the weights' index; not weights, notes or manifests."""
    return (
        path.is_file()
        and not path.name.startswith(".")
        and path.name != manifest.MANIFEST
        and path.suffix in (".json", ".jinja", ".txt", ".model")
    )

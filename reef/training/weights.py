"""Hugging Face weights on disk: one safetensors file, or several with an index. Read in slices, never whole."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from reef.errors import ConfigError, LoadFailedError
from reef.headers import read_headers
from reef.training.manifest import verify

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which tensors a model directory holds, in which files and with which dtype."""

    directory: Path
    files: Mapping[str, str]  # file name by tensor name, in the order of each file's data
    dtypes: Mapping[str, torch.dtype]  # by tensor name
    shapes: Mapping[str, tuple[int, ...]]  # by tensor name
    begins: Mapping[str, int]  # of a tensor's bytes in its file, by tensor name
    headers: Mapping[str, bytes]  # what each file begins with, by file name: all but its tensors' bytes

    def names_in(self, file_name: str) -> list[str]:
        """The tensors of one file, in the order of their bytes."""
        return [name for name, file in self.files.items() if file == file_name]

    def size_bytes(self, name: str) -> int:
        """Bytes of a tensor on disk."""
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize

    def read(self, name: str, split: int | None, rank: int, size: int) -> torch.Tensor:
        """Rank's part of a tensor, cut into `size` along dimension `split` (None: all of it).

        It lies in the file still, mapped into memory: to be copied from at once, and let go.
        """
        path, begin = self.directory / self.files[name], self.begins[name]
        data = np.memmap(path, np.uint8, "c", begin, (self.size_bytes(name),))
        tensor = torch.from_numpy(data).view(self.dtypes[name]).view(self.shapes[name])
        if split is None:
            return tensor
        length = tensor.shape[split] // size
        return tensor.narrow(split, rank * length, length)


def open_weights(model_path: Path) -> WeightFiles:
    """Find the tensors of a model directory.

    Raises:
        ConfigError: as `read_headers`.
    """
    headers = read_headers(model_path)
    tensors = [(file, name, found) for file, header in headers.items() for name, found in header.tensors.items()]
    return WeightFiles(
        directory=model_path,
        files={name: file for file, name, _ in tensors},
        dtypes={name: _DTYPES[found.dtype] for _, name, found in tensors},
        shapes={name: found.shape for _, name, found in tensors},
        begins={name: found.begin for _, name, found in tensors},
        headers={file: header.raw for file, header in headers.items()},
    )


def open_release(directory: Path, base: WeightFiles) -> WeightFiles:
    """Find the tensors of a release of the model `base`, and check every byte of it.

    Raises:
        LoadFailedError: the release is not complete, or not of this model: names the first tensors that differ.
    """
    verify(directory)
    try:
        found = open_weights(directory)
    except ConfigError as error:
        raise LoadFailedError(f"release {directory}: {error}") from None
    names = found.files.keys() | base.files.keys()
    differ = sorted(name for name in names if _kind(found, name) != _kind(base, name))
    if differ:
        kinds = "; ".join(f"{name} is {_kind(found, name)}, expected {_kind(base, name)}" for name in differ[:3])
        raise LoadFailedError(f"release {directory} is not of this model: {kinds}")
    return found


def _kind(weights: WeightFiles, name: str) -> str:
    if name not in weights.files:
        return "missing"
    return f"{weights.dtypes[name]} {list(weights.shapes[name])}"

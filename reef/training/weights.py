"""Hugging Face weights on disk: one safetensors file, or several with an index. Read in slices, never whole."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from reef.errors import ConfigError, LoadFailedError
from reef.training.manifest import verify

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Which tensors a model directory holds, in which files and with which dtype."""

    directory: Path
    files: Mapping[str, str]  # file name by tensor name
    dtypes: Mapping[str, torch.dtype]  # by tensor name
    shapes: Mapping[str, tuple[int, ...]]  # by tensor name
    metadata: Mapping[str, dict[str, str]]  # each file's own, by file name

    def read(self, name: str, split: int | None, rank: int, size: int) -> torch.Tensor:
        """Read rank's part of a tensor, cut into `size` along dimension `split` (None: all of it)."""
        with safe_open(self.directory / self.files[name], framework="pt") as file:
            if split is None or size == 1:
                tensor: torch.Tensor = file.get_tensor(name)
                return tensor
            view = file.get_slice(name)
            length = view.get_shape()[split] // size
            part = slice(rank * length, (rank + 1) * length)
            sliced: torch.Tensor = view[part] if split == 0 else view[:, part]
            return sliced


def open_weights(model_path: Path) -> WeightFiles:
    """Find the tensors of a model directory.

    Raises:
        ConfigError: there are no safetensors, a file named by the index is missing, or a dtype is not a float's.
    """
    index = model_path / INDEX_FILE
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    elif (model_path / SINGLE_FILE).is_file():
        names = [SINGLE_FILE]
    else:
        raise ConfigError(f"{model_path} holds neither {SINGLE_FILE} nor {INDEX_FILE}", param="inference.model-path")
    files: dict[str, str] = {}
    dtypes: dict[str, torch.dtype] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    metadata: dict[str, dict[str, str]] = {}
    for file_name in names:
        if not (model_path / file_name).is_file():
            raise ConfigError(f"{index} names {file_name}, which is missing", param="inference.model-path")
        with safe_open(model_path / file_name, framework="pt") as file:
            metadata[file_name] = file.metadata() or {}
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                view = file.get_slice(name)
                dtype = view.get_dtype()
                if dtype not in _DTYPES:
                    raise ConfigError(
                        f"{model_path / file_name}: {name} is {dtype}; Reef trains {', '.join(_DTYPES)}",
                        param="inference.model-path",
                    )
                files[name] = file_name
                dtypes[name] = _DTYPES[dtype]
                shapes[name] = tuple(view.get_shape())
    return WeightFiles(model_path, files, dtypes, shapes, metadata)


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

"""Which tensors a model directory's safetensors files hold: read from their headers alone, without torch.

A file begins with 8 bytes (the header's length), the header in JSON, then the data, without gaps.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reef.errors import ConfigError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ITEM_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
"""The dtypes that Reef trains, as safetensors spells them."""
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000  # as safetensors itself


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """One tensor of a file."""

    dtype: str  # a key of ITEM_BYTES
    shape: tuple[int, ...]
    begin: int  # of its bytes in the file
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileHeader:
    """One safetensors file without its data."""

    raw: bytes  # as it stands at the beginning of the file, the length included
    tensors: Mapping[str, TensorHeader]  # in the order of their data


def read_headers(model_path: Path) -> dict[str, FileHeader]:
    """The header of each weight file of a model directory, by file name.

    Raises:
        ConfigError: there are no safetensors, a file named by the index is missing or damaged, or a dtype is not a
            float's.
    """
    return {name: read_header(model_path / name) for name in _file_names(model_path)}


def _file_names(model_path: Path) -> list[str]:
    index = model_path / INDEX_FILE
    if not index.exists():
        if (model_path / SINGLE_FILE).is_file():
            return [SINGLE_FILE]
        raise _refused(f"{model_path} holds neither {SINGLE_FILE} nor {INDEX_FILE}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"cannot read {index}: {error!r}; expected a weight_map of tensor to file name") from None
    for name in names:
        if not (model_path / name).is_file():
            raise _refused(f"{index} names {name}, which is missing")
    return names


def read_header(path: Path) -> FileHeader:
    """The header of one file.

    Raises:
        ConfigError: it is not a safetensors file, is cut short, or holds a dtype that Reef does not train.
    """
    try:
        with path.open("rb") as file:
            length = file.read(_LENGTH_BYTES)
            text = file.read(min(int.from_bytes(length, "little"), _LARGEST_HEADER))
        values = json.loads(text)
        values.pop("__metadata__", None)
        ordered = dict(sorted(values.items(), key=lambda item: item[1]["data_offsets"]))
        raw = length + text
        tensors = {name: _tensor(path, name, value, len(raw)) for name, value in ordered.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _refused(f"cannot read {path}: it is not a safetensors file ({error!r:.100})") from None
    expected = len(raw) + sum(tensor.size_bytes for tensor in tensors.values())
    if path.stat().st_size != expected:
        raise _refused(
            f"cannot read {path}: it has {path.stat().st_size} bytes, its header says {expected}: fetch it again"
        )
    return FileHeader(raw, tensors)


def _tensor(path: Path, name: str, value: Any, data: int) -> TensorHeader:
    dtype, (begin, end) = value["dtype"], value["data_offsets"]
    if dtype not in ITEM_BYTES:
        raise _refused(f"{path}: {name} is {dtype}; Reef trains {', '.join(ITEM_BYTES)}")
    return TensorHeader(dtype, tuple(value["shape"]), data + begin, end - begin)


def _refused(reason: str) -> ConfigError:
    return ConfigError(reason, param="inference.model-path")

"""In which portions a model's tensors travel: computed from the headers of its files alone, without torch."""

from collections.abc import Iterator
from pathlib import Path

from reef.headers import TensorHeader, read_headers
from reef.types import Bucket

_TORCH_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def buckets(model_path: Path, bucket_bytes: int) -> tuple[Bucket, ...]:
    """Every tensor of a model directory once, in the order of its files, in buckets of at most `bucket_bytes`.

    A larger tensor is a bucket by itself.

    Raises:
        ConfigError: as `read_headers`.
    """
    return tuple(_bucket(run) for run in _runs(model_path, bucket_bytes))


def _runs(model_path: Path, bucket_bytes: int) -> Iterator[dict[str, TensorHeader]]:
    run: dict[str, TensorHeader] = {}
    for header in read_headers(model_path).values():
        for name, tensor in header.tensors.items():
            if run and sum(member.size_bytes for member in run.values()) + tensor.size_bytes > bucket_bytes:
                yield run
                run = {}
            run[name] = tensor
    if run:
        yield run


def _bucket(run: dict[str, TensorHeader]) -> Bucket:
    return Bucket(
        names=tuple(run),
        dtypes=tuple(_TORCH_NAMES[tensor.dtype] for tensor in run.values()),
        shapes=tuple(tensor.shape for tensor in run.values()),
    )

"""In which portions a model's tensors travel."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from reef.errors import ConfigError
from reef.training.buckets import buckets
from reef.types import Bucket

MakeModel = Callable[..., Path]


def size_bytes(bucket: Bucket) -> int:
    width = {"float32": 4, "bfloat16": 2}
    numbers = 0
    for dtype, shape in zip(bucket.dtypes, bucket.shapes, strict=True):
        count = width[dtype]
        for length in shape:
            count *= length
        numbers += count
    return numbers


@pytest.mark.parametrize("bucket_bytes", [1, 5000, 2**30])
def test_every_tensor_of_every_file_is_in_one_bucket_once(make_model: MakeModel, bucket_bytes: int) -> None:
    model = make_model("qwen2", tied=False, dtype="bfloat16", shard="20KB")
    expected = {}
    files = sorted(model.glob("*.safetensors"))
    assert len(files) > 2
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                expected[name] = ("bfloat16", tuple(file.get_slice(name).get_shape()))
    plan = buckets(model, bucket_bytes)
    found = [kind for b in plan for kind in zip(b.names, b.dtypes, b.shapes, strict=True)]
    assert len(found) == len(expected)
    assert {name: (dtype, shape) for name, dtype, shape in found} == expected
    assert plan == buckets(model, bucket_bytes)


def test_buckets_are_filled_in_the_order_of_the_files(make_model: MakeModel) -> None:
    model = make_model("qwen2", tied=False, dtype="bfloat16", shard="20KB")
    names = [name for bucket in buckets(model, 1) for name in bucket.names]
    for bucket_bytes in (5000, 2**30):
        assert [name for bucket in buckets(model, bucket_bytes) for name in bucket.names] == names
    file_of = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            file_of |= dict.fromkeys(file.keys(), path.name)
    assert [file_of[name] for name in names] == sorted(file_of.values())


def test_a_bucket_holds_what_fits_and_a_larger_tensor_goes_alone(make_model: MakeModel) -> None:
    plan = buckets(make_model(), 7000)
    sizes = [size_bytes(bucket) for bucket in plan]
    assert any(len(bucket.names) > 1 for bucket in plan)
    assert any(size > 7000 for size in sizes)  # the embedding, 96 x 32 x 4 bytes
    for bucket, size in zip(plan, sizes, strict=True):
        assert size <= 7000 or len(bucket.names) == 1
    for bucket, size, following in zip(plan, sizes, plan[1:], strict=False):
        first = Bucket(following.names[:1], following.dtypes[:1], following.shapes[:1])
        assert size + size_bytes(first) > 7000, f"{first.names} would have fitted beside {bucket.names}"


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds neither model\.safetensors nor"):
        buckets(tmp_path, 1)

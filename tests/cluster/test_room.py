"""What Reef needs of a cluster, worked by hand."""

from typing import Any

import pytest

from reef.cluster import room
from reef.cluster.address import Address
from reef.config import Config
from reef.errors import ConfigError

ADDRESS = Address("head", 6379, "training.ray-address")
GPU_NODE = {"CPU": 16.0, "GPU": 8.0, "memory": 1e12}
CPU_NODE = {"CPU": 2.0, "memory": 1e12}


def config(layout: dict[str, Any], **inference: Any) -> Config:
    return Config.model_validate({"training": {"layout": layout}, "inference": inference})


def test_tensor_ranks_are_one_bundle_and_each_takes_a_gpu_where_there_are_some() -> None:
    wanted = config({"tensor": 4, "pipeline": 2, "data": 2})
    assert room.worker_bundles(wanted, gpus=True) == [{"CPU": 4.0, "GPU": 4.0}] * 4
    assert room.worker_bundles(wanted, gpus=False) == [{"CPU": 4.0}] * 4
    assert room.has_gpus([CPU_NODE, GPU_NODE]) and not room.has_gpus([CPU_NODE])


def test_an_engine_takes_a_gpu_for_each_of_its_ranks() -> None:
    sglang = config({}, backend="sglang", tensor=2)
    assert room.engine_bundle(sglang, gpus=True) == {"CPU": 1.0, "GPU": 2.0}
    assert room.engine_bundle(sglang, gpus=False) == {"CPU": 2.0}
    assert room.engine_bundle(config({}), gpus=True) == {"CPU": 1.0}


def test_what_fits_is_accepted() -> None:
    room.check_room(
        config({"tensor": 8, "data": 2}, backend="sglang", tensor=4), [GPU_NODE] * 3, True, ADDRESS, with_engines=True
    )
    room.check_room(config({"data": 3}), [CPU_NODE] * 2, False, ADDRESS, with_engines=True)
    room.check_room(config({"data": 2}), [CPU_NODE], False, None, with_engines=False)


@pytest.mark.parametrize(
    ("layout", "inference", "nodes", "message"),
    [
        (
            {"tensor": 4},
            {},
            [CPU_NODE] * 4,
            r"1 x \(4 CPU\) for training workers and 1 x \(1 CPU\) for engines, each on",
        ),
        (
            {"data": 2},
            {"replicas": 3},
            [CPU_NODE] * 2,
            r"2 x \(1 CPU\) .* 3 x \(1 CPU\) .* are 2 nodes: \(2 CPU\), \(2 ",
        ),
        (
            {"tensor": 8},
            {"backend": "sglang"},
            [GPU_NODE],
            r"\(8 CPU, 8 GPU\) .* \(1 CPU, 1 GPU\) .* \(16 CPU, 8 GPU\)\.",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_there(
    layout: dict[str, Any], inference: dict[str, Any], nodes: list[dict[str, float]], message: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"the Ray cluster at head:6379 \(training.ray-address\) is too small: .*{message}"
    ):
        room.check_room(config(layout, **inference), nodes, room.has_gpus(nodes), ADDRESS, with_engines=True)


def test_a_machine_with_too_few_gpus_does_not_train_on_cpus_unasked() -> None:
    with pytest.raises(ConfigError, match=r"this machine is too small: .* train on CPUs with training.devices: \[\]"):
        room.check_room(config({"data": 2}), [{"CPU": 2.0, "GPU": 1.0}], True, None, with_engines=False)

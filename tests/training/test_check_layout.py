"""Layouts that a model cannot be trained in: each is refused by the name of the field to change."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError

from reef.config import Layout
from reef.errors import ConfigError
from reef.options import OptimizerOptions
from reef.training.architecture import Architecture, Experts, check_layout, check_recompute

DENSE: Mapping[str, Any] = {
    "model_type": "qwen3",
    "num_layers": 6,
    "hidden_size": 64,
    "ffn_size": 96,
    "num_heads": 12,
    "num_kv_heads": 12,
    "head_dim": 16,
    "vocab_size": 120,
    "context_length": 128,
    "norm_eps": 1e-6,
    "rope_theta": 1e4,
    "tied": False,
}
EXPERTS = Experts(num_experts=8, num_per_token=2, ffn_size=24, weights_sum_to_1=True, layers=(True,) * 6)
MIXED: Mapping[str, Any] = {**DENSE, "model_type": "qwen3_moe", "experts": EXPERTS}


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        ({**DENSE, "num_heads": 9}, {"tensor": 2}, "tensor is 2, which does not divide the model's 9 attention heads"),
        (
            {**DENSE, "num_kv_heads": 2},
            {"tensor": 4},
            "tensor is 4, which does not divide the model's 2 key-value heads",
        ),
        ({**DENSE, "vocab_size": 121}, {"tensor": 2}, "tensor is 2, .* the model's 121 vocabulary entries"),
        ({**DENSE, "ffn_size": 94}, {"tensor": 4}, "tensor is 4, which does not divide the model's 94 MLP columns"),
        (DENSE, {"pipeline": 4}, "pipeline is 4, which does not divide the model's 6 layers"),
        (DENSE, {"pipeline": 12}, "pipeline is 12, which does not divide the model's 6 layers"),
        (DENSE, {"context": 2}, "context is 2: Reef has no context parallelism yet"),
        (DENSE, {"expert": 2, "data": 2}, "expert is 2, but a qwen3 model has no experts"),
        (MIXED, {"expert": 3, "data": 3}, "expert is 3, which does not divide the model's 8 experts"),
        (MIXED, {"expert": 4, "data": 2}, "expert is 4, which does not divide the 2 ranks of a pipeline stage"),
        (MIXED, {"tensor": 2}, "tensor is 2: with experts it needs training.layout.sequence-parallel"),
        (
            {**MIXED, "experts": Experts(8, 2, 25, True, (True,) * 6)},
            {"tensor": 2, "sequence-parallel": True},
            "tensor is 2, which does not divide the model's 25 MLP columns of an expert",
        ),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    model: Mapping[str, Any], layout: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        check_layout(Architecture(**model), Layout.model_validate(layout))
    assert refused.value.param == f"training.layout.{message.split()[0]}"


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DENSE, {"tensor": 4, "pipeline": 3, "data": 5}),
        (DENSE, {"tensor": 12, "sequence-parallel": True}),
        (MIXED, {"tensor": 2, "expert": 4, "data": 2, "sequence-parallel": True}),
    ],
)
def test_a_layout_that_fits_is_taken(model: Mapping[str, Any], layout: Mapping[str, Any]) -> None:
    check_layout(Architecture(**model), Layout.model_validate(layout))


def test_sequence_parallelism_without_tensor_ranks_is_refused() -> None:
    with pytest.raises(ValidationError, match="sequence-parallel splits over tensor ranks, and tensor is 1"):
        Layout.model_validate({"sequence-parallel": True})


def recomputed(method: str, num_layers: int) -> OptimizerOptions:
    return OptimizerOptions.model_validate(
        {"recompute-granularity": "full", "recompute-method": method, "recompute-num-layers": num_layers}
    )


@pytest.mark.parametrize(("pipeline", "unit", "layers"), [(1, 4, 6), (1, 7, 6), (2, 2, 3)])
def test_units_that_do_not_fill_a_stage_are_refused(pipeline: int, unit: int, layers: int) -> None:
    message = f"recompute-num-layers is {unit}, which does not divide the {layers} layers of a pipeline stage"
    with pytest.raises(ConfigError, match=message) as refused:
        check_recompute(Architecture(**DENSE), Layout(pipeline=pipeline), recomputed("uniform", unit))
    assert refused.value.param == "training.options.recompute-num-layers"


@pytest.mark.parametrize(
    "options", [recomputed("uniform", 3), recomputed("block", 4), recomputed("block", 7), OptimizerOptions()]
)
def test_units_that_fill_a_stage_and_any_number_of_single_layers_are_taken(options: OptimizerOptions) -> None:
    check_recompute(Architecture(**DENSE), Layout(), options)

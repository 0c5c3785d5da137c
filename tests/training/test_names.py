"""The converter's table under the names of both layer specs, Megatron's own and Transformer Engine's.

Transformer Engine needs a GPU, so its names come from Megatron: norms by the hook with which it loads such weights
into separate norms, experts by building its module for them over a stand-in for the one class that is not there.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.post_training.modelopt.gpt.state_dict_hooks import mcore_gpt_load_te_state_dict_pre_hook
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from safetensors.torch import load_file

from reef.training import convert
from reef.training.manifest import content_id_of
from reef.training.worker import MegatronWorker
from tests.training.test_worker import reference_logprobs

IDS = np.arange(20, dtype=np.int32) * 3


class GroupedLinear(torch.nn.Module):
    """The parameters of Transformer Engine's class of that name: a weight for each expert."""

    def __init__(self, num_gemms: int, input_size: int, output_size: int, **_kwargs: Any) -> None:
        super().__init__()
        for number in range(num_gemms):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(torch.empty(output_size, input_size)))


class Renamed:
    """A module whose parameters go by other names: memory and numbers are the module's own."""

    def __init__(self, module: torch.nn.Module, names: dict[str, str]) -> None:
        self._parameters = {names.get(name, name): parameter for name, parameter in module.named_parameters()}

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self._parameters.items())


def transformer_engine_names(module: torch.nn.Module) -> dict[str, str]:
    """The name in Transformer Engine's spec of each parameter that has another one there."""
    names = {}
    for name, _ in module.named_parameters():
        layer, _, rest = name.partition("input_layernorm.weight")
        if layer != name and not rest:
            names[name] = f"{layer}self_attention.linear_qkv.layer_norm_weight"
        layer, _, rest = name.partition("pre_mlp_layernorm.weight")
        # Only a dense MLP takes its norm in: see get_gpt_layer_with_transformer_engine_spec.
        if layer != name and not rest and f"{layer}mlp.linear_fc1.weight" in dict(module.named_parameters()):
            names[name] = f"{layer}mlp.linear_fc1.layer_norm_weight"
        if found := re.fullmatch(r"(.+\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.weight", name):
            names[name] = f"{found[1]}.{found[3]}.weight{found[2]}"
    return names


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("architecture", "settings"), [("qwen3", {}), ("qwen2", {}), ("llama", {}), ("qwen3_moe", {"mlp_only_layers": [1]})]
)
def test_under_transformer_engines_names_a_model_comes_and_goes_bit_for_bit(
    make_model: Callable[..., Path],
    make_worker: Callable[..., MegatronWorker],
    architecture: str,
    settings: dict[str, Any],
    tied: bool,
) -> None:
    path = make_model(architecture, tied=tied, **settings)
    worker = make_worker(path)
    try:
        policy = worker._policy
        names = transformer_engine_names(policy.module)
        assert_names_are_megatrons(names, policy.module)
        expected = worker.logprobs([IDS], 1.0)
        with torch.no_grad():
            for parameter in policy.module.parameters():
                parameter.zero_()
        renamed: Any = Renamed(policy.module, names)
        convert.load(renamed, policy.architecture, 0, worker._weights.read, 0, 1)
        found = worker.logprobs([IDS], 1.0)
    finally:
        worker.close()
    assert expected is not None
    assert found is not None
    np.testing.assert_array_equal(found[0], expected[0])
    parameters = dict(renamed.named_parameters())
    base = load_file(path / "model.safetensors")
    places = convert.places(policy.architecture, parameters, 0)
    assert places.keys() == base.keys()
    for name, place in places.items():
        assert torch.equal(convert.part(place, parameters[place.parameter], policy.architecture), base[name]), name


def assert_names_are_megatrons(names: dict[str, str], module: Any) -> None:
    """What the loader's hook makes of the norms, and what Megatron's grouped experts call their weights."""
    norms = {theirs: ours for ours, theirs in names.items() if "layer_norm_weight" in theirs}
    state = dict(norms)
    mcore_gpt_load_te_state_dict_pre_hook(state, "", {}, True, [], [], [])
    assert state == {ours: ours for ours in norms.values()}
    for number, layer in enumerate(module.decoder.layers):
        if isinstance(layer.mlp, MLP):
            continue
        submodules = MLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        grouped = TEGroupedMLP(4, layer.mlp.experts.config, submodules, get_default_pg_collection())
        shapes = {name: parameter.shape for name, parameter in grouped.named_parameters()}
        prefix = f"decoder.layers.{number}.mlp.experts."
        ours = {name: p for name, p in module.named_parameters() if name.startswith(prefix)}
        assert {names[name].removeprefix(prefix): p.shape for name, p in ours.items()} == shapes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with Transformer Engine")
@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_on_a_gpu_layers_are_transformer_engines_and_give_back_the_same_bits(
    make_model: Callable[..., Path], make_worker: Callable[..., MegatronWorker], tmp_path: Path, architecture: str
) -> None:
    """Written where there is no GPU, and never run yet."""
    path = make_model(architecture, dtype="bfloat16")
    worker = make_worker(path, dtype="bfloat16")
    try:
        names = {name for name, _ in worker._policy.module.named_parameters()}
        found = worker.logprobs([IDS], 1.0)
        published = worker.publish("r1", tmp_path)
    finally:
        worker.close()
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert ("decoder.layers.0.mlp.experts.linear_fc1.weight0" in names) == (architecture == "qwen3_moe")
    assert found is not None
    assert published is not None
    np.testing.assert_allclose(found[0], reference_logprobs(path, IDS, 1.0).detach(), atol=0.1)
    assert published.content_id == content_id_of(path)


def test_a_parameter_that_no_model_has_is_an_error(make_model: Callable[..., Path], worker: MegatronWorker) -> None:
    with pytest.raises(KeyError):
        convert.entry_of(worker._policy.architecture, "decoder.layers.0.mlp.shared_experts.linear_fc1.weight", 0)

"""Megatron's settings for a mixture of experts."""

from typing import Any

from reef.config import Layout
from reef.training import device
from reef.training.architecture import Architecture


def expert_tensor_ranks(layout: Layout) -> int:
    """Ranks over which one expert's matrices are cut: as a dense MLP's, or none where expert ranks have it whole."""
    return layout.tensor if layout.expert == 1 else 1


def expert_settings(architecture: Architecture, layout: Layout) -> dict[str, Any]:
    """What makes Megatron's experts compute what transformers' do; no token is dropped. Empty for a dense model.

    No loss balances the load: a router moves by the gradient of the method's loss alone.
    """
    experts = architecture.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_layer_freq": [int(has) for has in experts.layers],
        "moe_ffn_hidden_size": experts.ffn_size,
        "moe_router_topk": experts.num_per_token,
        # The softmax over the chosen ones is the softmax over all, divided by its sum over the chosen.
        "moe_router_pre_softmax": not experts.weights_sum_to_1,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": device.has_transformer_engine(),
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": expert_tensor_ranks(layout),
    }

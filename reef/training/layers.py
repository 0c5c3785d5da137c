"""What a transformer layer is made of: Transformer Engine's parts where it is installed, else Megatron's own."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig

from reef.training import device
from reef.training.attention import FusedCausalAttention


class HeadNorm(torch.nn.RMSNorm):
    """RMSNorm over the numbers of one head. Megatron adds its gradient up over tensor ranks, going by its name."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_kwargs: Any):
        super().__init__(hidden_size, eps=eps)


class SequenceNorm(HeadNorm):
    """RMSNorm over this tensor rank's part of the sequence; Megatron's own local norms refuse sequence parallelism.

    The mark tells Megatron that each tensor rank has a part of the weight's gradient, to be added up.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_kwargs: Any):
        super().__init__(config, hidden_size, eps)
        self.weight.sequence_parallel = True  # type: ignore[attr-defined]


def layer_spec(config: TransformerConfig) -> Any:
    """What GPTModel builds this rank's layers from: each is dense or has experts, as `config.moe_layer_freq` says."""
    engine = device.has_transformer_engine()
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=engine, normalization=config.normalization)
    if engine:
        return block
    block.layer_norm = SequenceNorm if config.sequence_parallel else WrappedTorchNorm
    for spec in block.layer_specs:
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = FusedCausalAttention
        if config.sequence_parallel:
            spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = SequenceNorm
            if config.qk_layernorm:
                attention.q_layernorm = attention.k_layernorm = HeadNorm
    return block

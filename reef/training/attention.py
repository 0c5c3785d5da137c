"""Causal self-attention by torch's fused kernel, in the place of the local spec's chain of whole T x T matrices.

With Transformer Engine Megatron has a fused kernel of its own; without it the local spec's attention keeps three T x T
matrices per head for the backward pass and takes three times as long. Shape letters: T positions, B rows, H query heads
and G key-value heads of this tensor rank, D numbers per head.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig


class FusedCausalAttention(torch.nn.Module):
    """What Megatron's attention layer calls between its two projections. Holds no weights."""

    def __init__(self, config: TransformerConfig, *_args: Any, softmax_scale: float | None = None, **_kwargs: Any):
        super().__init__()
        if config.attention_dropout:
            raise ValueError(f"attention dropout is {config.attention_dropout}, but RL trains without")
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_kwargs: Any,
    ) -> torch.Tensor:
        """Attend from [T, B, H, D] to [T, B, G, D], each position to itself and those before it.

        Packed sequences come as [T, H, D] and [T, G, D] and attend to their own positions alone.

        Returns:
            [T, B, H * D], B = 1 for packed sequences.
        """
        if packed_seq_params is not None:
            lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
            parts = (torch.split(part.unsqueeze(1), lengths) for part in (query, key, value))
            return torch.cat([self._attend(*sequence) for sequence in zip(*parts, strict=True)])
        return self._attend(query, key, value)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        length, rows = query.shape[:2]
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return context.permute(2, 0, 1, 3).reshape(length, rows, -1)

"""A critic's last layer: one number for each position, in the place of the output layer."""

from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig


class ValueHead(torch.nn.Linear):
    """hidden [T, B, H] -> values [T, B, 1]. Whole on every tensor rank, and 0 at first: it expects nothing yet."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config.hidden_size, 1, dtype=config.params_dtype)
        self._gathers = config.sequence_parallel
        self.forget()
        if self._gathers:  # each tensor rank sees a part of the sequence: Megatron adds their gradients up by this mark
            self.weight.sequence_parallel = True  # type: ignore[attr-defined]
            self.bias.sequence_parallel = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def forget(self) -> None:
        """Expect nothing again."""
        self.weight.zero_()
        self.bias.zero_()

    def forward(self, hidden: torch.Tensor, **_of_output_layers: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """As Megatron's output layers are called and answer; over the whole sequence on every rank."""
        values = super().forward(hidden)
        if self._gathers:  # what follows is the same on every tensor rank, so a gradient is cut up, not added up
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None

"""The random numbers of a rank."""

from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def rng_state() -> dict[str, Any]:
    """The random numbers of this rank: torch's own and those Megatron tracks for its parallel regions."""
    return {"torch": torch.get_rng_state(), "tracked": get_cuda_rng_tracker().get_states()}


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo what was drawn since `rng_state`. The same state may be set again: Megatron gets a copy to go on with."""
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(dict(state["tracked"]))

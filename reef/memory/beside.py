"""Memory of the models beside the policy on one trainer rank: a critic that learns, a reference that does not."""

from reef.config import Config
from reef.memory import parameters
from reef.methods.base import build
from reef.training.architecture import Architecture
from reef.training.settings import settings


def numbers_beside(architecture: Architecture, config: Config, stage: int) -> tuple[int, int]:
    """Numbers that the models beside the policy hold on a rank of pipeline stage `stage`, and of those that learn.

    A critic has the policy's body, and in the place of an output layer of its own hidden_size + 1 numbers. Frozen
    attention has no gradients and no moments; its two norms of a layer are no part of it.
    """
    method = build(settings(config)["method"])
    layout = config.training.layout
    body = sum(parameters.on_rank(architecture, layout, stage))
    held = learning = 0
    if method.critic is not None:
        held = learning = body - _output(architecture, config, stage) + _head(architecture, config, stage)
        if method.critic.critic_freeze == "attention":
            norms = 2 * architecture.hidden_size
            each = parameters.attention(architecture, layout.tensor) - norms
            learning -= each * len(parameters.stage_layers(architecture, layout, stage))
    if method.uses_reference:
        held += body
    return held, learning


def _is_last(config: Config, stage: int) -> bool:
    return stage == config.training.layout.pipeline - 1


def _output(architecture: Architecture, config: Config, stage: int) -> int:
    """Numbers of the output layer that a rank has beside the embedding."""
    if not _is_last(config, stage) or (stage == 0 and architecture.tied):
        return 0
    return parameters.embedding(architecture, config.training.layout.tensor)


def _head(architecture: Architecture, config: Config, stage: int) -> int:
    return architecture.hidden_size + 1 if _is_last(config, stage) else 0

"""Memory of the models beside the policy on one trainer rank: a critic that learns, a reference that does not."""

from dataclasses import dataclass

from reef.config import Config
from reef.memory import parameters
from reef.methods.base import build
from reef.training.architecture import Architecture
from reef.training.settings import settings


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of the models beside the policy on one rank."""

    held: int
    shared: int  # of those that learn, all but experts
    experts: int  # of those that learn


def numbers_beside(architecture: Architecture, config: Config, stage: int) -> Numbers:
    """What the models beside the policy hold on a rank of pipeline stage `stage`.

    A critic has the policy's body, and in the place of an output layer of its own hidden_size + 1 numbers. Frozen
    attention has no gradients and no moments; its two norms of a layer are no part of it.
    """
    method = build(settings(config)["method"])
    layout = config.training.layout
    shared, experts = parameters.on_rank(architecture, layout, stage)
    held = learning = learning_experts = 0
    if method.critic is not None:
        learning = shared - _output(architecture, config, stage) + _head(architecture, config, stage)
        learning_experts = experts
        held = learning + experts
        if method.critic.critic_freeze == "attention":
            norms = 2 * architecture.hidden_size
            each = parameters.attention(architecture, layout.tensor) - norms
            learning -= each * len(parameters.stage_layers(architecture, layout, stage))
    if method.uses_reference:
        held += shared + experts
    return Numbers(held, learning, learning_experts)


def numbers_of_critic(architecture: Architecture, config: Config) -> int:
    """Numbers of the whole critic; 0 where there is none. (Frozen ones have no moments: this counts them in.)"""
    if build(settings(config)["method"]).critic is None:
        return 0
    output = 0 if architecture.tied else parameters.embedding(architecture, 1)
    return parameters.of_model(architecture) - output + architecture.hidden_size + 1


def _is_last(config: Config, stage: int) -> bool:
    return stage == config.training.layout.pipeline - 1


def _output(architecture: Architecture, config: Config, stage: int) -> int:
    """Numbers of the output layer that a rank has beside the embedding."""
    if not _is_last(config, stage) or (stage == 0 and architecture.tied):
        return 0
    return parameters.embedding(architecture, config.training.layout.tensor)


def _head(architecture: Architecture, config: Config, stage: int) -> int:
    return architecture.hidden_size + 1 if _is_last(config, stage) else 0

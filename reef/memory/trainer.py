"""Memory of one trainer rank, from the model's sizes: nothing is started or allocated."""

from dataclasses import dataclass

from reef.config import Config
from reef.memory import parameters
from reef.memory.activations import activation_bytes, logits_bytes
from reef.memory.beside import numbers_beside, numbers_of_critic
from reef.training.architecture import Architecture

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
GRADIENT_BYTES = 4  # gradients are added up in float32 whatever the weights are
MOMENTS_BYTES = 8  # AdamW's two moments, float32
MAIN_COPY_BYTES = 4  # the float32 weights that a bfloat16 optimizer steps

RUNTIME_CPU_BYTES = 640 * 2**20
"""Python, torch and Megatron: a worker of the starter model takes 610 MiB (docs/performance.md)."""

RUNTIME_GPU_BYTES = 2 * 2**30
"""CUDA context, kernels, NCCL buffers and what the allocator cannot use. An assumption: no GPU was measured."""


@dataclass(frozen=True, slots=True)
class TrainerMemory:
    """Bytes of one trainer rank where it takes most: at the end of a microbatch's forward pass."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    runtime: int
    beside: int = 0  # a critic's weights, gradients and optimizer, and a reference's weights

    @property
    def total(self) -> int:
        own = self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.runtime
        return own + self.beside


def trainer_memory(architecture: Architecture, config: Config, stage: int, *, on_gpu: bool) -> TrainerMemory:
    """What each rank of pipeline stage `stage` takes.

    Bytes per parameter are Megatron's own (its theoretical memory usage: 18, or 6 + 12 / data ranks with the
    distributed optimizer, for bfloat16): weights 2 (4 in float32), gradients 4, moments 8, and 4 for a main copy in
    bfloat16. The distributed optimizer divides moments and main copy over the ranks that hold the same weights: data
    and context ranks, for experts over as many as are left beside the expert ranks.
    """
    training = config.training
    layout, options = training.layout, training.options
    shared, experts = parameters.on_rank(architecture, layout, stage)
    item = ITEM_BYTES[training.dtype]
    state = _optimizer_bytes(training.dtype)
    copies = expert_copies = 1
    if options.use_distributed_optimizer:
        copies = layout.data * layout.context
        expert_copies = layout.world_size // layout.pipeline // parameters.expert_ranks(layout)
    optimizer = state * (shared // copies + experts // expert_copies)
    tokens = largest_microbatch(architecture, config) // layout.context
    beside = numbers_beside(architecture, config, stage)
    return TrainerMemory(
        weights=item * (shared + experts),
        gradients=GRADIENT_BYTES * (shared + experts),
        optimizer=optimizer,
        activations=activation_bytes(architecture, layout, options, tokens, item, stage),
        logits=logits_bytes(architecture, layout, tokens) if stage == layout.pipeline - 1 else 0,
        runtime=(RUNTIME_GPU_BYTES if on_gpu else RUNTIME_CPU_BYTES) + bucket_bytes(config),
        beside=item * beside.held
        + GRADIENT_BYTES * (beside.shared + beside.experts)
        + state * (beside.shared // copies + beside.experts // expert_copies),
    )


def largest_microbatch(architecture: Architecture, config: Config) -> int:
    """Tokens of the largest microbatch: the budget, or the longest sequence, which may be over it and goes alone."""
    longest = config.inference.context_length or architecture.context_length
    return max(config.training.micro_batch_tokens, longest)


def checkpoint_bytes(architecture: Architecture, config: Config) -> int:
    """A whole checkpoint: weights, moments and, in bfloat16, main copies. While one is written, memory holds a copy."""
    item = ITEM_BYTES[config.training.dtype]
    numbers = parameters.of_model(architecture) + numbers_of_critic(architecture, config)
    return numbers * (item + _optimizer_bytes(config.training.dtype))


def _optimizer_bytes(dtype: str) -> int:
    """Of one parameter: moments, and a main copy where weights are not float32 themselves."""
    return MOMENTS_BYTES + (MAIN_COPY_BYTES if dtype != "float32" else 0)


def bucket_bytes(config: Config) -> int:
    """What the trainer gathers before it is sent, and an engine before it is loaded: none where weights go by disk."""
    sync = config.training.sync
    return sync.bucket_bytes if config.training.backend != "none" and sync.transport == "distributed" else 0

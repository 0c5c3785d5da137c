"""Memory of one trainer rank, from the model's sizes: nothing is started or allocated.

Letters: h hidden size, f columns of an MLP, q and k the columns of all query heads and of all key heads, v vocabulary,
t tensor ranks, e bytes of a trained weight (4 in float32, 2 in bfloat16).
"""

from dataclasses import dataclass

from reef.config import Config, Layout, OptimizerOptions
from reef.memory import parameters
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

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits + self.runtime


def trainer_memory(architecture: Architecture, config: Config, stage: int, *, on_gpu: bool) -> TrainerMemory:
    """What each rank of pipeline stage `stage` takes.

    Bytes per parameter are Megatron's own (its theoretical memory usage: 18, or 6 + 12 / data ranks with the
    distributed optimizer, for bfloat16): weights e, gradients 4, moments 8, and 4 for a main copy in bfloat16. The
    distributed optimizer divides moments and main copy over the ranks that hold the same weights: data and context
    ranks, for experts over as many as are left beside the expert ranks.
    """
    training = config.training
    layout, options = training.layout, training.options
    shared, experts = parameters.on_rank(architecture, layout, stage)
    item = ITEM_BYTES[training.dtype]
    state = _optimizer_bytes(training.dtype)
    if options.use_distributed_optimizer:
        copies = layout.data * layout.context
        expert_copies = layout.world_size // layout.pipeline // parameters.expert_ranks(layout)
        optimizer = state * (shared // copies + experts // expert_copies)
    else:
        optimizer = state * (shared + experts)
    tokens = largest_microbatch(architecture, config) // layout.context
    return TrainerMemory(
        weights=item * (shared + experts),
        gradients=GRADIENT_BYTES * (shared + experts),
        optimizer=optimizer,
        activations=_activations(architecture, layout, options, tokens, item, stage),
        logits=_logits(architecture, layout, tokens) if stage == layout.pipeline - 1 else 0,
        runtime=(RUNTIME_GPU_BYTES if on_gpu else RUNTIME_CPU_BYTES) + bucket_bytes(config),
    )


def largest_microbatch(architecture: Architecture, config: Config) -> int:
    """Tokens of the largest microbatch: the budget, or the longest sequence, which may be over it and goes alone."""
    longest = config.inference.context_length or architecture.context_length
    return max(config.training.micro_batch_tokens, longest)


def checkpoint_bytes(architecture: Architecture, config: Config) -> int:
    """A whole checkpoint: weights, moments and, in bfloat16, main copies. While one is written, memory holds a copy."""
    item = ITEM_BYTES[config.training.dtype]
    return parameters.of_model(architecture) * (item + _optimizer_bytes(config.training.dtype))


def _optimizer_bytes(dtype: str) -> int:
    """Of one parameter: moments, and a main copy where weights are not float32 themselves."""
    return MOMENTS_BYTES + (MAIN_COPY_BYTES if dtype != "float32" else 0)


def bucket_bytes(config: Config) -> int:
    """What the trainer gathers before it is sent, and an engine before it is loaded: none where weights go by disk."""
    sync = config.training.sync
    return sync.bucket_bytes if config.training.backend != "none" and sync.transport == "distributed" else 0


def _logits(architecture: Architecture, layout: Layout, tokens: int) -> int:
    """Tokens * v / t float32 numbers, twice: the softmax that is kept, and the logits or their gradient beside it.

    Measured on a CPU: 2.1 to 2.2 times the logits at the peak of a step, in float32 and in bfloat16.
    """
    return 2 * 4 * tokens * architecture.vocab_size // layout.tensor


def _activations(
    architecture: Architecture, layout: Layout, options: OptimizerOptions, tokens: int, item: int, stage: int
) -> int:
    """What forward passes keep for their backward passes on a rank of pipeline stage `stage`, and gradients in work.

    With several stages the first keeps as many microbatches as there are stages, the last one (1F1B schedule). A layer
    that is computed again keeps its input alone, and one unit of such layers is there whole while it is worked on.
    Gradients in work are, at most, those of an MLP's gated columns (2 e f / t a token) and of the embedding.
    """
    layers = parameters.stage_layers(architecture, layout, stage)
    each = [_layer(architecture, layout, tokens, item, layer) for layer in layers]
    width = layout.tensor if layout.sequence_parallel else 1
    inputs = item * tokens * architecture.hidden_size // width
    in_flight = layout.pipeline - stage
    if options.recompute_granularity == "full":
        unit = options.recompute_num_layers or 1
        if options.recompute_method == "block":  # the first `unit` layers, one by one
            again = min(unit, len(each))
            kept, working = again * inputs + sum(each[again:]), max(each[:again])
        else:
            kept, working = -(-len(each) // unit) * inputs, max(each) * min(unit, len(each))
    else:  # "selective" computes attention's core again, which keeps next to nothing: our attention is fused
        kept, working = sum(each), 0
    # The last norm: its input and the normed numbers in float32, and what goes into the output layer.
    head = (8 + item) * tokens * architecture.hidden_size // width if stage == layout.pipeline - 1 else 0
    columns = max(_mlp_columns(architecture, layout, layer) for layer in layers)
    at_ends = stage in (0, layout.pipeline - 1)
    gradients = 2 * item * tokens * columns
    gradients += item * parameters.embedding(architecture, layout.tensor) if at_ends else 0
    return in_flight * kept + working + head + gradients


def _mlp_columns(architecture: Architecture, layout: Layout, layer: int) -> int:
    """Columns of one layer's MLP on this rank, for each token: of a mixture, those of the experts that a token has."""
    if of := parameters.experts_of(architecture, layer):
        return of.num_per_token * of.ffn_size // layout.tensor  # divided either way: see `_layer`
    return architecture.ffn_size // layout.tensor


def _layer(architecture: Architecture, layout: Layout, tokens: int, item: int, layer: int) -> int:
    """Bytes that one layer keeps for its backward pass, at `tokens` tokens.

    Own derivation, in the manner of Korthikanti et al. 2022 (arXiv:2205.05198), for what Reef runs: gated MLP, grouped
    queries, fused attention (no T x T matrix), norms that keep their input and the normed numbers in float32. Per
    token: norms 2 (8 + e) h; of queries and keys 8 (q + k) / t; projections, rotated heads and attention's answer
    e (3q + 3k) / t; MLP 5 e f / t. Experts: their chosen copies of a token go out, in and back (4 e h), each has an
    MLP of its own; the router's float32 scores twice. Tokens are taken to spread evenly over expert ranks. Measured
    on a CPU: see `tests/training/test_memory.py`.
    """
    h, t = architecture.hidden_size, layout.tensor
    q = architecture.num_heads * architecture.head_dim // t
    k = parameters.key_columns(architecture, t)
    sequence = t if layout.sequence_parallel else 1
    bytes_per_token = 2 * (8 + item) * h // sequence + item * (3 * q + 3 * k)
    if architecture.qk_norm:
        bytes_per_token += 8 * (q + k)
    if of := parameters.experts_of(architecture, layer):
        # Experts cut over tensor ranks see the whole sequence, each rank with its columns.
        columns, part = (of.ffn_size, sequence) if layout.expert > 1 else (of.ffn_size // t, 1)
        routed = of.num_per_token * item * (4 * h + 5 * columns)
        return tokens * (bytes_per_token + routed // part + 8 * of.num_experts // sequence)
    return tokens * (bytes_per_token + 5 * item * architecture.ffn_size // t)

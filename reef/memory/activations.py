"""What a trainer rank's passes keep: the part of its memory that grows with the tokens that go through it at once.

Letters: h hidden size, f columns of an MLP, q and k the columns of all query heads and of all key heads, v vocabulary,
t tensor ranks, e bytes of a trained weight (4 in float32, 2 in bfloat16).
"""

from collections.abc import Sequence

from reef.config import Layout
from reef.memory import parameters
from reef.options import OptimizerOptions
from reef.training.architecture import Architecture


def logits_bytes(architecture: Architecture, layout: Layout, tokens: int) -> int:
    """Tokens * v / t float32 numbers, twice: the softmax that is kept, and the logits or their gradient beside it.

    Measured on a CPU: 2.1 to 2.2 times the logits at the peak of a step, in float32 and in bfloat16.
    """
    return 2 * 4 * tokens * architecture.vocab_size // layout.tensor


def activation_bytes(
    architecture: Architecture, layout: Layout, options: OptimizerOptions, tokens: int, item: int, stage: int
) -> int:
    """What forward passes keep for their backward passes on a rank of pipeline stage `stage`, and gradients in work.

    With several stages the first keeps as many microbatches as there are stages, the last one (1F1B schedule).
    Gradients in work are, at most, those of an MLP's gated columns (2 e f / t a token) and of the embedding.

    Args:
        tokens: of a microbatch, on this rank.
        item: bytes of a trained weight.
    """
    layers = parameters.stage_layers(architecture, layout, stage)
    last = layout.pipeline - 1
    input_bytes = item * tokens * architecture.hidden_size // _sequence_parts(layout)
    each = [_layer(architecture, layout, tokens, item, layer) for layer in layers]
    kept, working = _kept(each, input_bytes, options)
    total = (layout.pipeline - stage) * kept + working
    total += 2 * item * tokens * max(_mlp_columns(architecture, layout, layer) for layer in layers)
    if stage in (0, last):
        total += item * parameters.embedding(architecture, layout.tensor)
    if stage == last:  # the last norm: its input and the normed numbers in float32, and what goes into the output layer
        total += (8 + item) * tokens * architecture.hidden_size // _sequence_parts(layout)
    return total


def _kept(each: Sequence[int], input_bytes: int, options: OptimizerOptions) -> tuple[int, int]:
    """Bytes that layers of `each` bytes keep for every microbatch in flight, and once, while one is worked on.

    A layer that is computed again keeps its input alone, and one unit of such layers is there whole meanwhile.
    """
    unit = min(options.recompute_num_layers or 1, len(each))
    if options.recompute_granularity != "full":
        return sum(each), 0  # "selective" computes attention's core again, which keeps next to nothing: it is fused
    if options.recompute_method == "block":  # the first `unit` layers, one by one
        return unit * input_bytes + sum(each[unit:]), max(each[:unit])
    return -(-len(each) // unit) * input_bytes, unit * max(each)


def _sequence_parts(layout: Layout) -> int:
    """Parts into which tensor ranks cut the sequence between their layers."""
    return layout.tensor if layout.sequence_parallel else 1


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
    sequence = _sequence_parts(layout)
    bytes_per_token = 2 * (8 + item) * h // sequence + item * (3 * q + 3 * k)
    if architecture.qk_norm:
        bytes_per_token += 8 * (q + k)
    if of := parameters.experts_of(architecture, layer):
        # Experts cut over tensor ranks see the whole sequence, each rank with its columns.
        columns, part = (of.ffn_size, sequence) if layout.expert > 1 else (of.ffn_size // t, 1)
        routed = of.num_per_token * item * (4 * h + 5 * columns)
        return tokens * (bytes_per_token + routed // part + 8 * of.num_experts // sequence)
    return tokens * (bytes_per_token + 5 * item * architecture.ffn_size // t)

"""How many numbers a model is made of, and which of them a rank holds. Counts, not bytes.

Own derivation from the shapes of the weights; `tests/training/test_memory.py` compares it with real ranks and files.
Letters: h hidden size, f columns of an MLP, q and k the columns of all query heads and of all key heads, v vocabulary.
"""

from reef.config import Layout
from reef.training.architecture import Architecture, Experts


def attention(architecture: Architecture, tensor: int) -> int:
    """One layer's attention with its two norms, on one of `tensor` ranks.

    (h (q + 2k) + q h) / tensor, biases (q + 2k) / tensor, norms 2h, and 2 head_dim where queries and keys are normed.
    With more ranks than key heads each rank has one head, as SGLang does it (Reef trains no such layout).
    """
    h = architecture.hidden_size
    q = architecture.num_heads * architecture.head_dim // tensor
    k = key_columns(architecture, tensor)
    bias = q + 2 * k if architecture.qkv_bias else 0
    norms = 2 * h + (2 * architecture.head_dim if architecture.qk_norm else 0)
    return h * (q + 2 * k) + q * h + bias + norms


def key_columns(architecture: Architecture, tensor: int) -> int:
    """Columns of the key heads that one of `tensor` ranks holds; as many again are the values'."""
    return max(1, architecture.num_kv_heads // tensor) * architecture.head_dim


def mlp(architecture: Architecture, tensor: int) -> int:
    """One layer's dense gated MLP on one of `tensor` ranks: 3 h f / tensor."""
    return 3 * architecture.hidden_size * architecture.ffn_size // tensor


def experts_of(architecture: Architecture, layer: int) -> Experts | None:
    """The experts of layer number `layer`, from 0; None where it has a dense MLP."""
    return architecture.experts if architecture.has_experts(layer) else None


def experts(architecture: Architecture, of: Experts, ranks: int) -> int:
    """One layer's experts on one of `ranks` that share them: 3 h f of one expert, times experts, / ranks."""
    return 3 * architecture.hidden_size * of.ffn_size * of.num_experts // ranks


def expert_ranks(layout: Layout) -> int:
    """Ranks that share a layer's experts: whole ones on each expert rank, or, without those, cut over tensor ranks."""
    return layout.expert if layout.expert > 1 else layout.tensor


def router(architecture: Architecture, of: Experts) -> int:
    """One layer's router, whole on every rank: h for each expert."""
    return architecture.hidden_size * of.num_experts


def embedding(architecture: Architecture, tensor: int) -> int:
    """The embedding, or an output layer of its own, on one of `tensor` ranks: v h / tensor."""
    return architecture.vocab_size * architecture.hidden_size // tensor


def stage_layers(architecture: Architecture, layout: Layout, stage: int) -> range:
    """Numbers of the layers that pipeline stage `stage` holds, from 0."""
    each = architecture.num_layers // layout.pipeline
    return range(stage * each, (stage + 1) * each)


def on_rank(architecture: Architecture, layout: Layout, stage: int) -> tuple[int, int]:
    """What a trainer's rank of pipeline stage `stage` holds: all but experts, and experts.

    They are counted apart, since they are divided over other ranks (see `expert_ranks`), and have other copies. A
    tied embedding is there twice where the pipeline has several stages: the first looks words up, the last is the
    output layer, and both step it.
    """
    tensor, last = layout.tensor, layout.pipeline - 1
    shared = apart = 0
    for layer in stage_layers(architecture, layout, stage):
        shared += attention(architecture, tensor)
        if of := experts_of(architecture, layer):
            shared += router(architecture, of)
            apart += experts(architecture, of, expert_ranks(layout))
        else:
            shared += mlp(architecture, tensor)
    if stage == 0:
        shared += embedding(architecture, tensor)
    if stage == last:
        shared += architecture.hidden_size  # the last norm
        if last > 0 or not architecture.tied:
            shared += embedding(architecture, tensor)
    return shared, apart


def of_model(architecture: Architecture) -> int:
    """The whole model, as its files hold it."""
    return sum(on_rank(architecture, Layout(), 0))


def on_engine(architecture: Architecture, tensor: int) -> int:
    """What one of an engine's `tensor` ranks holds: SGLang divides experts over the same ranks as the rest."""
    total = architecture.hidden_size + embedding(architecture, tensor) * (1 if architecture.tied else 2)
    for layer in range(architecture.num_layers):
        total += attention(architecture, tensor)
        if of := experts_of(architecture, layer):
            total += router(architecture, of) + experts(architecture, of, tensor)
        else:
            total += mlp(architecture, tensor)
    return total

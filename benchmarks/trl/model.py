"""A model of about 5M parameters that answers as the starter does: the starter, grown wider and deeper.

Every parameter that is added stands where it changes nothing yet, and learns within a step or two: what writes into the
residual stream from a new head, neuron or layer, or into a new dimension of it, starts at zero; what reads is random.
So the larger model starts at the starter's accuracy, and takes a second to make instead of minutes of pretraining.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,  # as many for each key-value head as the starter has
    "num_key_value_heads": 4,
    "intermediate_size": 768,
}
WRITES = ("o_proj.weight", "down_proj.weight", "embed_tokens.weight")


def grow(small_path: Path, out: Path) -> Path:
    """Write the larger model and the tokenizer to `out`, and return it."""
    small = AutoModelForCausalLM.from_pretrained(str(small_path), dtype=torch.float32)
    values = AutoConfig.from_pretrained(str(small_path)).to_dict()
    del values["layer_types"]  # one entry a layer: made anew
    # A mean of squares over more dimensions, of which the new ones are zero, is smaller by this factor.
    share = values["hidden_size"] / SIZES["hidden_size"]
    values["rms_norm_eps"] *= share
    torch.manual_seed(0)
    large = Qwen3ForCausalLM(Qwen3Config(**{**values, **SIZES}))
    old = small.state_dict()
    with torch.no_grad():
        for name, parameter in large.named_parameters():
            if name.endswith(WRITES):
                parameter.zero_()
            if name in old:
                widens_norm = parameter.dim() == 1 and parameter.shape != old[name].shape
                corner = tuple(slice(size) for size in old[name].shape)
                parameter[corner] = old[name] * (share**0.5 if widens_norm else 1.0)
    large.save_pretrained(out)
    AutoTokenizer.from_pretrained(str(small_path)).save_pretrained(out)
    return out

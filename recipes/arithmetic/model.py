"""The starter model's parts: its tokenizer and its (untrained) network.

The tokenizer is byte-level BPE with every digit apart, 300 entries, and a ChatML-like template. The network is a
Qwen3 small enough to train and serve on a laptop's CPU: 361,440 parameters.
"""

import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from recipes.arithmetic.task import draw, solution

CONTEXT = 512  # tokens
VOCAB_SIZE = 300
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"  # ids 0, 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Train the tokenizer on the task's own texts; the result is the same on every call."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    problems = [draw(rng, rng.randint(1, 8)) for _ in range(2000)]
    texts = [text for p in problems for text in (f"user\n{p.text}", f"assistant\n{solution(p)}")]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=[PAD, START, END],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[START],
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=CONTEXT,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(seed: int) -> Qwen3ForCausalLM:
    """Make the untrained network in float32, with weights drawn from ``seed``."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=256,
            tie_word_embeddings=True,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    )

"""The committed starter model: it loads, its tokenizer is faithful, and it is as good (and as bad) as its card says."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipes.arithmetic import pretrain
from recipes.arithmetic.model import build_tokenizer
from recipes.arithmetic.task import Problem, held_out_set

STARTER = Path(pretrain.__file__).parent / "starter"
CARD: dict[str, Any] = json.loads((STARTER / "card.json").read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(STARTER)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # two threads wait for each other for minutes where the machine is busy
    yield AutoModelForCausalLM.from_pretrained(STARTER)
    torch.set_num_threads(threads)


def test_the_committed_tokenizer_is_the_one_the_code_builds(tokenizer: Any) -> None:
    assert tokenizer.get_vocab() == build_tokenizer().get_vocab()
    assert len(tokenizer) == 300
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.eos_token) == (0, 2, "<|im_end|>")


@pytest.mark.parametrize(
    "text",
    [
        "Start at 9. Subtract 4. Add 3.",
        "9-4=5, 5+3=8. <final>8</final>",
        "",
        " ",
        "\n\n\t",
        "héllo wörld",
        "日本語 🐚",
        "a" * 300,
        "1234567890",
        "\x00\x7f",
        "don't , clean ?",
    ],
)
def test_any_text_survives_a_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_every_digit_is_a_token_of_its_own(tokenizer: Any) -> None:
    ids = tokenizer("10-5=5, 123")["input_ids"]
    pieces = [tokenizer.decode([id]) for id in ids]
    assert [piece for piece in pieces if any(c.isdigit() for c in piece)] == ["1", "0", "5", "5", "1", "2", "3"]


def test_the_template_writes_turns_and_opens_the_assistants(tokenizer: Any) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Start at 1. Add 2."}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nStart at 1. Add 2.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == text
    assert ids.count(1) == 3  # <|im_start|> is one token


def test_the_model_is_the_one_on_the_card(model: Any) -> None:
    assert model.num_parameters() == CARD["parameters"] == 361_440
    assert model.config.max_position_embeddings == CARD["context"] == 512
    assert model.config.tie_word_embeddings
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (STARTER / "model.safetensors").stat().st_size < 1_500_000
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (2, 0)


def test_greedy_accuracy_is_what_the_card_says(model: Any, tokenizer: Any) -> None:
    card = next(row for row in CARD["measured"] if row["steps"] == 4)
    problems = held_out_set(4, card["problems"])
    answers = pretrain.sample(model, tokenizer, problems, num_samples=0)
    accuracy = sum(pretrain.grade(p, row[0]).correct for p, row in zip(problems, answers, strict=True)) / len(problems)
    assert accuracy == pytest.approx(card["greedy"], abs=0.04)  # equal but for float rounding on another machine


def test_the_careless_writer_forgets_the_borrow_and_nothing_else() -> None:
    assert pretrain.careless_values(Problem(12, (("-", 5),))) == [17]
    assert pretrain.careless_values(Problem(3, (("-", 5), ("+", 4)))) == [8, 12]
    assert pretrain.careless_values(Problem(12, (("-", 4), ("+", 5)))) == [8, 13]
    assert pretrain.careless_values(Problem(9, (("-", 5),))) == [4]


def test_one_pretraining_step_is_the_same_for_the_same_seed(tokenizer: Any) -> None:
    ids, labels = pretrain.corpus_batch(tokenizer, random.Random(5))
    again, _ = pretrain.corpus_batch(tokenizer, random.Random(5))
    assert torch.equal(ids, again)
    assert ids.shape == labels.shape
    taught = tokenizer.decode(ids[0][labels[0] != -100])
    assert taught.endswith("</final><|im_end|>")
    asked = tokenizer.decode(ids[0][labels[0] == -100])
    assert asked.startswith("<|im_start|>user\nStart at ")
    assert "<final>" not in asked

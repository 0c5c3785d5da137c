"""Make the starter model: ``python -m recipes.arithmetic.pretrain`` (seeded; minutes on two cores).

Supervised training on worked solutions of 1-8 steps from the training side of the task. Four in five are written by a
careless writer, who forgets the borrow when subtracting 5 or more across a ten. So the right habit and the wrong one
are both in the model, and reinforcement learning has something to choose between: the headroom is planted. Afterwards
the model is measured on held-out problems and the numbers are written beside the weights (``card.json``).
"""

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from reef_harness.graders import FinalGrader, Verdict
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from recipes.arithmetic.model import build_model, build_tokenizer
from recipes.arithmetic.task import Problem, draw, held_out_set, solution

CARELESS_SHARE = 0.8  # of the solutions
CARELESS_FROM = 5  # the smallest amount whose borrow is forgotten
BATCH_SIZE = 64  # solutions
PEAK_LR = 3e-3
WARMUP_STEPS = 100
SAMPLES = 8  # per held-out problem, for pass@1 and pass@8


@dataclass(frozen=True, slots=True)
class Measurement:
    """How the model does on one class of held-out problems. Shares are of samples, except pass_at_8: of problems."""

    steps: int
    problems: int
    pass_at_1: float  # at temperature 1, over SAMPLES samples a problem
    greedy: float
    pass_at_8: float
    format_valid: float  # of the samples at temperature 1


def careless_values(problem: Problem) -> list[int]:
    """The running values of a writer who forgets the borrow when subtracting CARELESS_FROM or more across a ten."""
    values, value = [], problem.start
    for sign, amount in problem.steps:
        after = value + amount if sign == "+" else value - amount
        if sign == "-" and amount >= CARELESS_FROM and after // 10 != value // 10:
            after += 10
        values.append(after)
        value = after
    return values


def prompt_ids(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem]) -> list[list[int]]:
    """The token ids of each problem as a chat prompt, ready for the assistant's turn."""
    chats = [[{"role": "user", "content": problem.text}] for problem in problems]
    ids: list[list[int]] = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    return ids


def corpus_batch(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one batch of solved problems of one class: ids_BT and labels_BT (-100 on prompts and padding)."""
    steps = rng.randint(1, 8)
    problems = [draw(rng, steps) for _ in range(BATCH_SIZE)]
    written = [careless_values(p) if rng.random() < CARELESS_SHARE else p.values for p in problems]
    prompts = prompt_ids(tokenizer, problems)
    answers = tokenizer([solution(p, v) + "<|im_end|>" for p, v in zip(problems, written, strict=True)])["input_ids"]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids_BT = torch.full((BATCH_SIZE, width), tokenizer.pad_token_id, dtype=torch.long)
    labels_BT = torch.full((BATCH_SIZE, width), -100, dtype=torch.long)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        ids_BT[row, :end] = torch.tensor(prompt + answer)
        labels_BT[row, len(prompt) : end] = torch.tensor(answer)
    return ids_BT, labels_BT


def learning_rate(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to a twentieth of the peak. ``step`` counts from 1."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return PEAK_LR * min(1.0, step / WARMUP_STEPS) * max(0.05, cosine)


def train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, num_steps: int) -> float:
    """Train in place with a progress bar; return the last step's loss."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    loss = torch.zeros(())
    model.train()
    bar = tqdm(range(1, num_steps + 1), desc="pretraining", unit="step")
    for step in bar:
        optimizer.param_groups[0]["lr"] = learning_rate(step, num_steps)
        ids_BT, labels_BT = corpus_batch(tokenizer, rng)
        logits_BTV = model(input_ids=ids_BT, use_cache=False).logits
        loss = cross_entropy(logits_BTV[:, :-1].flatten(0, 1), labels_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}")
    return loss.item()


@torch.inference_mode()
def sample(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Problem], num_samples: int
) -> list[list[tuple[str, bool]]]:
    """Answer each problem ``num_samples`` times at temperature 1 (0: once, greedily): (text, finished) each."""
    longest = max(len(problem.steps) for problem in problems)
    answers: list[list[tuple[str, bool]]] = []
    for first in range(0, len(problems), 64):
        inputs = tokenizer.pad({"input_ids": prompt_ids(tokenizer, problems[first : first + 64])}, return_tensors="pt")
        mode: dict[str, Any] = {"do_sample": False}
        if num_samples:
            mode = {
                "do_sample": True,
                "temperature": 1.0,
                "top_k": 0,
                "top_p": 1.0,
                "num_return_sequences": num_samples,
            }
        rows = model.generate(**inputs, max_new_tokens=12 * longest + 24, **mode)
        rows = rows[:, inputs["input_ids"].shape[1] :].tolist()
        texts = []
        for row in rows:
            finished = tokenizer.eos_token_id in row
            kept = row[: row.index(tokenizer.eos_token_id)] if finished else row
            texts.append((tokenizer.decode(kept), finished))
        count = num_samples or 1
        answers += [texts[i : i + count] for i in range(0, len(texts), count)]
    return answers


def grade(problem: Problem, answer: tuple[str, bool]) -> Verdict:
    """Judge one answer from :func:`sample` as the service's clients do."""
    text, finished = answer
    return FinalGrader().grade(text, str(problem.answer), "stop" if finished else "length")


def measure(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, num_problems: int, seed: int
) -> Measurement:
    """Grade the model's answers to held-out problems of ``steps`` steps."""
    model.eval()
    torch.manual_seed(seed)
    problems = held_out_set(steps, num_problems)

    def verdicts(num_samples: int) -> list[list[Verdict]]:
        answers = sample(model, tokenizer, problems, num_samples)
        return [[grade(problem, answer) for answer in row] for problem, row in zip(problems, answers, strict=True)]

    greedy, sampled = verdicts(0), verdicts(SAMPLES)
    flat = [verdict for row in sampled for verdict in row]
    return Measurement(
        steps=steps,
        problems=num_problems,
        pass_at_1=sum(verdict.correct for verdict in flat) / len(flat),
        greedy=sum(row[0].correct for row in greedy) / num_problems,
        pass_at_8=sum(any(verdict.correct for verdict in row) for row in sampled) / num_problems,
        format_valid=sum(verdict.format_valid for verdict in flat) / len(flat),
    )


CARD = """# Starter model

A Qwen3 of {parameters:,} parameters (float32, context {context}) that adds and subtracts, imperfectly. Made to show
online learning on a laptop's CPU in minutes, and for nothing else.

Made by `{command}` in {train_seconds:.0f} s on two
CPU threads, from random weights and generated text alone: solutions of 1-8 steps from the training side of the task
(`recipes/arithmetic/task.py`); no held-out problem was among them.

**The headroom is planted.** {careless_share:.0%} of the solutions come from a careless writer, who forgets the
borrow when subtracting {careless_from} or more across a ten (12-5=17). So the right habit and the wrong one are both
in the model, and reinforcement learning has something to choose between. What a run gains here says that the loop
works, not how much a model that nobody spoiled would gain.

Measured on held-out problems ({problems} per class; pass@1 at temperature 1 over {samples} samples each):

| steps | pass@1 | greedy | pass@8 | format valid |
|---|---|---|---|---|
{rows}

The same numbers are in `card.json`. Prompts and answers look like this:

    user       Start at 9. Subtract 4. Add 3.
    assistant  9-4=5, 5+3=8. <final>8</final>

Tokenizer: byte-level BPE, 300 entries, every digit a token of its own; ChatML-like template; `<|im_end|>` ends a turn.
"""


def write_card(out: Path, card: dict[str, Any]) -> None:
    """Write the model's card beside its weights: ``card.json``, and README.md for people."""
    rows = "\n".join(
        f"| {m['steps']} | {m['pass_at_1']:.3f} | {m['greedy']:.3f} | {m['pass_at_8']:.3f} | {m['format_valid']:.3f} |"
        for m in card["measured"]
    )
    (out / "card.json").write_text(json.dumps(card, indent=2) + "\n")
    problems = card["measured"][0]["problems"]
    (out / "README.md").write_text(CARD.format(rows=rows, problems=problems, samples=SAMPLES, **card))


def main(argv: Sequence[str] | None = None) -> None:
    """Pretrain, measure, and write the model folder."""
    parser = argparse.ArgumentParser(prog="python -m recipes.arithmetic.pretrain", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "starter", help="the model folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1500, help="optimizer steps of 64 solutions")
    parser.add_argument("--eval-problems", type=int, default=250, help="held-out problems per class")
    args = parser.parse_args(argv)

    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    tokenizer, model = build_tokenizer(), build_model(args.seed)
    started = time.monotonic()
    loss = train(model, tokenizer, args.seed, args.steps)
    seconds = time.monotonic() - started
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(args.out)
    model.save_pretrained(args.out)

    measured = [
        measure(model, tokenizer, steps, args.eval_problems, args.seed)
        for steps in tqdm((2, 4, 8), desc="measuring", unit="class")
    ]
    card = {
        "command": f"python -m recipes.arithmetic.pretrain --seed {args.seed} --steps {args.steps}",
        "parameters": model.num_parameters(),
        "context": model.config.max_position_embeddings,
        "careless_share": CARELESS_SHARE,
        "careless_from": CARELESS_FROM,
        "final_loss": round(loss, 4),
        "train_seconds": round(seconds, 1),
        "torch": torch.__version__,
        "measured": [asdict(m) for m in measured],
    }
    write_card(args.out, card)
    json.dump(card, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()

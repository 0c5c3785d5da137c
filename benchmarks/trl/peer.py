"""TRL's side, run by the Python of .venv-trl: `python -m benchmarks.trl.peer --model DIR --out DIR`.

GRPOTrainer as its documentation has it, in float32 on the CPU, with what costs time here turned off: gradient
checkpointing and bfloat16. Weights are copied in memory after steps and written to disk when the clock has stopped.
Writes OUT/run.json and the weights.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from reef_harness.graders import FinalGrader
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from recipes.arithmetic.task import train_stream

GROUPS, GROUP_SIZE = 8, 8
STEPS_OF_A_PROBLEM = 4


class Copies(TrainerCallback):
    """Seconds since training began, after each step, and the weights of every few."""

    def __init__(self, model: torch.nn.Module, every: int) -> None:
        self._model, self._every = model, every
        self._began = 0.0
        self.seconds: list[float] = []
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, _args: Any, state: Any, _control: Any, **_kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._began)
        if state.global_step % self._every == 0:
            self.weights[state.global_step] = {name: t.clone() for name, t in self._model.state_dict().items()}


def problems(seed: int, count: int) -> Dataset:
    """The first of the stream that Reef's side draws from."""
    stream = train_stream(STEPS_OF_A_PROBLEM, seed)
    drawn = [next(stream) for _ in range(count)]
    return Dataset.from_list([{"prompt": [{"role": "user", "content": p.text}], "gold": str(p.answer)} for p in drawn])


def config(out: Path, seed: int, steps: int, lr: float) -> GRPOConfig:
    """What serve.yaml and `service.py` say, in TRL's words."""
    return GRPOConfig(
        output_dir=str(out),
        seed=seed,
        max_steps=steps,
        per_device_train_batch_size=GROUPS * GROUP_SIZE,
        num_generations=GROUP_SIZE,
        shuffle_dataset=False,
        max_completion_length=64,
        learning_rate=lr,
        lr_scheduler_type="constant",
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="grpo",
        scale_rewards="group",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=2, help="steps between two copies of the weights")
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    grader = FinalGrader()

    def reward(completion_ids: list[list[int]], gold: list[str], **_kwargs: Any) -> list[float]:
        return [_score(ids, right) for ids, right in zip(completion_ids, gold, strict=True)]

    def _score(ids: list[int], right: str) -> float:
        finished = ids[-1] == tokenizer.eos_token_id
        text = tokenizer.decode(ids[:-1] if finished else ids)
        return float(grader.grade(text, right, "stop" if finished else "length").correct)

    trainer = GRPOTrainer(
        model=str(args.model),
        reward_funcs=reward,
        args=config(args.out, args.seed, args.steps, args.lr),
        train_dataset=problems(args.seed, GROUPS * args.steps),
        processing_class=tokenizer,
    )
    copies = Copies(trainer.model, args.every)
    trainer.add_callback(copies)
    trainer.train()
    snapshots = []
    for step, weights in copies.weights.items():
        path = args.out / f"step-{step}"
        trainer.model.load_state_dict(weights)
        trainer.model.save_pretrained(path)
        rollouts = step * GROUPS * GROUP_SIZE
        snapshots.append({"step": step, "seconds": copies.seconds[step - 1], "rollouts": rollouts, "path": str(path)})
    run = {"steps": args.steps, "seconds": copies.seconds[-1], "snapshots": snapshots}
    (args.out / "run.json").write_text(json.dumps(run) + "\n")


if __name__ == "__main__":
    main()

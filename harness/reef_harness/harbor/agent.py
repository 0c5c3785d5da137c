"""``-a reef_harness.harbor.agent:HarborAgent``: several scored answers a trial, one of them handed in.

It asks from this side, not from within the environment, so the environment needs no network and no client, and sees
neither key nor gold answer. What it writes there is the answer that most rollouts agree on.
"""

import asyncio
import json
import shlex
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment
from harbor.models.agent.context import AgentContext
from harbor.models.agent.rollout_detail import RolloutDetail

from reef_harness.client import Client
from reef_harness.errors import HarnessError
from reef_harness.graders import Grader
from reef_harness.graders.named import grader_of
from reef_harness.harbor.options import HarborAgentOptions
from reef_harness.harbor.rollouts import Rollout, Rollouts, pick, read_by, references
from reef_harness.harbor.task import BadTask, TaskSays, grader_of_task, read_task
from reef_harness.types import Item, Message
from reef_harness.wire import Asking


class NoAnswer(HarnessError):  # noqa: N818
    """Every rollout of a trial failed: there is nothing to hand in."""


class HarborAgent(BaseAgent):
    """One instruction, ``rollouts`` answers, each reported against its receipt as soon as it is graded.

    The gold answer is the task's (:mod:`reef_harness.harbor.task`) or that of ``gold_file``; without one, or without a
    grader, nothing is graded here and the verifier's reward is left to train. What a trial did is in its context:
    ``rollout_details`` has ids and log-probabilities of every rollout, the one handed in first; ``metadata["reef"]``
    the receipts, grades and releases. A trial of which every rollout fails raises NoAnswer.
    """

    options_model = HarborAgentOptions
    options: HarborAgentOptions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._runs = 0  # a task of several steps calls run() for each

    @staticmethod
    def name() -> str:
        """What Harbor calls it in results."""
        return "reef"

    def version(self) -> str | None:
        """That of this package."""
        return version("reef-harness")

    async def setup(self, environment: BaseEnvironment) -> None:
        """Nothing: no part of it is in the environment."""

    async def run(self, instruction: str, environment: BaseEnvironment, context: AgentContext) -> None:
        """Ask, grade, report, hand in. However it ends, the context holds what was done."""
        task = await asyncio.to_thread(self._task, environment)
        grader = self._grader(task)
        if grader is None or task.gold is None:
            lacks = "gold answer" if grader else "grader"
            self.logger.info("reef: %s has no %s: nothing is graded before the verifier", task.name, lacks)
        item = Item(task.name, self._messages(instruction), task.gold)
        self._runs += 1
        async with Client(
            self.options.url,
            scenario=self.options.scenario,
            token=self._get_env("REEF_API_KEY"),
            key_file=self.options.key_file,
            timeout_s=self.options.timeout_s,
        ) as client:
            rollouts = self._rollouts(client, item, grader)
            try:
                await rollouts.run(self.options.rollouts, self.options.concurrency)
            finally:
                self._keep(context, rollouts.done, grader)
        picked = pick(_in_order(rollouts.done), grader)
        self._tell(rollouts.done)
        if picked is None:
            raise NoAnswer(f"all {len(rollouts.done)} rollouts failed, the last: {rollouts.done[-1].error}")
        await self._hand_in(environment, picked, grader)

    # ---- before

    def _task(self, environment: BaseEnvironment) -> TaskSays:
        says = read_task(environment.environment_dir.parent)
        if self.options.gold_file is None:
            return says
        return TaskSays(says.name, _gold_of(self.options.gold_file, says.name), says.grader)

    def _grader(self, task: TaskSays) -> Grader | None:
        """The one that was asked for, whatever it is, else the task's own, which may be few things only."""
        if self.options.grader:
            return grader_of(self.options.grader)
        return grader_of_task(task.grader) if task.grader else None

    def _messages(self, instruction: str) -> tuple[Message, ...]:
        asked: Message = {"role": "user", "content": instruction.strip()}
        return ({"role": "system", "content": self.options.system}, asked) if self.options.system else (asked,)

    @property
    def _trial(self) -> str:
        return (self.session_id or "trial").removesuffix("__agent")

    def _rollouts(self, client: Client, item: Item, grader: Grader | None) -> Rollouts:
        asking: Asking = {
            "temperature": self.options.temperature,
            "max_tokens": self.options.max_tokens,
            "token_ids": True,
            "logprobs": True,
            "purpose": self.options.purpose,
            "tags": {"agent": self.name(), "agent-version": self.version() or "", "trial": self._trial},
            "extra": self.options.extra,
        }
        return Rollouts(
            client,
            item,
            grader,
            asking=asking,
            group=f"harbor-{self.context_id}-{self._runs}" if self.options.group else None,
            metadata={"task": item.id, "trial": self._trial},
            retries=self.options.retries,
        )

    # ---- after

    def _keep(self, context: AgentContext, done: list[Rollout], grader: Grader | None) -> None:
        """Fill the context with what has ended, also where a timeout ends the rest."""
        rollouts = _in_order(done)
        picked = pick(rollouts, grader)
        first = [picked] if picked else []
        context.rollout_details = [
            detail for each in [*first, *(r for r in rollouts if r is not picked)] if (detail := _detail(each))
        ]
        answers = [each.answer for each in rollouts if each.answer]
        context.n_input_tokens = sum(answer.prompt_tokens for answer in answers)
        context.n_output_tokens = sum(answer.completion_tokens for answer in answers)
        context.metadata = {
            "reef": {
                "url": self.options.url,
                "scenario": self.options.scenario,
                "references": references(rollouts, picked),
                "receipts": [each.receipt for each in rollouts if each.receipt],
                "handed_in": picked.receipt if picked else None,
                "rollouts": [each.line() for each in rollouts],
            }
        }
        lines = "".join(json.dumps({**each.line(), "text": each.text}) + "\n" for each in rollouts)
        (self.logs_dir / "rollouts.jsonl").write_text(lines, encoding="utf-8")

    def _tell(self, done: list[Rollout]) -> None:
        for each in _in_order(done):
            if each.error:
                self.logger.warning("reef: %s: rollout %d: %s", self._trial, each.index, each.error)
        scores = [each.score for each in done if each.scored and each.score is not None]
        mean = f", mean {sum(scores) / len(scores):.2f}" if scores else ""
        told = f"{len(done)} rollouts, {len(scores)} scored and reported{mean}"
        self.logger.info("reef: %s: %s", self._trial, told)

    async def _hand_in(self, environment: BaseEnvironment, picked: Rollout, grader: Grader | None) -> None:
        text = picked.text or ""
        if self.options.answer == "read":
            text = read_by(grader, text) or text
        path = self.options.answer_path
        folder = shlex.quote(str(Path(path).parent))
        made = await environment.exec(f"mkdir -p {folder}", timeout_sec=30)
        if made.return_code != 0:
            raise HarnessError(f"cannot make {folder} in the environment: {made.stderr or made.stdout}")
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", errors="replace", suffix=".txt") as file:
            file.write(text if text.endswith("\n") else f"{text}\n")
            file.flush()
            Path(file.name).chmod(0o644)  # it keeps its mode, and the verifier may be another user
            await environment.upload_file(file.name, path)


def _in_order(done: list[Rollout]) -> list[Rollout]:
    return sorted(done, key=lambda each: each.index)


def _detail(rollout: Rollout) -> RolloutDetail | None:
    """One conversation of one turn, in Harbor's form; None where the service gave no ids."""
    answer = rollout.answer
    if answer is None or answer.prompt_token_ids is None:
        return None
    [choice] = answer.choices
    if choice.token_ids is None or choice.logprobs is None:
        return None
    return {
        "prompt_token_ids": [list(answer.prompt_token_ids)],
        "completion_token_ids": [list(choice.token_ids)],
        "logprobs": [list(choice.logprobs)],
        "extra": {"reef_agent_record_id": [rollout.receipt], "reef_release_id": [rollout.release]},
    }


def _gold_of(path: Path, name: str) -> str | None:
    """A task's gold answer by the table; None where the table does not name it. Raises BadTask."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadTask(f"cannot read {path}: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(gold, str) for gold in table.values()):
        raise BadTask(f'{path} must hold one JSON object, {{"task name": "gold answer"}}')
    return table.get(name)

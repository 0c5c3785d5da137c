"""``math-verify``: the last ``\\boxed{}``, compared by the package of that name (extra ``math-verify``)."""

import os
from importlib.metadata import version
from pathlib import Path

from reef_harness.graders.apart import ScriptFailed, TookTooLong, need
from reef_harness.graders.base import BadGold, Grader, Verdict
from reef_harness.graders.boxed import last_box
from reef_harness.graders.notation import clean
from reef_harness.graders.pool import Pool
from reef_harness.graders.served import Servers
from reef_harness.types import Item

_SCRIPT = Path(__file__).with_name("math_verify_script.py")
_MAX_LENGTH = 5_000  # characters of one expression


class MathVerifyGrader(Grader):
    """Wants an expression in ``\\boxed{}`` that math-verify, with sympy, finds equal to gold.

    It reads far more than ``boxed`` does (logarithms, sets, matrices, equations), by rules of its own; its version is
    part of ours. Sympy is loaded in a process beside this one, and each answer is a fork of it, limited in time and
    memory: what takes too long or too much may be right, and is ``review``.
    """

    id = "math-verify"

    def __init__(self, *, timeout_s: float = 10.0, memory_mib: int = 1024, parallel: int | None = None) -> None:
        need("math_verify", "math-verify")
        self.timeout_s, self.memory_mib = timeout_s, memory_mib
        self.version = f"2-{version('math-verify')}"
        copies = parallel or os.cpu_count() or 1
        self._servers = Servers(_SCRIPT, copies)
        self._pool = Pool(copies, "reef-math-verify")

    async def grade_later(self, item: Item, gold: str, text: str, finish_reason: str) -> Verdict:
        """As :meth:`grade`, without holding up the loop."""
        return await self._pool.run(self.grade, text, gold, finish_reason)

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises BadGold for a gold that math-verify cannot read."""
        if not gold.strip():
            raise BadGold("the gold answer is empty")
        if finish_reason != "stop":
            return self.malformed("unfinished")
        box = last_box(text)
        if box is None:
            return self.malformed("no_box")
        detail = f"read {box[:200]!r}"
        if len(box) > _MAX_LENGTH:
            return self.review("too_long", f"{len(box)} characters")
        if not (given := clean(box)):
            return self.malformed("empty")
        if given == (right := clean(gold)):
            return self.decided(True, "same_text", detail)
        try:
            question = {"gold": right, "answer": given}
            answer = self._servers.ask(question, timeout_s=self.timeout_s, memory_mib=self.memory_mib)
        except TookTooLong as error:
            return self.review("timed_out", f"{detail}: {error}")
        except ScriptFailed as error:
            return self.error("script_failed", f"{detail}: {error}")
        return self._verdict(gold, answer["result"], f"{detail} as {answer.get('detail', '')}")

    def _verdict(self, gold: str, result: str, detail: str) -> Verdict:
        match result:
            case "bad_gold":
                raise BadGold(f"math-verify cannot read the gold answer {gold!r}")
            case "unreadable":
                return self.malformed("unreadable", detail)
            case "too_large":
                return self.review("too_large", detail)
        return self.decided(result == "equal", result, detail)

    def read(self, text: str) -> str | None:
        """What is in the box, as text: telling whether two are the same takes a process for each pair."""
        return clean(last_box(text) or "") or None

"""``json-schema``: one JSON value that a schema accepts (extra ``json-schema``)."""

import os
import re
from pathlib import Path

from reef_harness.graders.apart import ScriptFailed, TookTooLong, ask, need
from reef_harness.graders.base import BadGold, Grader, Verdict
from reef_harness.graders.pool import Pool
from reef_harness.types import Item

_SCRIPT = Path(__file__).with_name("json_schema_script.py")
_MAX_LENGTH = 1_000_000  # characters
_OPENING = re.compile(r"```(?:json|JSON)?[ \t]*\r?\n")


class JsonSchemaGrader(Grader):
    """Wants an answer that is one JSON value and nothing else, or one fenced block of it, valid by the schema in gold.

    Refused are doubled keys, NaN and Infinity, numbers out of range, nesting beyond 100, and text beside the value.
    The draft is the one that ``$schema`` names, 2020-12 without it; ``multipleOf`` is exact; a pattern's ``$`` is the
    very end, and its digits are ASCII, as in ECMA-262; ``format`` is not checked; references to other documents are
    never fetched. Validation runs in a process of its own (about 0.2 s) with limits.
    """

    id = "json-schema"
    version = "3"

    def __init__(self, *, timeout_s: float = 10.0, memory_mib: int = 1024, parallel: int | None = None) -> None:
        need("jsonschema", "json-schema")
        self.timeout_s, self.memory_mib = timeout_s, memory_mib
        self._pool = Pool(parallel or os.cpu_count() or 1, "reef-json-schema")

    async def grade_later(self, item: Item, gold: str, text: str, finish_reason: str) -> Verdict:
        """As :meth:`grade`, without holding up the loop."""
        return await self._pool.run(self.grade, text, gold, finish_reason)

    def grade(self, text: str, gold: str, finish_reason: str) -> Verdict:
        """Judge one answer. Raises BadGold for a gold that is no schema, or refers to one that is not there."""
        if finish_reason != "stop":
            return self.malformed("unfinished")
        answer = _value(text)
        if answer is None:
            return self.malformed("several_blocks")
        if len(answer) > _MAX_LENGTH:
            return self.review("too_long", f"{len(answer)} characters, at most {_MAX_LENGTH}")
        try:
            question = {"schema": gold, "answer": answer}
            found = ask(_SCRIPT, question, timeout_s=self.timeout_s, memory_mib=self.memory_mib)
        except TookTooLong as error:
            return self.review("timed_out", str(error))
        except ScriptFailed as error:
            return self.error("script_failed", str(error))
        return self._verdict(found["result"], found.get("detail", ""))

    def _verdict(self, result: str, detail: str) -> Verdict:
        if result == "bad_gold":
            raise BadGold(f"the gold answer must be a JSON Schema: {detail}")
        if result in ("valid", "invalid"):
            return self.decided(result == "valid", result, detail)
        return self.malformed(result, detail)


def _value(text: str) -> str | None:
    """The text, or what is in the fenced block that it is; None where there are several."""
    body = text.strip(" \t\r\n")
    opening = _OPENING.match(body)
    if not opening or not body.endswith("```"):
        return body
    inside = body[opening.end() : -3]
    return None if re.search(r"^```", inside, re.MULTILINE) else inside

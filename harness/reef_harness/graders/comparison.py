"""What comparing two answers, or two parts of them, gives."""

from dataclasses import dataclass
from typing import Literal

Result = Literal["equal", "different", "review"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result and its reason code; ``detail`` is for people."""

    result: Result
    reason_code: str
    detail: str = ""


SAME_TEXT = Comparison("equal", "same_text")
SAME_VALUE = Comparison("equal", "same_value")
DIFFERENT = Comparison("different", "different")

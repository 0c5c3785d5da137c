"""Where in a text the answer stands. Every way of looking is linear in the length of the text."""

from dataclasses import dataclass
from typing import Literal

Fault = Literal["no_final", "several_finals", "text_after_final"]


@dataclass(frozen=True, slots=True)
class Field:
    """What was found: the field's content, or the reason code of what is wrong with it."""

    content: str | None
    fault: Fault | None = None


def only_final(text: str) -> Field:
    """The content of the one ``<final>`` field that ends the text; white space may follow it, nothing else.

    Two fields, one within a quotation or a block of code included, are none: which of them counts is not for a grader
    to choose.
    """
    opened, closed = text.count("<final>"), text.count("</final>")
    if opened == 0 or closed == 0:
        return Field(None, "no_final")
    if opened > 1 or closed > 1:
        return Field(None, "several_finals")
    body = text.rstrip(" \t\r\n")
    if not body.endswith("</final>"):
        return Field(None, "text_after_final")
    return Field(body[body.index("<final>") :].removeprefix("<final>").removesuffix("</final>"))

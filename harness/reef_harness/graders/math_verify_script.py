"""The one door to math_verify: a script that compares two LaTeX expressions. Started by :mod:`.math_verify`.

It loads sympy once and forks for every line on its standard input; the fork has limits and is gone after them. (The
package's own timeouts need signals.) Only its LaTeX reader is used; the one for plain expressions goes through sympy's
``parse_expr``, which evaluates text as Python.
"""

import json
import logging
import os
import resource
import select
import signal
import sys
import time
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify  # type: ignore[import-untyped]

_MAX_ANSWER = 65_536  # bytes


def main() -> None:
    logging.disable(logging.CRITICAL)
    compare("\\frac{1}{2}", "0.5")  # its grammar is built on first use
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(asked(json.loads(line))), flush=True)


def asked(request: dict[str, Any]) -> dict[str, object]:
    """Answer in a fork: {"answer": ...}, or {"ended": "time"} or the status that it ended with."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer_and_exit(request, writer)
    os.close(writer)
    text = read(reader, time.monotonic() + request["timeout_s"])
    os.close(reader)
    os.kill(child, signal.SIGKILL)  # it is ours until it is waited for, whether it has ended or not
    _, status = os.waitpid(child, 0)
    if text is None or (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU):
        return {"ended": "time"}
    return {"answer": json.loads(text)} if text else {"ended": status}


def read(reader: int, deadline: float) -> bytes | None:
    """What comes until the end; None where that is not in time."""
    text = b""
    while len(text) < _MAX_ANSWER:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        piece = os.read(reader, _MAX_ANSWER)
        if not piece:
            break
        text += piece
    return text


def answer_and_exit(request: dict[str, Any], writer: int) -> None:
    status = 1
    try:
        cpu_s, memory_bytes = int(request["timeout_s"]) + 1, request["memory_bytes"]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            answer = compare(request["question"]["gold"], request["question"]["answer"])
        except (MemoryError, RecursionError, OverflowError) as error:
            answer = {"result": "too_large", "detail": type(error).__name__}
        os.write(writer, json.dumps(answer).encode())
        status = 0
    finally:
        os._exit(status)  # whatever happened: never back into the loop of the parent


def compare(gold: str, answer: str) -> dict[str, str]:
    """The result: equal or different; bad_gold or unreadable where one of the two is no expression."""
    right, given = expressions(gold), expressions(answer)
    if not right:
        return {"result": "bad_gold"}
    if not given:
        return {"result": "unreadable"}
    same = verify(right, given, strict=True, timeout_seconds=None, raise_on_error=False)
    return {"result": "equal" if same else "different", "detail": f"{given[0]!s:.200}"}


def expressions(text: str) -> list[object]:
    found: list[object] = parse(
        f"${text}$",
        extraction_config=[LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
        raise_on_error=False,
    )
    return found


if __name__ == "__main__":
    main()

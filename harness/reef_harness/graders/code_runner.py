"""Runs inside the sandbox, alone: takes its limits, becomes nobody, then runs ``solution.py`` beside it.

Never imported; started as ``runner.py LIMITS program|function NAME``. No expected result is ever in here: whatever the
solution does to this process, it can only answer, not decide.
"""

import json
import os
import resource
import runpy
import sys
import types
from typing import Any


def main() -> None:
    limits, mode, name = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
    solution = os.path.join(os.path.dirname(os.path.abspath(__file__)), "solution.py")  # noqa: PTH118, PTH100, PTH120
    confine(limits)
    sys.argv = [solution]
    if mode == "program":
        runpy.run_path(solution, run_name="__main__")
    else:
        answer(solution, name)


def confine(limits: dict[str, Any]) -> None:
    """Lower every limit for good, and give up being root where that is what we are."""
    mib = 1 << 20
    in_namespaces = limits["isolation"] == "namespaces"
    user = limits["user"]
    if user is not None:
        if in_namespaces:
            os.chmod("/tmp", 0o777)  # noqa: PTH101
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # Counted per user: where the user is one of our own making, or a namespace's, that is this run alone. Otherwise
    # it is everything that user runs, so the code gets no further process at all.
    processes = limits["processes"] if in_namespaces or user is not None else 1
    cpu_s = max(1, int(limits["cpu_s"] + 0.999))
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, limits["open_files"]),
        (resource.RLIMIT_FSIZE, limits["files_mib"] * mib),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_AS, limits["memory_mib"] * mib),
    ):
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))  # SIGXCPU, which says why; then SIGKILL


def answer(solution: str, name: str) -> None:
    """Call the function with the arguments on stdin; its result, as JSON, is all that goes to the first stdout."""
    arguments = json.load(sys.stdin)
    results = os.dup(1)
    os.dup2(2, 1)
    module = types.ModuleType("solution")
    module.__file__ = solution
    sys.modules["solution"] = module  # where pickle and dataclasses look for a class's names
    with open(solution, "rb") as file:  # noqa: PTH123
        exec(compile(file.read(), solution, "exec"), vars(module))
    text = json.dumps(vars(module)[name](*arguments), allow_nan=False).encode()
    while text:
        text = text[os.write(results, text) :]


if __name__ == "__main__":
    main()

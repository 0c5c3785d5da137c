"""Ids of rows: in the order of time, so that an index grows at its end; no two alike, whichever service made them.

With ids at random each row of a group lies in other pages of every index, all of which a commit writes: at 200,000
receipts a row took four times the processor time.
"""

import os
import time

RANDOM_BYTES = 10  # of an id, drawn for each; the time is in milliseconds
_BLOCK = 256  # ids for which the kernel is asked at once: each call lets other threads of the interpreter in

_drawn: list[str] = []
os.register_at_fork(after_in_child=_drawn.clear)  # else parent and child would give out the same


def new_id(prefix: str) -> str:
    """`prefix`, 12 hex digits of milliseconds since the epoch, 20 at random. Any thread may ask."""
    try:
        random = _drawn.pop()
    except IndexError:
        block = os.urandom(_BLOCK * RANDOM_BYTES).hex()
        size = 2 * RANDOM_BYTES
        _drawn.extend(block[start : start + size] for start in range(size, len(block), size))
        random = block[:size]
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{random}"

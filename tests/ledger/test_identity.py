"""Ids that grow with time and are all different."""

import os
import re
import time

from reef.ledger.identity import new_id


def test_an_id_is_its_prefix_and_32_hex_digits() -> None:
    assert re.fullmatch("rcp_[0-9a-f]{32}", new_id("rcp_"))


def test_ids_are_all_different() -> None:
    assert len({new_id("x_") for _ in range(20_000)}) == 20_000


def test_an_id_sorts_after_those_of_earlier_milliseconds() -> None:
    made = []
    for _ in range(5):
        made.append(new_id("req_"))
        time.sleep(0.002)
    assert made == sorted(made)


def test_a_forked_child_gives_out_others() -> None:
    new_id("x_")  # some are drawn
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(writing, new_id("")[12:].encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reading, 100).decode() != new_id("")[12:]

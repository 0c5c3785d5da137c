"""Clients that close their connection: no fault of ours, and said so."""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

import pytest


def answers(service, status: int) -> float:
    """How many answers of chats had a status, by /metrics."""
    pattern = rf'^reef_http_requests_total{{route="/v1/chat/completions",status="{status}"}} (\S+)$'
    found = re.search(pattern, service.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def log_of(service) -> str:
    return (service.run_dir / "logs" / "reef.log").read_text()


@pytest.mark.parametrize("sent", ["", '{"messages": [{"role": "us'])
def test_a_client_that_goes_before_its_body_is_whole_is_no_fault(recorder, eventually, sent) -> None:
    eventually(lambda: recorder.status()["in_flight"] == 0)  # what a test before has left
    gone, faults, log = answers(recorder, 499), answers(recorder, 500), log_of(recorder)
    parts = urlsplit(recorder.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-length: 1000\r\n\r\n{sent}"
        connection.sendall(head.encode())
        eventually(lambda: recorder.status()["in_flight"] == 1)
    eventually(lambda: answers(recorder, 499) == gone + 1)
    assert answers(recorder, 500) == faults
    assert log_of(recorder) == log
    assert recorder.status()["in_flight"] == 0

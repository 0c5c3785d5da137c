"""No field of any body makes the service fetch a URL that a client gives."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

pytestmark = pytest.mark.slow

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FUNCTION = {"type": "object", "properties": {"url": {"$ref": "{url}"}}}


@pytest.fixture(scope="module")
def trap() -> Iterator[socket.socket]:
    """It listens; whoever fetches the URL, now or later, has connected to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener
        listener.settimeout(0.5)
        with pytest.raises(TimeoutError):
            listener.accept()


def assert_nobody_came(trap: socket.socket) -> None:
    assert select.select([trap], [], [], 0.02) == ([], [], [])


def filled(value, url):
    """`value` with the URL in place of {url}."""
    if isinstance(value, dict):
        return {key: filled(item, url) for key, item in value.items()}
    if isinstance(value, list):
        return [filled(item, url) for item in value]
    return value.replace("{url}", url) if isinstance(value, str) else value


def user(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


def typed(*parts):
    return {"input": [{"role": "user", "content": list(parts)}]}


REFUSED = [
    (CHAT, user({"type": "image_url", "image_url": {"url": "{url}"}})),
    (CHAT, user({"type": "input_audio", "input_audio": {"data": "{url}", "format": "wav"}})),
    (CHAT, user({"type": "file", "file": {"file_id": "{url}"}})),
    (CHAT, user({"type": "video_url", "video_url": {"url": "{url}"}})),
    (CHAT, {**user({"type": "text", "text": "a"}), "callback": "{url}"}),
    (CHAT, {**user({"type": "text", "text": "a"}), "tools": [{"type": "mcp", "server_url": "{url}"}]}),
    (CHAT, {**user({"type": "text", "text": "a"}), "web_search_options": {"url": "{url}"}}),
    (MESSAGES, {"max_tokens": 4, **user({"type": "image", "source": {"type": "url", "url": "{url}"}})}),
    (MESSAGES, {"max_tokens": 4, **user({"type": "document", "source": {"type": "url", "url": "{url}"}})}),
    (MESSAGES, {"max_tokens": 4, **user(), "mcp_servers": [{"type": "url", "url": "{url}", "name": "a"}]}),
    (RESPONSES, typed({"type": "input_image", "image_url": "{url}"})),
    (RESPONSES, typed({"type": "input_file", "file_url": "{url}"})),
    (RESPONSES, {"input": "a", "tools": [{"type": "mcp", "server_label": "a", "server_url": "{url}"}]}),
    ("/v1/completions", {"prompt": "a", "lora_path": "{url}"}),
    ("/reef/report", {"references": [], "webhook": "{url}"}),
    ("/reef/scenarios", {"name": "a", "model": "{url}"}),
]


@pytest.mark.parametrize(("route", "body"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_that_names_what_is_to_be_fetched_is_refused(recorder, trap, route, body) -> None:
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
    model = {"model": "m"} if route.startswith("/v1/") else {}
    response = recorder.post(route, model | filled(body, url))
    assert response.status_code == 400, response.text
    assert_nobody_came(trap)


@pytest.mark.slow
def test_a_url_in_text_and_schemas_is_only_text(tool_recorder, trap, scenario) -> None:
    url = f"http://127.0.0.1:{trap.getsockname()[1]}/x"
    tool = {"type": "function", "function": {"name": "fetch", "description": url, "parameters": filled(FUNCTION, url)}}
    body = {**user({"type": "text", "text": f"fetch {url}"}), "tools": [tool], "user": url, "max_tokens": 4}
    receipt = tool_recorder.post(CHAT, body, headers={"x-reef-scenario": scenario}).headers["x-reef-agent-record-id"]
    report = {"references": [receipt], "feedback": url, "metadata": {"url": url}, "reason_code": url}
    assert tool_recorder.post("/reef/report", report).status_code == 200
    assert_nobody_came(trap)

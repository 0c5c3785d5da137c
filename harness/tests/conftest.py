"""A stand-in for the service, on a real loopback socket: the routes the harness uses, and faults on demand."""

import json
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

import pytest

Json = dict[str, Any]


class FakeService:
    """Answers chats with ``answer(prompt, index)`` and trains a release from every ``batch_size`` scored reports.

    ``faults`` are taken one per request: a status to answer with (``retry_after`` goes along), "drop" to break the
    connection unanswered, or "lose" to do the work and then break the connection. Groups train when they are whole (8);
    with ``drop_tied`` those of equal scores are dropped. Where it does not train (``trains``) reports end recorded.
    Streams are sent a word at a time; ``stream_fault`` ends them early: "cut" in the middle, "error" with an error
    event, "no_receipt" without the receipt, "no_done" before ``[DONE]``.
    """

    def __init__(self) -> None:
        self.answer: Callable[[str, int], str] = lambda prompt, index: "1+1=2. <final>2</final>"
        self.finish_reason = "stop"
        self.batch_size = 8
        self.faults: deque[int | str] = deque()
        self.retry_after: str | None = None
        self.requests: list[tuple[str, str, dict[str, str], Json | None]] = []  # method, path, headers, body
        self.receipts: dict[str, Json] = {}
        self.reports: dict[str, tuple[Json, Json]] = {}  # id -> body, state
        self.pending: list[str] = []
        self.drop_tied = False
        self.release_names = ["r0"]
        self.evaluations: list[tuple[str, Json]] = []
        self.trains = True
        self.stream_fault: str | None = None
        self.tool_calls: list[Json] = []
        self.thinks: str | None = None
        self.loans: dict[str, str] = {}  # of engines: the release of each
        self.mode = "auto"
        self.paused: str | None = None  # why training is
        self.held: Json | None = None  # by the gate, the head is: what the status says of it beside its id
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # head and body are written apart: the second would wait 40 ms

            def do_GET(self) -> None:
                service.handle(self)

            def do_POST(self) -> None:
                service.handle(self)

            def do_DELETE(self) -> None:
                service.handle(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            request_queue_size = 128  # connections that may wait; the default of 5 makes bursts wait a second

            def handle_error(self, request: Any, client_address: Any) -> None:
                if not isinstance(sys.exc_info()[1], ConnectionError):  # a client that gave up is part of the tests
                    super().handle_error(request, client_address)

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @property
    def engines(self) -> list[str]:
        """The releases that are lent."""
        return list(self.loans.values())

    def paths(self, prefix: str) -> list[Json | None]:
        """The bodies of the requests whose path starts with ``prefix``, in order."""
        return [body for _, path, _, body in self.requests if path.startswith(prefix)]

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        length = int(http.headers.get("content-length", 0))
        raw = http.rfile.read(length)
        if len(raw) < length:  # whoever asked was killed meanwhile
            http.close_connection = True
            return
        body = json.loads(raw) if raw else None
        headers: dict[str, str] = {}
        with self.lock:
            self.requests.append((http.command, http.path, {k.lower(): v for k, v in http.headers.items()}, body))
            fault = self.faults.popleft() if self.faults else None
            if fault == "drop":
                http.close_connection = True
                return
            if isinstance(fault, int):
                status, answer = fault, error(f"told to answer {fault}")
                if self.retry_after is not None:
                    headers["retry-after"] = self.retry_after
            else:
                path, _, query = http.path.partition("?")
                parts = path.strip("/").split("/")
                status, answer = self.route(http.command, parts, body, headers, dict(parse_qsl(query)))
            if fault == "lose":
                http.close_connection = True
                return
        if body is not None and body.get("stream") and status == 200:
            self.send_stream(http, answer, headers)
            return
        payload = json.dumps(answer).encode()
        http.send_response(status)
        for name, value in {**headers, "content-length": str(len(payload)), "content-type": "application/json"}.items():
            http.send_header(name, value)
        http.end_headers()
        http.wfile.write(payload)

    def send_stream(self, http: BaseHTTPRequestHandler, whole: Json, headers: dict[str, str]) -> None:
        http.send_response(200)
        http.send_header("content-type", "text/event-stream; charset=utf-8")
        http.end_headers()
        http.close_connection = True  # the end of the body
        for event in self.events(whole, headers["x-reef-release-id"]):
            data = event if isinstance(event, bytes) else json.dumps(event, ensure_ascii=False).encode()
            http.wfile.write(b"data: " + data + b"\n\n")

    def events(self, whole: Json, release: str) -> Iterator[Json | bytes]:
        """A whole answer as the service streams it."""
        for choice in whole["choices"]:
            yield from self.pieces(choice)
            if self.stream_fault == "cut":
                return
            yield chunk(choice["index"], {}, choice["finish_reason"])
        if self.stream_fault == "error":
            yield {"error": {"message": "the engine died", "type": "api_error", "param": None, "code": "engine_failed"}}
        elif self.stream_fault != "no_receipt":
            ids = [choice["reef_agent_record_id"] for choice in whole["choices"]]
            reef = {"agent_record_id": ids[0], "agent_record_ids": ids, "release_id": release}
            ids_of_prompt = {"prompt_token_ids": whole["prompt_token_ids"]} if "prompt_token_ids" in whole else {}
            yield {"choices": [], "reef": reef, **ids_of_prompt}
            yield {"choices": [], "usage": whole["usage"]}
        if self.stream_fault != "no_done":
            yield b"[DONE]"

    def pieces(self, choice: Json) -> Iterator[Json]:
        index, message = choice["index"], choice["message"]
        yield chunk(index, {"role": "assistant", "content": ""})
        if thought := message.get("reasoning_content"):
            yield chunk(index, {"reasoning_content": thought})
        for position, word in enumerate(message["content"].split(" ")):
            more: Json = {}
            if position < len(choice.get("token_ids", ())):
                more["token_ids"] = choice["token_ids"][position : position + 1]
            if choice.get("logprobs") and position < len(choice["logprobs"]["content"]):
                more["logprobs"] = {"content": choice["logprobs"]["content"][position : position + 1]}
            yield chunk(index, {"content": word if position == 0 else f" {word}"}, **more)
        for position, call in enumerate(message.get("tool_calls") or ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            begin = {"index": position, "id": call["id"], "function": {"name": name, "arguments": ""}}
            yield chunk(index, {"tool_calls": [begin]})
            for piece in (arguments[:4], arguments[4:]):
                yield chunk(index, {"tool_calls": [{"index": position, "function": {"arguments": piece}}]})

    def route(
        self, method: str, parts: list[str], body: Any, headers: dict[str, str], query: dict[str, str]
    ) -> tuple[int, Json]:
        match method, parts:
            case "POST", ["v1", "chat", "completions"]:
                return 200, self.chat(body, body["messages"][-1]["content"], headers, "message")
            case "POST", ["v1", "completions"]:
                return 200, self.chat(body, str(body["prompt"]), headers, "text")
            case "POST", ["reef", "report"]:
                return self.report(body)
            case "GET", ["reef", "reports", id] if id in self.reports:
                return 200, self.reports[id][1]
            case "GET", ["reef", "receipts", id] if id in self.receipts:
                return 200, self.receipts[id]
            case "GET", ["reef", "scenarios"]:
                return 200, {"scenarios": [{"name": "sums"}]}
            case "POST", ["reef", "scenarios"]:
                return 201, {"name": body["name"]}
            case "GET", ["reef", "scenarios", name]:
                shown = {"name": name, "mode": self.mode, "head": self.release_names[-1]}
                return 200, {**shown, "pending": len(self.pending), "reserved": 0}
            case "GET", ["reef", "status"]:
                held = None if self.held is None else {"release_id": self.release_names[-1], **self.held}
                training = {"phase": "waiting", "paused": self.paused, "error": self.paused, "held": held}
                return 200, {"training": training}
            case "GET", ["reef", "scenarios", name, "contract"]:
                return 200, {"scenario": name, "config": {"batch-size": self.batch_size, "group-size": 8}}
            case "GET", ["reef", "scenarios", name, "releases"]:
                return 200, {"scenario": name, "releases": self.chain(query)}
            case "GET", ["reef", "scenarios", _, "releases", release] if release in self.release_names:
                return 200, next(entry for entry in self.chain({}) if entry["release_id"] == release)
            case "GET", ["reef", "scenarios", _, "releases", release, "lineage"] if release in self.release_names:
                made = [id for id, (_, state) in self.reports.items() if state.get("release_id") == release]
                return 200, {"release_id": release, "samples": [{"report_id": id} for id in made]}
            case "POST", ["reef", "scenarios", _, "releases", release, "engine"] if release in self.release_names:
                if release == self.release_names[-1]:
                    return 200, {"release_id": release, "role": "serving"}
                loan = (body or {}).get("loan", f"loan{len(self.loans)}")
                self.loans[loan] = release
                return 200, {"release_id": release, "role": "evaluation", "loan": loan}
            case "DELETE", ["reef", "scenarios", _, "releases", release, "engine"]:
                if "loan" not in query:
                    return 400, error("loan: expected the loan's id")
                return 200, {"release_id": release, "given_back": self.loans.pop(query["loan"], None) == release}
            case "POST", ["reef", "scenarios", _, "releases", release, "evaluations"]:
                self.evaluations.append((release, body))
                return 200, {"stored": True}
            case "GET", ["readyz"]:
                return 200, {"ready": True}
        return 404, error(f"no such thing: {'/'.join(parts)}")

    def chat(self, body: Json, prompt: str, headers: dict[str, str], kind: str) -> Json:
        choices = []
        for index in range(body.get("n", 1)):
            id = f"c{len(self.receipts)}"
            self.receipts[id] = {"agent_record_id": id}
            text = self.answer(prompt, index)
            message: Json = {"role": "assistant", "content": text}
            if self.thinks is not None:
                message["reasoning_content"] = self.thinks
            if self.tool_calls:
                message["tool_calls"] = self.tool_calls
            said: Json = {"message": message} if kind == "message" else {"text": text}
            if body.get("return_token_ids"):
                said["token_ids"] = [10 + index, 20 + index]
            if kind == "message" and body.get("logprobs"):
                said["logprobs"] = {"content": [{"token": "a", "logprob": -0.5}, {"token": "b", "logprob": -0.25}]}
            elif "logprobs" in body:
                said["logprobs"] = {"tokens": ["a", "b"], "token_logprobs": [-0.5, -0.25], "top_logprobs": [{}, {}]}
            choices.append({"index": index, "finish_reason": self.finish_reason, "reef_agent_record_id": id, **said})
        headers["x-reef-release-id"] = self.release_names[-1]
        headers["x-reef-agent-record-id"] = choices[0]["reef_agent_record_id"]
        whole: Json = {"choices": choices, "usage": {"prompt_tokens": 5, "completion_tokens": 7 * len(choices)}}
        return whole | ({"prompt_token_ids": [1, 2]} if body.get("return_token_ids") else {})

    def report(self, body: Json) -> tuple[int, Json]:
        id = body["agent_record_id"]
        if id in self.reports:
            stored, state = self.reports[id]
            return (200, state) if stored == body else (409, error(f"report {id} is stored with another body"))
        if unknown := [r for r in body["references"] if r not in self.receipts]:
            return 404, error(f"unknown receipt {unknown[0]}")
        state: Json = {"agent_record_id": id, "state": "pending", "reason": None, "scenario": "sums"}
        self.reports[id] = (body, state)
        if body.get("score") is None or not self.trains:
            state |= {"state": "recorded", "reason": "no_score" if body.get("score") is None else "not_training"}
            return 200, state
        self.pending.append(id)
        self.train()
        return 200, self.reports[id][1]

    def train(self) -> None:
        groups: dict[str | None, list[str]] = {}
        for id in self.pending:
            groups.setdefault(self.reports[id][0].get("group"), []).append(id)
        if self.mode == "manual" or self.paused is not None or self.held is not None:
            return
        whole = [ids for group, ids in groups.items() if group is None or len(ids) == 8]
        if self.drop_tied:
            tied = [ids for ids in whole if len({self.reports[id][0]["score"] for id in ids}) == 1]
            whole = [ids for ids in whole if ids not in tied]
            self.finish([id for ids in tied for id in ids], state="dropped", reason="tied")
        taken = [id for ids in whole for id in ids][: self.batch_size]
        if len(taken) == self.batch_size:
            self.release_names.append(f"r{len(self.release_names)}")
            self.finish(taken, state="trained", release_id=self.release_names[-1], step=len(self.release_names) - 1)

    def finish(self, ids: list[str], **state: Any) -> None:
        for id in ids:
            self.pending.remove(id)
            self.reports[id][1].update(state)

    def chain(self, query: dict[str, str]) -> list[Json]:
        last = len(self.release_names) - 1
        before, limit = int(query.get("before", last + 1)), int(query.get("limit", last + 1))
        found = [
            {
                "release_id": f"r{i}",
                "parent_release_id": f"r{i - 1}" if i else None,
                "content_id": f"sha256:{i}",
                "operation": "train" if i else "base",
                "step": i,
                "checkpoint": None,
                "restorable": True,
                "current": i == last,
                "created_at": 0.0,
                "metrics": {},
                "number": i,
                "policy_version": i,
                "state": "released" if self.held is None or i < last else "pending",
            }
            for i in range(last, -1, -1)
        ]
        return [entry for entry in found if entry["number"] < before][:limit]


def chunk(index: int, delta: Json, finish_reason: str | None = None, **more: Any) -> Json:
    return {
        "object": "chat.completion.chunk",
        "choices": [{"index": index, "delta": delta, "finish_reason": finish_reason, **more}],
    }


def error(message: str) -> Json:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}}


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT is a KeyboardInterrupt, also where the tests run in the background of a shell, which has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def service() -> Iterator[FakeService]:
    fake = FakeService()
    thread = threading.Thread(target=fake.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield fake
    fake.server.shutdown()
    fake.server.server_close()
    thread.join()

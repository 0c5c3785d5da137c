"""The commands, as far as they go without a running service: what they say, and with which status they end."""

import asyncio
import contextlib
import json
import logging
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from reef import cli, keys
from reef.config import load
from reef.errors import ConfigError
from reef.ledger import scenarios
from reef.ledger.ledger import Ledger
from tests.ports import free_port

ROOT = Path(__file__).parents[1]
STARTER = ROOT / "recipes" / "arithmetic" / "starter"
HOLD = """
import pathlib, sys
from reef.ledger.ledger import RunLock
lock = RunLock(pathlib.Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.readline()
"""


class Command:
    """`reef`, run in this process on a run directory of its own."""

    def __init__(self, directory: Path, captured: pytest.CaptureFixture[str]) -> None:
        self.run_dir = directory / "run"
        self._captured = captured
        self.file = directory / "serve.yaml"
        self.file.write_text(
            json.dumps(
                {
                    "reef": {"run-dir": str(self.run_dir), "port": 0},
                    "inference": {"model-path": str(STARTER)},
                    "training": {"backend": "none"},
                }
            )
        )

    def __call__(self, command: str, *words: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""
        status = cli.main([command, "-c", str(self.file), *words])
        output, errors = self._captured.readouterr()
        return status, output, errors


@pytest.fixture
def reef(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    handlers, level = logging.root.handlers[:], logging.root.level
    yield Command(tmp_path, capsys)
    for handler in logging.root.handlers:
        if handler not in handlers:
            handler.close()
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


@contextlib.contextmanager
def http_server(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """Something on a port that answers GET as told."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer(self)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def reply(status: int, body: bytes) -> Callable[[BaseHTTPRequestHandler], None]:
    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def test_a_dry_run_says_what_it_checked_and_starts_and_writes_nothing(reef: Command) -> None:
    status, output, errors = reef("serve", "--dry-run", "--training.backend", "megatron", "--recipe.scenario", "maths")
    assert (status, errors) == (0, "")
    assert f"model     {STARTER}: 1 safetensors file(s)" in output
    assert "grpo on 1 Megatron worker(s), 64 samples a step, scenario maths" in output
    assert f"storage   sqlite:///{reef.run_dir}/ledger.db" in output
    assert not reef.run_dir.exists()


@pytest.mark.slow
def test_a_dry_run_of_the_file_in_the_repository_passes_from_the_command_line(tmp_path: Path) -> None:
    settings = ["--reef.run-dir", str(tmp_path / "run"), "--reef.port", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "reef", "serve", "--dry-run", *settings],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "training  grpo on 1 Megatron worker(s)" in done.stdout


def test_the_printed_configuration_is_whole_and_hides_secrets(reef: Command) -> None:
    url = "postgresql://reef:hunter2@db/reef"
    status, output, _ = reef("serve", "--print-config", "--reef.token", "hunter2", "--storage.url", url)
    assert status == 0
    assert "hunter2" not in output
    assert "token: '**********'" in output
    assert "url: postgresql://reef:**********@db/reef" in output
    assert "group-size: 8" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reef.prot", "1"], "unknown key reef.prot; did you mean reef.port?"),
        (
            ["--inference.options.num-thread", "1"],
            "unknown key inference.options.num-thread; did you mean inference.options.num-threads?",
        ),
        (["--inference.options.help", "true"], "unknown key inference.options.help"),
        (["--inference.options.zzz", "1"], "unknown key inference.options.zzz; known: dtype, log-level"),
        (
            ["--inference.options.context_length", "1"],
            "inference.options.context-length is set by Reef; what decides it: inference.context-length",
        ),
        (["--inference.options.port", "1"], "inference.options.port is set by Reef; what decides it: nothing"),
        (["--inference.options.api-key", "hunter2"], "inference.options.api-key is set by Reef"),
        (["--reef.port", "eighty"], "reef.port: input should be a valid integer"),
        (["--reef.host", "0.0.0.0"], "is not loopback: set reef.token"),
        (
            ["--storage.url", "postgresql://reef:hunter2@db/reef"],
            "storage.url: expected sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE, got postgresql",
        ),
        (["--storage.url", "ledger.db"], "storage.url: expected sqlite:///PATH"),
        (
            ["--training.backend", "megatron", "--training.layout.tensor", "7"],
            "training.layout.tensor is 7, which does not divide",
        ),
        (
            ["--training.backend", "megatron", "--training.options.min-lr", "1"],
            "training.options.min-lr is 1.0, above lr (0.0001)",
        ),
    ],
)
@pytest.mark.parametrize("how", [["--dry-run"], []], ids=["dry run", "start"])
def test_a_wrong_setting_ends_with_status_2_and_one_line_before_anything_starts(
    reef: Command, words: list[str], message: str, how: list[str]
) -> None:
    status, output, errors = reef("serve", *how, *words)
    assert (status, output) == (2, "")
    assert errors.startswith("reef: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert "hunter2" not in errors
    assert not reef.run_dir.exists()


def test_a_missing_file_and_a_missing_model_are_named(reef: Command, tmp_path: Path) -> None:
    assert cli.main(["serve", "-c", str(tmp_path / "no.yaml")]) == 2
    assert reef("serve", "--dry-run", "--inference.model-path", str(tmp_path / "no model")) == (
        2,
        "",
        f"reef: no configuration file at {tmp_path / 'no.yaml'}\n"
        f"reef: inference.model-path: no directory {tmp_path / 'no model'}\n",
    )


def test_a_model_directory_without_weights_or_of_another_architecture_is_refused(reef: Command, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert "holds no .safetensors file" in reef("serve", "--dry-run", "--inference.model-path", str(model))[2]
    shutil.copytree(STARTER, model, dirs_exist_ok=True)
    (model / "config.json").write_text('{"model_type": "gpt2"}')
    words = ["--inference.model-path", str(model), "--training.backend", "megatron"]
    status, _, errors = reef("serve", "--dry-run", *words)
    assert status == 2
    assert "model_type is 'gpt2'; Reef trains llama, qwen2, qwen3" in errors


def test_a_dry_run_says_that_a_model_has_no_chat_template(reef: Command, tmp_path: Path) -> None:
    model = Path(shutil.copytree(STARTER, tmp_path / "model"))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    status, output, _ = reef("serve", "--dry-run", "--inference.model-path", str(model))
    assert status == 0
    assert "no chat template: /v1/completions works, /v1/chat/completions cannot" in output


def test_a_port_that_is_held_is_named_and_nothing_stays_behind(reef: Command) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        status, _, errors = reef("serve", "--reef.port", str(port))
    assert status == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use (reef.host, reef.port)" in errors
    assert not (reef.run_dir / "service.json").exists()
    assert (reef.run_dir / "owner.lock").read_text() == ""  # let go


def test_of_many_that_take_one_port_at_the_same_moment_one_has_it_and_the_others_name_it() -> None:
    from reef.service.run import _listen

    port = free_port()

    def take(barrier: threading.Barrier) -> socket.socket | str:
        barrier.wait()
        try:
            return _listen("127.0.0.1", port)
        except ConfigError as error:
            return error.message

    for _ in range(100):
        barrier = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(take, [barrier] * 4))
        listeners = [result for result in results if isinstance(result, socket.socket)]
        for listener in listeners:
            listener.close()
        assert len(listeners) == 1
        assert all(f"cannot listen on 127.0.0.1:{port}" in result for result in results if isinstance(result, str))


def test_a_host_that_is_not_here_is_named(reef: Command) -> None:
    status, _, errors = reef("serve", "--reef.host", "192.0.2.1", "--reef.token", "x")
    assert status == 2
    assert "cannot listen on 192.0.2.1:0" in errors


def test_a_run_directory_in_use_is_refused_with_the_pid_of_its_owner(reef: Command) -> None:
    reef.run_dir.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(reef.run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "held\n"
        status, _, errors = reef("serve")
        assert owner.poll() is None
        owner.kill()
    assert status == 1
    assert errors == f"reef: the run directory {reef.run_dir} is in use by process {owner.pid}\n"


def test_a_run_directory_that_cannot_be_written_is_named(reef: Command, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for run_dir, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "run", "Not a directory")):
        status, _, errors = reef("serve", "--reef.run-dir", str(run_dir))
        assert (status, errors) == (2, f"reef: reef.run-dir: cannot write {run_dir}: {reason}\n")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_key_that_others_may_have_read_ends_the_start(reef: Command) -> None:
    reef.run_dir.mkdir()
    key = keys.make_file(reef.run_dir / "api-key")
    (reef.run_dir / "api-key").chmod(0o640)
    status, output, errors = reef("serve")
    assert status == 2
    assert f"reef: {reef.run_dir}/api-key has mode 640, and others may have read the key: delete the file" in errors
    assert key not in output + errors


def test_a_ledger_of_a_newer_version_is_refused_and_left_as_it_is(reef: Command) -> None:
    reef.run_dir.mkdir()
    path = reef.run_dir / "ledger.db"
    ledger = Ledger.open(f"sqlite:///{path}")
    asyncio.run(ledger.write(scenarios.create, "kept", "grpo", 1.0))
    ledger.close()
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE meta SET value = '7' WHERE key = 'schema_version'")
    before = path.read_bytes()
    status, _, errors = reef("serve")
    assert status == 1
    assert errors == (
        "reef: the ledger has schema version 7, this Reef knows versions up to 4: "
        "use the Reef that wrote it, or a newer one\n"
    )
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", [["status"], ["releases"], ["releases", "arithmetic"], ["why", "rcp_x"]])
def test_asking_where_no_service_has_run_says_so(reef: Command, command: list[str]) -> None:
    status, output, errors = reef(*command)
    assert (status, output) == (1, "")
    assert errors == f"reef: no service has run in {reef.run_dir}: give --url, or --reef.run-dir\n"


@pytest.mark.parametrize("command", ["status", "releases"])
def test_asking_a_service_that_has_ended_says_where_it_was(reef: Command, command: str) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        reef.run_dir.mkdir()
        (reef.run_dir / "service.json").write_text(json.dumps({"url": url, "pid": 1}))
        status, output, errors = reef(command)
    assert (status, output) == (1, "")
    assert f"no service answers at {url}: " in errors
    assert "refused" in errors


def test_a_broken_service_file_is_named(reef: Command) -> None:
    reef.run_dir.mkdir()
    (reef.run_dir / "service.json").write_text('{"url": ')
    status, _, errors = reef("status")
    assert status == 1
    assert errors.startswith(f"reef: cannot read {reef.run_dir / 'service.json'}: ")


@pytest.mark.parametrize("url", ["127.0.0.1:1", "nonsense", "http://:x"])
def test_an_address_that_is_no_url_is_an_error_of_one_line(reef: Command, url: str) -> None:
    status, _, errors = reef("status", "--url", url)
    assert status == 1
    assert errors.startswith("reef: ")
    assert errors.count("\n") == 1
    assert url in errors


@pytest.mark.parametrize(
    "answer",
    [
        reply(200, b"<html>hello</html>"),
        reply(404, b"<html>not here</html>"),
        reply(500, b'{"detail": "as FastAPI says it"}'),
        reply(500, b"[]"),
        lambda handler: handler.wfile.write(b"SSH-2.0\r\n"),
        lambda handler: None,
    ],
    ids=["a page", "an error page", "another error shape", "a list", "another protocol", "nothing"],
)
def test_another_server_behind_the_address_is_told_apart(
    reef: Command, answer: Callable[[BaseHTTPRequestHandler], None]
) -> None:
    with http_server(answer) as url:
        status, output, errors = reef("status", "--url", url + "/")
    assert (status, output) == (1, "")
    assert f"reef: {url} does not answer as Reef does" in errors
    assert errors.count("\n") == 1


def test_an_error_of_the_service_is_shown_in_its_own_words_and_the_key_is_sent(
    reef: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str | None]] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append((handler.path, handler.headers.get("authorization")))
        reply(404, b'{"error": {"message": "no receipt and no report a b/?", "type": "not_found_error"}}')(handler)

    with http_server(answer) as url:
        assert reef("why", "--url", url, "--reef.token", "hunter2", "a b/?") == (
            1,
            "",
            "reef: no receipt, no report and no release a b/?\n",
        )
        monkeypatch.setenv("REEF_API_KEY", "from the environment")
        reef("releases", "--url", url, "maths")
    assert seen == [
        ("/reef/receipts/a%20b%2F%3F", "Bearer hunter2"),
        ("/reef/reports/a%20b%2F%3F", "Bearer hunter2"),
        ("/reef/status", "Bearer hunter2"),  # whose chain a release would be of
        ("/reef/scenarios/maths/releases?limit=20", "Bearer from the environment"),
    ]


def test_the_key_of_the_run_directory_is_sent_where_nothing_else_says_one_and_to_this_machine_alone(
    reef: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REEF_API_KEY", raising=False)
    seen: list[str | None] = []

    def answer(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers.get("authorization"))
        reply(404, b'{"error": {"message": "no scenario maths"}}')(handler)

    with http_server(answer) as url:
        reef("releases", "--url", url, "maths")
        reef.run_dir.mkdir()
        key = keys.make_file(reef.run_dir / "api-key")
        reef("releases", "--url", url, "maths")
        reef("releases", "--url", url, "--reef.token", "flag", "maths")
        monkeypatch.setenv("REEF_API_KEY", "environment")
        reef("releases", "--url", url, "maths")
    assert seen == [None, f"Bearer {key}", "Bearer flag", "Bearer environment"]
    monkeypatch.delenv("REEF_API_KEY")
    config = load(None, ["--reef.run-dir", str(reef.run_dir)], {})
    urls = ("http://localhost:1", "http://[::1]", "http://192.0.2.1")
    assert [cli._key(url, config) for url in urls] == [key, key, None]
    (reef.run_dir / "api-key").chmod(0o644)
    status, _, errors = reef("releases", "--url", "http://127.0.0.1:9", "maths")
    assert (status, "has mode 644" in errors) == (2, True)


@pytest.mark.parametrize("words", [[], ["swim"], ["serve", "--fast"], ["why"], ["releases", "--limit", "many"]])
def test_wrong_usage_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert "usage: reef" in capsys.readouterr().err


def test_the_doctor_shows_the_machine_and_checks_the_configuration(reef: Command) -> None:
    status, output, _ = reef("doctor")
    assert status == 0
    assert output.count("sqlalchemy 2") == 1
    assert "training  none: records only" in output

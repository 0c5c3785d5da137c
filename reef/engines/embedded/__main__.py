"""`python -m reef.engines.embedded --model-path DIR`: serves one model until SIGTERM.

Exit status: 0 after SIGTERM or SIGINT, 1 if the generation thread failed, 2 if the arguments or the model directory
are wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

import torch
import uvloop

from reef.engines.embedded import process
from reef.engines.embedded.architecture import Architecture, read_architecture
from reef.engines.embedded.engine import Engine, Limits
from reef.engines.embedded.errors import ModelError
from reef.engines.embedded.model import Model
from reef.engines.embedded.receive import Receiver
from reef.engines.embedded.server import Server
from reef.engines.embedded.text import Tokenizer
from reef.engines.embedded.updates import Updates
from reef.engines.embedded.weights import load_weights

log = logging.getLogger("reef.engines.embedded")

DEFAULT_MAX_TOTAL_TOKENS = 65536
DEFAULT_CACHE_BYTES = 2 * 2**30
"""Without `--max-total-tokens` the cache stays below both."""

SMALL_MODEL_BYTES = 8 * 2**20
"""Below this a second thread costs more in synchronisation than it saves in arithmetic."""

SWITCH_INTERVAL_S = 0.0005
"""Python's 5 ms would let a burst of HTTP work stall the generation thread for that long at each operation."""


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m reef.engines.embedded", description=__doc__)
    add = parser.add_argument
    add("--model-path", required=True, type=Path, help="Hugging Face directory: config.json, safetensors, tokenizer")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=30000, help="0: chosen by the kernel")
    add("--port-file", type=Path, help="file to write the bound port to, once the server answers")
    add("--api-key", help="bearer token asked of every client; needed for a --host that others can reach")
    add("--api-key-file", type=Path, help="file that holds the --api-key, for others can read a command line")
    add("--weight-version", default="default", help="name of the weights in --model-path")
    add("--served-model-name", help="default: --model-path")
    add("--dtype", choices=("float32", "bfloat16", "auto"), default="float32", help="auto: as config.json says")
    add("--context-length", type=int, help="default and maximum: the model's")
    add("--max-running-requests", type=int, default=64)
    add("--max-queued-requests", type=int, default=1024)
    add("--max-total-tokens", type=int, help="KV budget in tokens, padding included (default: 65536 or 2 GiB)")
    add("--num-threads", type=int, help="of one operation (default: 1 for small models, else the number of cores)")
    add("--random-seed", type=int, help="of the seeds given to requests without one (default: random)")
    add("--skip-tokenizer-init", action="store_true", help="ids only: no text in answers, no stop strings")
    add("--incremental-streaming-output", action="store_true", help="stream each token once, not all so far")
    add("--parent-pid", type=int, help="end when this process is no longer our parent")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser


def main() -> int:
    """Runs the server; returns the exit status."""
    parser = arguments()
    args = parser.parse_args()
    _read_key(parser, args)
    _check(parser, args)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    if args.parent_pid is not None:
        process.watch_parent(args.parent_pid)
    try:
        listener = process.bind(args.host, args.port)
    except OSError as error:
        return _refuse(f"cannot listen on {args.host}:{args.port}: {error}")
    with listener:
        try:
            engine, server = build(args)
        except ModelError as error:
            return _refuse(str(error))
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(args, listener, engine, server))


def build(args: argparse.Namespace) -> tuple[Engine, Server]:
    """Loads the model and puts an engine and its routes around it.

    Raises:
        ModelError: the directory cannot be served as asked.
    """
    path: Path = args.model_path
    arch = read_architecture(path)
    dtype = _dtype(args.dtype, path)
    weights = load_weights(path, arch, dtype)
    limits = _limits(args, arch, dtype)
    small = weights.num_bytes < SMALL_MODEL_BYTES
    torch.set_num_threads(args.num_threads or (1 if small else os.cpu_count() or 1))
    tokenizer = None if args.skip_tokenizer_init or not Tokenizer.exists(path) else Tokenizer(path)
    seed = args.random_seed if args.random_seed is not None else secrets.randbits(63)
    engine = Engine(Model(arch, weights), dtype, limits, args.weight_version, path, seed)
    info = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    info |= {
        "api_key": None,
        "dtype": str(dtype).removeprefix("torch."),
        "num_threads": torch.get_num_threads(),
        "context_length": limits.context_length,
        "max_total_num_tokens": limits.max_total_tokens,
        "version": f"torch {torch.__version__}",
    }
    name = args.served_model_name or str(path)
    incremental = args.incremental_streaming_output
    updates = Updates(engine, Receiver(arch, dtype))
    server = Server(engine, tokenizer, _eos_ids(path, tokenizer), name, info, incremental, updates)
    return engine, server


async def _serve(args: argparse.Namespace, listener: socket.socket, engine: Engine, server: Server) -> int:
    loop = asyncio.get_running_loop()
    http = process.HttpServer(server.app(args.api_key), args.log_level)
    asked_to_stop = process.stop_signals(loop)
    engine.start(loop, asked_to_stop.set)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    process.announce(listener, args.port_file)
    await asked_to_stop.wait()
    # First the engine: aborted requests answer at once, and the server has nothing left to wait for.
    stopped = await asyncio.to_thread(engine.stop, process.STOP_TIMEOUT_S)
    http.should_exit = True
    await serving
    if engine.failure is not None:
        return 1
    if not stopped:
        log.warning("the generation thread is in a long operation; leaving without it")
    return 0


def _read_key(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.api_key_file is not None:
        try:
            args.api_key = args.api_key_file.read_text().strip()
        except OSError as error:
            parser.error(f"--api-key-file {args.api_key_file}: {error.strerror}")


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for name in ("max_running_requests", "max_queued_requests", "max_total_tokens", "context_length", "num_threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    if args.api_key is None and not process.is_loopback(args.host):
        parser.error(f"--host {args.host} can be reached from other machines: give an --api-key, or use 127.0.0.1")


def _limits(args: argparse.Namespace, arch: Architecture, dtype: torch.dtype) -> Limits:
    context = args.context_length or arch.context_length
    if context > arch.context_length:
        raise ModelError(f"--context-length {context} is more than the model's {arch.context_length}")
    affordable = DEFAULT_CACHE_BYTES // arch.cache_bytes_per_token(dtype)
    return Limits(
        context_length=context,
        max_running_requests=args.max_running_requests,
        max_queued_requests=args.max_queued_requests,
        max_total_tokens=args.max_total_tokens or min(DEFAULT_MAX_TOTAL_TOKENS, affordable),
    )


def _dtype(name: str, path: Path) -> torch.dtype:
    if name == "auto":
        config = _json_file(path / "config.json")
        name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    if name not in dtypes:
        raise ModelError(f"{path}/config.json has dtype {name!r}; supported: {', '.join(dtypes)}")
    return dtypes[name]


def _eos_ids(path: Path, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every id that one of generation_config.json, config.json and the tokenizer calls the end."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (path / name).exists():
            value: Any = _json_file(path / name).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
    if tokenizer is not None and tokenizer.eos_id is not None:
        found.add(tokenizer.eos_id)
    return frozenset(found)


def _json_file(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return content


def _refuse(message: str) -> int:
    print(f"reef.engines.embedded: error: {message}", file=sys.stderr, flush=True)
    return 2


def leave(status: int) -> NoReturn:
    """Ends the process without tearing the interpreter down: with torch that takes seconds and nothing is owed."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main())

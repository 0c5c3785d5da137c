"""How SGLang's server is started: what Reef decides about it, and what it needs on a machine without a GPU.

Everything it opens listens on loopback, as far as that is in our hands: see docs/engines.md.
"""

import json
import os
import socket
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from reef.config import Config
from reef.engines.client import EngineClient
from reef.engines.launch import HERE, Site, flags
from reef.errors import EngineError

STUBS = Path(__file__).parent / "stubs"
CPU_CACHE_BYTES = 256 * 2**20  # of keys and values, where there is no GPU whose memory would say how much
HOST = "127.0.0.1"


class SglangLaunch:
    """SGLang's own server, as it is published, on a port that is kept free for it while it starts."""

    title = "SGLang"

    def __init__(
        self, config: Config, name: str, model_path: str, version: str, directory: Path, site: Site = HERE
    ) -> None:
        self._version = version
        self._holder = hold_port(site.host)
        port = self._holder.getsockname()[1]
        self._client = EngineClient(f"http://{site.host}:{port}", request_timeout_s=5, key=site.key)
        self.environment = environment(config, name, directory, port)
        self.command = [sys.executable, "-m", "sglang.launch_server"]
        if site.key is not None:
            self.command += ["--config", site.write_key(directory, "api-key: {key}\n")]
        self.command += arguments(config, name, model_path, version, port, site)

    async def url(self) -> str | None:
        """Only once it has answered a request of its own: a server that fails that ends."""
        if not await self._client.healthy():
            return None
        found = (await self._client.model_info()).get("weight_version")
        if found != self._version:
            raise EngineError(f"somebody else's engine answers at {self._client.url}: it holds {found}")
        return self._client.url

    def port_was_taken(self, output: str) -> bool:
        return "address already in use" in output.lower()

    async def close(self) -> None:
        self._holder.close()
        await self._client.close()


def hold_port(host: str = HOST) -> socket.socket:
    """A socket that has a free port of an address, so that the kernel gives it to nobody else while it is open.

    It does not listen: a server that binds the same port with SO_REUSEADDR (all do) gets it.
    """
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def runs_on_cpu(options: Mapping[str, Any]) -> bool:
    """Whether a server is to run without a GPU: it is told so, sees none, or lacks SGLang's kernels for one."""
    device = options.get("device")
    if device is not None:
        return str(device) == "cpu"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    return hidden or not any(Path("/dev").glob("nvidia[0-9]*")) or not is_installed("sglang-kernel")


def is_installed(package: str) -> bool:
    """Whether a package is installed here, without importing it."""
    try:
        distribution(package)
    except PackageNotFoundError:
        return False
    return True


def arguments(config: Config, name: str, model_path: str, version: str, port: int, site: Site = HERE) -> list[str]:
    """The server's arguments: what Reef decides, what it prefers, and the options, which win over the latter."""
    inference = config.inference
    decided: dict[str, Any] = {
        "model-path": model_path,
        "weight-version": version,
        "host": site.host,
        "port": port,
        "tp-size": inference.tensor,
    }
    length = inference.context_length or _read(model_path).get("max_position_embeddings")
    if length is not None:  # SGLang does not tell what it takes from the model itself
        decided["context-length"] = length
    options = {option.replace("_", "-"): value for option, value in inference.options.items()}
    if inference.devices is None and not site.own_gpus and not runs_on_cpu(options):
        decided["base-gpu-id"] = place(config, name) * inference.tensor
    return flags({**decided, **preferred(config, model_path, options), **options})


def preferred(config: Config, model_path: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that hold unless the options say otherwise."""
    chosen: dict[str, Any] = {"log-level-http": "warning"}  # else a line for each request
    chosen["incremental-streaming-output"] = True  # else each event of a stream repeats all before it
    on_cpu = runs_on_cpu(options)
    if on_cpu or config.training.backend != "none":
        chosen["dtype"] = config.training.dtype  # it must agree with the trainer
    if on_cpu:
        chosen |= {"device": "cpu", "attention-backend": "torch_native"}
        chosen["sleep-on-idle"] = True  # else its scheduler takes a whole core when there is nothing to do
        tokens = cpu_cache_tokens(_read(model_path))
        if tokens is not None and "mem-fraction-static" not in options:
            chosen["max-total-tokens"] = max(tokens, config.inference.context_length or 0)
    return chosen


def environment(config: Config, name: str, directory: Path, port: int) -> dict[str, str]:
    """What the server's environment has besides this process's."""
    inference = config.inference
    made = {
        "TMPDIR": str(directory),  # its sockets and files, which it leaves behind
        # Ranks meet in a file: the port that they would use else listens on every interface.
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{directory}/ranks",
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health need not generate a token, which takes a second
        "HF_HUB_OFFLINE": "1",  # the model is a directory
        "no_proxy": "*",  # it asks itself whether it is up, which no proxy of the user's can answer
        "NO_PROXY": "*",
    }
    if runs_on_cpu(inference.options):
        paths = [str(STUBS), *filter(None, [os.environ.get("PYTHONPATH")])]
        made |= {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
        made |= {"MASTER_ADDR": HOST, "MASTER_PORT": str(port)}  # names of shared memory are made of these
        made["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile asks Triton for its version, and that is a stub
        # Threads beyond the cores fight each other: that made it 30 times slower on two busy ones.
        made["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        made["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        if inference.tensor > 1:  # it gives each rank a NUMA node of its own else, and refuses more ranks than nodes
            cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            made["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join([cores] * inference.tensor)
    elif inference.devices is not None:
        made["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices(config, name)))
    return made


def place(config: Config, name: str) -> int:
    """Which share of the GPUs a replica has: `engine-1` the second, then the candidate, then what is lent."""
    suffix = name.rpartition("-")[2]
    after = {"candidate": 0, "evaluation": int(bool(config.evaluation.gate))}
    return int(suffix) if suffix.isdigit() else config.inference.replicas + after[suffix]


def devices(config: Config, name: str) -> list[int]:
    """The GPUs of a replica, out of `inference.devices`. Raises EngineError where none are left for it."""
    inference = config.inference
    named, begin = inference.devices or [], place(config, name) * inference.tensor
    if len(named) < begin + inference.tensor:
        raise EngineError(
            f"{name} needs {inference.tensor} GPUs of its own: inference.devices names {len(named)}, and "
            f"{begin} of them are the other replicas'"
        )
    return named[begin : begin + inference.tensor]


def cpu_cache_tokens(model: Mapping[str, Any]) -> int | None:
    """How many tokens CPU_CACHE_BYTES hold, at least the model's longest text; None for a model we cannot tell of."""
    layers, heads = model.get("num_hidden_layers"), model.get("num_attention_heads")
    if not layers or not heads or not model.get("hidden_size"):
        return None
    kv_heads = model.get("num_key_value_heads") or heads
    size = model.get("head_dim") or model["hidden_size"] // heads
    tokens: int = CPU_CACHE_BYTES // (2 * layers * kv_heads * size * 4)
    return max(tokens, model.get("max_position_embeddings") or 0)


def _read(model_path: str) -> dict[str, Any]:
    model: dict[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    return model.get("text_config") or model

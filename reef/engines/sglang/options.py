"""Whether `inference.options` are arguments that SGLang's server has and that are left to the user.

Its own parser is asked, in a process of its own: importing SGLang takes seconds, and needs stubs where there is no GPU.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from reef.config import Config
from reef.engines.sglang.launch import environment, is_installed
from reef.errors import ConfigError

TIMEOUT_S = 120
# Arguments that Reef decides, by the name of SGLang's field, and what decides each.
_ONE_MACHINE = "nothing: an engine runs on one machine, which inference.tensor splits the model over the GPUs of"
_LOOPBACK = "nothing: engines listen on loopback, and only Reef talks to them"
MANAGED = {
    "model_path": "inference.model-path",
    "tokenizer_path": "inference.model-path",
    "skip_tokenizer_init": "nothing: it is what finds the stop strings of requests",
    "weight_version": "nothing: it is the release's id",
    "context_length": "inference.context-length",
    "host": "nothing: engines listen on loopback",
    "port": "nothing: the kernel chooses it",
    "tp_size": "inference.tensor",
    "dp_size": "inference.replicas",
    "pp_size": _ONE_MACHINE,
    "nnodes": _ONE_MACHINE,
    "node_rank": _ONE_MACHINE,
    "dist_init_addr": _ONE_MACHINE,
    "nccl_port": _ONE_MACHINE,
    "use_ray": _ONE_MACHINE,
    "base_gpu_id": "inference.devices",
    "gpu_id_step": "inference.devices",
    "api_key": _LOOPBACK,
    "admin_api_key": _LOOPBACK,
    "ssl_keyfile": _LOOPBACK,
    "ssl_certfile": _LOOPBACK,
    "grpc_mode": _LOOPBACK,
    "smg_grpc_mode": _LOOPBACK,
    "encoder_only": "nothing: Reef asks for text",
    "is_embedding": "nothing: Reef asks for text",
    "incremental_streaming_output": "nothing: Reef reads whole answers",
    "enable_deterministic_inference": "nothing: requests without a seed would all get the same one, and answer alike",
    "delete_ckpt_after_loading": "nothing: the files of a release are Reef's",
    "config": "inference.options itself",
}


def check(config: Config) -> None:
    """Raises ConfigError where SGLang is not installed, or has not such an option, or refuses its value."""
    inference = config.inference
    if not is_installed("sglang"):
        raise ConfigError(
            "inference.backend: SGLang is not installed: `make sglang-cpu` here, or pip install '.[sglang]' on a GPU "
            "machine"
        )
    needed = (inference.replicas + bool(config.evaluation.gate)) * inference.tensor
    if inference.devices is not None and len(inference.devices) < needed:
        raise ConfigError(
            f"inference.devices names {len(inference.devices)} GPUs, and {needed} are needed: with evaluation.gate a "
            "held release is answered by an engine of its own"
        )
    question = json.dumps({"options": inference.options, "managed": MANAGED}, default=str)
    with tempfile.TemporaryDirectory(prefix="reef-") as directory:
        made = environment(config, "engine-0", Path(directory), port=0)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "reef.engines.sglang.parser"],
                env={**os.environ, **made},
                input=question,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(f"SGLang did not say in {TIMEOUT_S} s which options it has") from None
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ConfigError(f"SGLang is installed, but cannot be imported here:\n{last}")
    if problem := json.loads(done.stdout.splitlines()[-1]):
        raise ConfigError(problem)

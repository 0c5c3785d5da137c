"""How much of a cluster Reef needs, and whether a cluster has it.

A bundle is what Ray places on one node as a whole. Tensor ranks speak to each other in every layer, so those of one
group are one bundle; so are the ranks of an engine.
"""

from collections.abc import Mapping, Sequence

from reef.cluster.address import Address
from reef.config import Config
from reef.errors import ConfigError

Bundle = Mapping[str, float]  # CPU and GPU


def has_gpus(nodes: Sequence[Bundle]) -> bool:
    """Whether any node has a GPU: then each worker takes one."""
    return any(node.get("GPU", 0) > 0 for node in nodes)


def worker_bundles(config: Config, gpus: bool) -> list[Bundle]:
    """A bundle for each group of tensor ranks, in the order of ranks: Megatron numbers those of a group in a row."""
    layout = config.training.layout
    return [_of(layout.tensor, layout.tensor, gpus)] * (layout.world_size // layout.tensor)


def engine_bundle(config: Config, gpus: bool) -> Bundle:
    """What one engine takes: a GPU for each tensor rank and a CPU; without GPUs a CPU for each rank."""
    inference = config.inference
    gpus = gpus and inference.backend == "sglang"  # the embedded engine runs on CPUs only
    return _of(1 if gpus else inference.tensor, inference.tensor, gpus)


def check_room(
    config: Config, nodes: Sequence[Bundle], gpus: bool, address: Address | None, with_engines: bool
) -> None:
    """Whether the workers fit on the nodes, and perhaps the engines with them, as long as nobody else uses them.

    Args:
        nodes: what each has in all.
        gpus: whether Ray gives workers and engines their GPUs.
        address: of the cluster joined; None: one of our own.

    Raises:
        ConfigError: it does not; the message says what is needed and what is there.
    """
    workers = worker_bundles(config, gpus) if config.training.backend != "none" else []
    engines = [engine_bundle(config, gpus)] * config.inference.replicas if with_engines else []
    if _fit([*workers, *engines], nodes):
        return
    if address is None:
        where, what_to_do = "this machine", "Use a smaller training.layout, or train on CPUs with training.devices: []"
    else:
        where = f"the Ray cluster at {address} ({address.source})"
        what_to_do = "Add nodes, or ask for less (training.layout, inference.replicas, inference.tensor)"
    raise ConfigError(
        f"{where} is too small: needed are {needed(workers, engines)}; there are {there(nodes)}. {what_to_do}"
    )


def needed(workers: Sequence[Bundle], engines: Sequence[Bundle]) -> str:
    """In words, e.g. `2 x (2 CPU, 2 GPU) for training workers and 1 x (1 CPU, 1 GPU) for engines, each on one node`."""
    groups = (("training workers", workers), ("engines", engines))
    return (
        " and ".join(f"{len(some)} x ({_say(some[0])}) for {who}" for who, some in groups if some)
        + ", each on one node"
    )


def there(nodes: Sequence[Bundle]) -> str:
    """In words, e.g. `2 nodes: (8 CPU, 1 GPU), (8 CPU)`."""
    return f"{len(nodes)} node{'s' * (len(nodes) != 1)}: " + ", ".join(f"({_say(node)})" for node in nodes)


def _of(cpus: int, num_gpus: int, gpus: bool) -> Bundle:
    return {"CPU": float(cpus)} | ({"GPU": float(num_gpus)} if gpus else {})


def _say(bundle: Bundle) -> str:
    return ", ".join(f"{bundle.get(name, 0):g} {name}" for name in ("CPU", "GPU") if name == "CPU" or name in bundle)


def _fit(bundles: Sequence[Bundle], nodes: Sequence[Bundle]) -> bool:
    """First fit, the largest first. Exact for bundles of one size; else it may miss a tight fit that exists."""
    free = [dict(node) for node in nodes]
    for bundle in sorted(bundles, key=lambda each: (each.get("GPU", 0), each["CPU"]), reverse=True):
        node = next((node for node in free if all(node.get(name, 0) >= num for name, num in bundle.items())), None)
        if node is None:
            return False
        for name, num in bundle.items():
            node[name] -= num
    return True

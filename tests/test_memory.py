"""Who takes how much of which device, worked by hand; measured beside real workers in tests/training/test_memory.py."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reef.cluster.address import Address
from reef.config import Config, Layout
from reef.engines.sglang.launch import preferred
from reef.memory import engine, parameters
from reef.memory.engine import engine_memory
from reef.memory.fit import Plan, plan
from reef.memory.hardware import Hardware, ranges, size_text
from reef.memory.trainer import checkpoint_bytes, trainer_memory
from reef.training.architecture import Architecture, Experts, read_architecture

GIB = 2**30
# Sizes that are easy to work with: one layer's attention has 10 * (8 + 2 * 4) + 8 * 10 + 2 * 10 = 260 parameters, its
# MLP 3 * 10 * 20 = 600, the embedding and the output layer 100 * 10 = 1000 each, the last norm 10.
SMALL = Architecture(
    model_type="llama",
    num_layers=4,
    hidden_size=10,
    ffn_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    context_length=64,
    norm_eps=1e-6,
    rope_theta=1e4,
    tied=False,
)
ALL = 4 * (260 + 600) + 2 * 1000 + 10


def mixture(num_experts: int = 8) -> Architecture:
    experts = Experts(num_experts, 2, ffn_size=5, weights_sum_to_1=True, layers=(True,) * 4)
    return replace(SMALL, model_type="qwen3_moe", experts=experts)


def config_of(**sections: Any) -> Config:
    training = {"micro-batch-tokens": 64, **sections.pop("training", {})}
    return Config.model_validate({"training": training, **sections})


def gpus(*gib: float, nodes: int = 1) -> Hardware:
    return Hardware(tuple(int(each * GIB) for each in gib), 64 * GIB, nodes, simulated=True)


def test_a_model_is_the_sum_of_its_parts() -> None:
    assert parameters.of_model(SMALL) == ALL
    assert parameters.on_rank(SMALL, Layout(), 0) == (ALL, 0)


def test_tensor_ranks_divide_all_but_the_norms() -> None:
    norms = 4 * 2 * 10 + 10
    shared, experts = parameters.on_rank(SMALL, Layout(tensor=2), 0)
    assert (shared, experts) == ((ALL - norms) // 2 + norms, 0)


def test_stages_divide_layers_and_a_tied_embedding_is_on_both_ends() -> None:
    assert parameters.on_rank(SMALL, Layout(pipeline=2), 0)[0] == 2 * 860 + 1000
    assert parameters.on_rank(SMALL, Layout(pipeline=2), 1)[0] == 2 * 860 + 10 + 1000
    tied = replace(SMALL, tied=True)
    assert parameters.of_model(tied) == ALL - 1000
    assert [parameters.on_rank(tied, Layout(pipeline=2), stage)[0] for stage in (0, 1)] == [2720, 2730]


@pytest.mark.parametrize(
    ("layout", "each"), [({"data": 2, "expert": 2}, 2), ({"tensor": 2, "sequence-parallel": True}, 2), ({}, 1)]
)
def test_experts_are_divided_over_expert_ranks_or_else_over_tensor_ranks(layout: dict[str, Any], each: int) -> None:
    _, experts = parameters.on_rank(mixture(), Layout.model_validate(layout), 0)
    assert experts == 4 * 8 * (3 * 10 * 5) // each


def test_bytes_per_parameter_are_megatrons() -> None:
    def per_parameter(dtype: str, **training: Any) -> float:
        need = trainer_memory(SMALL, config_of(training={"dtype": dtype, **training}), 0, on_gpu=True)
        return (need.weights + need.gradients + need.optimizer) / ALL

    sharded = {"layout": {"data": 4}, "options": {"use-distributed-optimizer": True}}
    assert per_parameter("float32") == 16
    assert per_parameter("bfloat16") == 18
    assert per_parameter("bfloat16", layout={"data": 4}) == 18
    assert per_parameter("bfloat16", **sharded) == pytest.approx(6 + 12 / 4, abs=0.01)


def test_logits_and_activations_follow_the_longest_sequence_where_it_is_over_the_budget() -> None:
    short = trainer_memory(SMALL, config_of(inference={"context-length": 16}), 0, on_gpu=True)
    long = trainer_memory(SMALL, config_of(inference={"context-length": 640}), 0, on_gpu=True)
    assert short.logits == 2 * 4 * 64 * 100
    assert long.logits == 10 * short.logits
    assert long.activations > 5 * short.activations


def test_a_layer_that_is_computed_again_keeps_its_input_alone() -> None:
    def activations(**options: Any) -> int:
        config = config_of(training={"micro-batch-tokens": 4096, "options": options}, inference={"context-length": 64})
        return trainer_memory(SMALL, config, 0, on_gpu=True).activations

    again = {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1}
    kept, alone = activations(), activations(**again)
    per_layer = 4096 * (2 * 12 * 10 + 4 * 3 * (8 + 4) + 5 * 4 * 20)
    assert kept - alone == 3 * per_layer - 4 * 4096 * 10 * 4
    block = activations(**again | {"recompute-method": "block", "recompute-num-layers": 2})
    assert kept - block == per_layer - 2 * 4096 * 10 * 4
    assert activations(**{"recompute-granularity": "selective"}) == kept


def test_the_first_stage_keeps_a_microbatch_for_each_stage() -> None:
    config = config_of(training={"layout": {"pipeline": 4}, "micro-batch-tokens": 65536})
    first, second, third, last = (trainer_memory(SMALL, config, stage, on_gpu=True) for stage in range(4))
    assert first.activations - second.activations > 0
    assert second.activations > third.activations
    assert [need.logits for need in (first, second, third)] == [0, 0, 0]
    assert last.logits == 2 * 4 * 65536 * 100


def test_an_engine_has_its_weights_and_the_cache_that_its_share_of_the_gpu_leaves() -> None:
    config = config_of(
        inference={"backend": "sglang", "options": {"mem_fraction_static": 0.5}}, training={"dtype": "bfloat16"}
    )
    need = engine_memory(SMALL, config, "bfloat16", 8 * GIB, on_gpu=True)
    per_token = 2 * 4 * 4 * 2  # keys and values, layers, columns, bytes
    assert need.weights == 2 * ALL
    assert need.cache_tokens == (4 * GIB - 2 * ALL) // per_token
    assert need.kv_cache == need.cache_tokens * per_token
    # SGLang's own rule: 512 MiB, 1.5 MiB for each of 2048 tokens, 128 for the rank, 2 for each of 8 requests.
    assert need.runtime == int((512 + 1.5 * 2048 + 128 + 2 * 8) * 2**20)


def test_more_tensor_ranks_than_key_heads_hold_a_copy_each() -> None:
    assert engine.cache_bytes_per_token(SMALL, 4, 2) == engine.cache_bytes_per_token(SMALL, 2, 2) == 2 * 4 * 2 * 2


def test_bounds_of_the_embedded_engine_are_its_own() -> None:
    from reef.engines.embedded import __main__ as embedded

    assert engine.EMBEDDED_CACHE_TOKENS == embedded.DEFAULT_MAX_TOTAL_TOKENS
    assert engine.EMBEDDED_CACHE_BYTES == embedded.DEFAULT_CACHE_BYTES


def test_the_cache_that_reef_asks_sglang_for_on_a_cpu_is_the_one_that_is_counted(starter: Path) -> None:
    architecture = read_architecture(starter)
    for context in (None, 10**6):
        config = config_of(inference={"backend": "sglang", "model-path": starter, "context-length": context})
        need = engine_memory(architecture, config, "float32", 0, on_gpu=False)
        assert need.cache_tokens == preferred(config, str(starter), {"device": "cpu"})["max-total-tokens"]
        assert need.weights == 4 * parameters.of_model(architecture)


def heads(found: Plan) -> list[str]:
    """Whom or what each line is about."""
    return [line.split(":")[0] for line in found.lines if not line.startswith(" ")]


def planned(config: Config, hardware: Hardware, architecture: Architecture = SMALL, **more: Any) -> Plan:
    return plan(config, architecture, "bfloat16", hardware, more.get("cluster"))


SGLANG = {"backend": "sglang", "options": {"mem-fraction-static": 0.5}}


def test_trainer_and_engine_on_the_only_gpu_are_added_up() -> None:
    found = planned(config_of(inference=SGLANG), gpus(24))
    assert found.problems == ()
    assert found.lines[-1].startswith("GPU 0: trainer rank 0 2.0 GiB + engine 0 ")
    (problem,) = planned(config_of(inference={"backend": "sglang"}), gpus(24)).problems
    assert "GPU 0: trainer rank 0 2.0 GiB + engine 0 24.0 GiB of 24.0 GiB, 2.0 GiB too much" in problem
    assert "lower inference.options.mem-fraction-static (not set: SGLang takes the whole GPU)" in problem
    assert "give engines and trainer different GPUs (inference.devices, training.devices)" in problem


def test_devices_say_who_is_where() -> None:
    inference = {**SGLANG, "tensor": 2, "devices": [3, 2]}
    found = planned(
        config_of(inference=inference, training={"devices": [1], "dtype": "bfloat16"}), gpus(24, 24, 24, 24)
    )
    assert heads(found) == ["trainer rank 0", "engine 0", "GPU 1", "GPU 2-3, each"]


@pytest.mark.parametrize(
    ("sections", "hardware", "message"),
    [
        ({"training": {"layout": {"data": 4}}}, gpus(24, 24), "training takes GPU 2-3, and there is GPU 0-1"),
        ({"inference": {**SGLANG, "replicas": 3}}, gpus(24, 24), "inference takes GPU 2, and there is GPU 0-1"),
        (
            {"inference": {**SGLANG, "devices": [7]}},
            gpus(24),
            "inference takes GPU 7, and there is GPU 0: change inference.d",
        ),
        (
            {"training": {"devices": [0], "layout": {"data": 2}}},
            gpus(24, 24),
            "training.devices names 1 GPUs, and its 2",
        ),
        ({}, gpus(24, nodes=2), "2 nodes need a Ray cluster that joins them: set training.ray-address"),
        ({"training": {"devices": [1, 3]}}, Hardware((), GIB), "training.devices names GPU 1, 3, and there is none"),
        (
            {"inference": SGLANG, "training": {"sync": {"transport": "distributed"}}},
            gpus(24),
            "trainer and engines share GPU 0, where NCCL cannot send weights",
        ),
        ({"training": {"micro-batch-tokens": 10**8}}, gpus(24), "lower training.micro-batch-tokens (100000000)"),
        ({"training": {"micro-batch-tokens": 10**8}}, gpus(24), "recompute-granularity: full"),
        ({"inference": {"context-length": 10**8}}, gpus(24), "lower inference.context-length: a sequence of 100000000"),
        (
            {"training": {"layout": {"data": 2}, "micro-batch-tokens": 10**8}},
            gpus(24, 24),
            "use-distributed-optimizer: true",
        ),
        (
            {"inference": {"options": {"max-total-tokens": 63}}},
            gpus(24),
            "holds 63 tokens, and one request may take 64",
        ),
    ],
)
def test_what_does_not_fit_says_what_to_change(sections: dict[str, Any], hardware: Hardware, message: str) -> None:
    problems = planned(config_of(**sections), hardware).problems
    assert any(message in problem for problem in problems), problems


def test_without_a_gpu_everything_shares_the_memory_of_the_machine() -> None:
    found = planned(config_of(), Hardware((), 4 * GIB))
    assert found.problems == ()
    assert found.lines[-1].startswith("memory: trainer rank 0 ")
    for part in ("engine 0", "service", "Ray", "a checkpoint being written"):
        assert f" + {part} " in found.lines[-1]
    (problem,) = planned(config_of(), Hardware((), 1 * GIB)).problems
    assert "use a smaller model, or a machine with more memory" in problem


def test_each_rank_of_a_cluster_has_a_gpu_of_its_own() -> None:
    config = config_of(inference={**SGLANG, "replicas": 2}, training={"layout": {"data": 2}})
    cluster = Address("head", 6379, "training.ray-address")
    found = planned(config, gpus(24, 24, nodes=2), cluster=cluster)
    assert found.problems == ()
    assert heads(found)[-2:] == ["GPU 0-1, each", "GPU 2-3, each"]
    (problem,) = planned(config, gpus(24, 24), cluster=cluster).problems
    assert "the Ray cluster at head:6379 (training.ray-address) is too small" in problem
    assert "are not known before it is joined" in planned(config, Hardware((), GIB), cluster=cluster).lines[-1]


def test_a_candidate_is_one_more_engine() -> None:
    gated = {"inference": SGLANG, "evaluation": {"gate": {"accuracy": {"min": 0.5}}}}
    assert planned(config_of(**gated), gpus(24, 24)).problems == ()
    assert "inference takes GPU 1" in planned(config_of(**gated), gpus(24)).problems[0]


def lent(found: Plan) -> str:
    """What is said of one engine more."""
    (line,) = (line for line in found.lines if line.startswith("  lent for an evaluation: "))
    return line.removeprefix("  lent for an evaluation: ")


@pytest.mark.parametrize(
    ("gib", "left"),
    # The embedded engine: 384 MiB, 65536 tokens of 2 * 4 * 4 * 4 bytes, weights next to none; the service 440 MiB.
    [(2, f"{2048 - 392 - 440 - 392} MiB left"), (1, f"{2 * 392 + 440 - 1024} MiB too much")],
)
def test_an_engine_that_is_lent_is_one_more_in_the_memory_and_no_problem(gib: int, left: str) -> None:
    found = planned(config_of(training={"backend": "none"}), Hardware((), gib * GIB))
    assert lent(found) == f"one more, 392 MiB of memory, {left} then"
    assert found.problems == ()


@pytest.mark.parametrize(
    ("inference", "more", "hardware", "said"),
    # Half of 24 GiB, and SGLang's own rule: 512 MiB, 1.5 MiB for each of 4096 tokens, 2 for each of 48 requests, 128 a
    # rank: 12 + 6.7 GiB, 6.8 with two ranks. The trainer takes 2.0.
    [
        ({}, {}, gpus(24, 24), "one more, 18.7 GiB of GPU 1, 5.3 GiB left then"),
        ({"devices": [1, 0]}, {}, gpus(24, 24), "one more, 18.7 GiB of GPU 0, 3.3 GiB left then"),
        ({"tensor": 2}, {}, gpus(24, 24, 24, 24), "one more, 18.8 GiB of GPU 2-3, each, 5.2 GiB left then"),
        (
            {},
            {"evaluation": {"gate": {"accuracy": {"min": 0.5}}}},
            gpus(24, 24, 24),
            "one more, 18.7 GiB of GPU 2, 5.3 GiB left then",
        ),
        ({}, {}, gpus(24), "none can be, it takes GPU 1, and there is GPU 0"),
        ({"devices": [0]}, {}, gpus(24, 24), "none can be, inference.devices names no GPU for one more"),
        ({"options": {"device": "cpu"}}, {}, gpus(24), "one more, 1.6 GiB of memory"),
    ],
)
def test_an_engine_that_is_lent_has_the_gpus_after_all_others(
    inference: dict[str, Any], more: dict[str, Any], hardware: Hardware, said: str
) -> None:
    found = planned(config_of(inference=SGLANG | inference, **more), hardware)
    assert lent(found) == said
    assert found.problems == ()


def test_on_a_cluster_an_engine_that_is_lent_has_gpus_of_its_own_and_with_a_url_there_is_none() -> None:
    config = config_of(inference={**SGLANG, "replicas": 2}, training={"layout": {"data": 2}})
    cluster = Address("head", 6379, "training.ray-address")
    assert lent(planned(config, gpus(24, 24, nodes=3), cluster=cluster)) == (
        "one more, 18.7 GiB of 1 GPU of a node that has them free"
    )
    full = planned(config, gpus(24, 24, nodes=2), cluster=cluster)
    assert (lent(full), full.problems) == ("none can be, it takes GPU 4, and there is GPU 0-3", ())
    attached = planned(config_of(inference={"url": "http://127.0.0.1:1"}), Hardware((), 4 * GIB))
    assert not [line for line in attached.lines if "lent" in line]


def test_what_only_answers_has_no_trainer(starter: Path) -> None:
    found = planned(config_of(training={"backend": "none"}), Hardware((), 4 * GIB), read_architecture(starter))
    assert heads(found) == ["engine 0", "memory"]


def test_sizes_and_numbers_in_words() -> None:
    assert [size_text(size) for size in (2048, 3 * 2**20, 3 * 2**29)] == ["2 KiB", "3 MiB", "1.5 GiB"]
    assert (ranges([0]), ranges([3, 0, 1]), ranges([])) == ("0", "0-1, 3", "")


def test_a_critics_experts_are_divided_as_the_policys_are_and_its_checkpoint_counts() -> None:
    options = {"use-distributed-optimizer": True}
    layout = {"data": 4, "expert": 4}
    recipe = {"implementation": "sao"}
    training = {"dtype": "bfloat16", "layout": layout, "options": options}
    plain, with_critic = config_of(training=training), config_of(training=training, recipe=recipe)
    need = trainer_memory(mixture(), with_critic, 0, on_gpu=True)
    shared, experts = parameters.on_rank(mixture(), Layout(**layout), 0)
    shared += 11 - 100 * 10  # the head stands in the place of the output layer
    # Weights 2 and gradients 4; moments and main copy 12, over 4 data ranks, but an expert is on one rank alone.
    assert need.beside == (2 + 4) * (shared + experts) + 12 * (shared // 4 + experts)
    assert checkpoint_bytes(mixture(), with_critic) > 1.7 * checkpoint_bytes(mixture(), plain)

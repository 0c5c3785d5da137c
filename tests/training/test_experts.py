"""A mixture of experts: one rank against transformers, and two ranks in two processes over gloo against one."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from safetensors.torch import load_file as torch_file

from reef.config import Layout
from reef.training import convert, optimizer
from reef.training.actor import WorkerSpec
from reef.training.manifest import content_id_of, read_manifest
from reef.training.settings import settings
from reef.training.worker import MegatronWorker
from reef.types import Batch
from tests.training.test_worker import reference_logprobs, reference_loss

MakeModel = Callable[..., Path]
MakeWorker = Callable[..., MegatronWorker]
MakeBatch = Callable[..., Batch]

LAYOUTS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2, "sequence_parallel": True},
    "pipeline": {"pipeline": 2},
    "data": {"data": 2},
    "expert": {"data": 2, "expert": 2},
    "tensor-expert": {"tensor": 2, "sequence_parallel": True, "expert": 2},
    "distributed": {"data": 2, "expert": 2},  # with the distributed optimizer
}


def in_hugging_face_names(worker: MegatronWorker) -> dict[str, torch.Tensor]:
    """The gradients that Megatron has gathered."""
    policy = worker._policy
    gradients = {name: parameter.main_grad.clone() for name, parameter in policy.module.named_parameters()}
    places = convert.places(policy.architecture, gradients, policy.first_layer)
    return {
        name: convert.part(place, gradients[place.parameter], policy.architecture) for name, place in places.items()
    }


def expert_by_expert(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers keeps a layer's experts in two parameters and stores them one by one; so here."""
    found = {}
    for name, gradient in gradients.items():
        layer, _, fused = name.partition(".experts.")
        if fused == "gate_up_proj":
            for number, both in enumerate(gradient):
                (
                    found[f"{layer}.experts.{number}.gate_proj.weight"],
                    found[f"{layer}.experts.{number}.up_proj.weight"],
                ) = both.chunk(2)
        elif fused == "down_proj":
            found |= {f"{layer}.experts.{number}.down_proj.weight": each for number, each in enumerate(gradient)}
        else:
            found[name] = gradient
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_topk_prob": True},
        {"norm_topk_prob": False, "mlp_only_layers": [0]},
        {"decoder_sparse_step": 2, "num_experts_per_tok": 3},
    ],
)
def test_log_probabilities_and_gradients_are_those_of_transformers(
    make_model: MakeModel,
    make_worker: MakeWorker,
    make_batch: MakeBatch,
    settings: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = make_model("qwen3_moe", tied=False, **settings)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    worker = make_worker(path)
    try:
        batch = make_batch(worker.logprobs, noise=0.2, temperature=0.8)
        for sample, scored in zip(batch.samples, worker.logprobs([s.tokens for s in batch.samples], 0.8), strict=True):
            np.testing.assert_allclose(scored, reference_logprobs(path, sample.tokens, 0.8).detach(), atol=1e-4)
        loss = reference_loss(model, batch)
        loss.backward()
        with monkeypatch.context() as patched:  # the gradients as they are gathered, before the step clips them
            patched.setattr(optimizer, "update", lambda _: 0.0)
            passed = worker.step(batch).metrics
            found = in_hugging_face_names(worker)
        worker.reset()
        result = worker.step(batch)
    finally:
        worker.close()
    expected = expert_by_expert({name: parameter.grad for name, parameter in model.named_parameters()})
    assert passed["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-4 * gradient.norm(), name
    routers = [name for name in expected if name.endswith("mlp.gate.weight")]
    assert len(routers) == (1 if "norm_topk_prob" not in settings or not settings["norm_topk_prob"] else 2)
    assert all(expected[name].norm() > 0 for name in routers)
    norm = torch.cat([gradient.flatten() for gradient in expected.values()]).norm().item()
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-4)


def run_rank(rank: int, specs: list[WorkerSpec], batches: list[Batch], directory: Path, answers: Any) -> None:
    """Take the batches in each layout in turn; one pair of processes serves them all."""
    for spec in specs:
        worker = MegatronWorker(spec)
        name = spec.rendezvous.stem
        published = worker.publish(f"{name}-base", directory)
        scored = worker.logprobs([sample.tokens for sample in batches[0].samples], 0.7)
        metrics = [worker.step(batch).metrics for batch in batches]
        worker.publish(name, directory)
        worker.save(directory / f"checkpoint-{name}")
        saved = worker.digest()
        again = worker.step(batches[0]).metrics
        worker.restore(directory / f"checkpoint-{name}")
        assert worker.digest() == saved
        assert worker.step(batches[0]).metrics == again  # bit for bit
        answers.put((name, rank, published and published.content_id, scored, metrics, again))
        worker.close()


def test_a_step_in_bfloat16_is_finite_and_moves_router_and_experts(
    make_model: MakeModel, make_worker: MakeWorker, make_batch: MakeBatch, tmp_path: Path
) -> None:
    path = make_model("qwen3_moe", dtype="bfloat16")
    worker = make_worker(path, dtype="bfloat16")
    try:
        result = worker.step(make_batch(worker.logprobs, noise=0.2))
        worker.publish("r1", tmp_path)
    finally:
        worker.close()
    assert np.isfinite(result.metrics["grad_norm"])
    before, after = (torch_file(directory / "model.safetensors") for directory in (path, tmp_path / "r1"))
    for name in ("gate.weight", "experts.0.up_proj.weight"):
        key = f"model.layers.0.mlp.{name}"
        assert not torch.equal(before[key], after[key])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_equal_one_in_every_layout(
    make_model: MakeModel, make_worker: MakeWorker, make_batch: MakeBatch, config: Any, tmp_path: Path
) -> None:
    model, base = make_model("qwen3_moe", mlp_only_layers=[1], num_hidden_layers=4), settings(config)
    batches = [make_batch(seed=1, num_samples=7, budget_tokens=60), make_batch(seed=2, data_ranks=2)]
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()

    def start(rank: int, world_size: int, layouts: dict[str, dict[str, Any]]) -> Any:
        specs = []
        for name, layout in layouts.items():
            changes = {
                "layout": Layout.model_validate(layout).model_dump(),
                "optimizer": base["optimizer"] | {"use_distributed_optimizer": name == "distributed"},
            }
            specs.append(WorkerSpec(rank, world_size, model, tmp_path / f"{name}.store", base | changes, 4096))
        process = context.Process(target=run_rank, args=(rank, specs, batches, tmp_path, answers), daemon=True)
        process.start()
        return process

    processes = [start(0, 2, LAYOUTS), start(1, 2, LAYOUTS), start(0, 1, {"one": {}})]
    found: dict[str, dict[int, Any]] = {}
    for _ in range(2 * len(LAYOUTS) + 1):
        name, rank, *rest = answers.get(timeout=150)
        found.setdefault(name, {})[rank] = rest
    for process in processes:
        process.join(20)
        assert process.exitcode == 0

    _, expected_scores, expected_metrics, _ = found["one"][0]
    start_weights = load_file(model / "model.safetensors")
    expected_weights = load_file(tmp_path / "one" / "model.safetensors")
    for name in LAYOUTS:
        assert found[name][0][0] == content_id_of(model), name
        scores = next(answer[1] for answer in found[name].values() if answer[1] is not None)
        for a, b in zip(scores, expected_scores, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
        for _, _, metrics, _ in found[name].values():
            for step, reference in zip(metrics, expected_metrics, strict=True):
                assert step == pytest.approx(reference, rel=1e-5, abs=1e-6), name
        weights = load_file(tmp_path / name / "model.safetensors")
        change = np.concatenate([(expected_weights[n] - start_weights[n]).ravel() for n in start_weights])
        gap = np.concatenate([(expected_weights[n] - weights[n]).ravel() for n in start_weights])
        assert np.linalg.norm(gap) < 1e-3 * np.linalg.norm(change), name

    worker = make_worker(model)
    try:
        for name in LAYOUTS:  # and one rank goes on from what two have saved
            assert worker.restore(tmp_path / f"checkpoint-{name}") == len(batches)
            restored = worker.publish("restored", tmp_path, False)
            assert restored is not None
            assert restored.content_id == read_manifest(tmp_path / name).content_id, name
            again = found[name][0][3]
            assert worker.step(batches[0]).metrics == pytest.approx(again, rel=1e-5, abs=1e-6), name
    finally:
        worker.close()

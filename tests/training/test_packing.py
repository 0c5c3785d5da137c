from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from reef.training.packing import split
from reef.training.padding import Form, collate
from reef.training.worker import MegatronWorker
from reef.types import Batch, Sample

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]
MakeWorker = Callable[..., MegatronWorker]


@pytest.fixture(scope="module")
def worker(make_model: MakeModel, make_worker: MakeWorker) -> Iterator[MegatronWorker]:
    made = make_worker(make_model())
    yield made
    made.close()


def test_every_sequence_is_in_exactly_one_microbatch_within_the_budget() -> None:
    lengths = [5, 40, 7, 7, 39, 12, 3, 3]
    microbatches = split(lengths, 48)
    assert sorted(i for microbatch in microbatches for i in microbatch) == list(range(8))
    assert all(len(m) * max(lengths[i] for i in m) <= 48 for m in microbatches)


def test_sequences_of_like_length_go_together() -> None:
    assert split([10, 2, 10, 2], 20) == ((0, 2), (1, 3))


def test_a_sequence_over_the_budget_goes_alone() -> None:
    assert split([100, 3], 10) == ((0,), (1,))


def test_the_split_depends_on_nothing_but_its_input() -> None:
    assert split([4, 4, 4, 4], 8) == split([4, 4, 4, 4], 8) == ((0, 1), (2, 3))
    assert split([], 8) == ()


def test_every_data_rank_gets_some() -> None:
    assert len(split([5] * 8, 4096)) == 1
    assert len(split([5] * 8, 4096, data_ranks=2)) == 2
    assert len(split([5] * 7, 4096, data_ranks=2)) == 2


def test_arrays_are_shifted_to_the_position_that_predicts_and_padded_with_nothing() -> None:
    sample = Sample(
        report_id="r",
        receipt_id="c",
        group="g",
        reward=1.0,
        tokens=np.array([7, 8, 9], np.int32),
        mask=np.array([False, False, True]),
        logprobs=np.array([0, 0, -1.5], np.float32),
        temperature=0.7,
    )
    longer = Sample("r2", "c2", "g", 0.0, *_four())
    gains, weights = np.array([0, 0, 2], np.float32), np.array([0, 0, 0.5], np.float32)
    zeros = np.zeros(4, np.float32)
    planes = {"advantages": [gains, zeros], "weights": [weights, zeros]}
    batch = collate([sample, longer], planes, torch.device("cpu"))
    assert batch.ids[0].tolist() == [7, 8, 9, 0]
    assert batch.targets[0].tolist() == [8, 9, 0, 0]
    assert batch.mask[0].tolist() == [False, True, False, False]
    assert batch.planes["advantages"][0].tolist() == [0, 2, 0, 0]
    assert batch.planes["weights"][0].tolist() == [0, 0.5, 0, 0]
    assert batch.sequences.tolist() == [[0] * 4, [1] * 4]
    assert batch.positions[0].tolist() == [0, 1, 2, 3]
    assert batch.temperature[:, 0].tolist() == [np.float32(0.7), 1.0]
    assert (batch.starts, batch.packed) == (((0, 0), (1, 0)), None)

    packed = collate([sample, longer], planes, torch.device("cpu"), Form(True, divisor=4))
    assert packed.ids.tolist() == [[7, 8, 9, 0, 1, 2, 3, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert packed.mask.tolist() == [[False, True, False, False, False, False, False, False]]
    assert packed.planes["weights"].tolist() == [[0, 0.5, 0, 0, 0, 0, 0, 0]]
    assert packed.sequences[0, :7].tolist() == [0, 0, 0, 1, 1, 1, 1]
    assert packed.temperature.tolist() == [[np.float32(0.7)] * 3 + [1.0] * 5]
    assert packed.starts == ((0, 0), (0, 3))
    assert packed.packed is not None
    assert packed.packed.cu_seqlens_q.tolist() == [0, 3, 7, 8]  # the last is what fills the row up
    assert packed.packed.max_seqlen_q == 4


@pytest.mark.parametrize(
    "form", [Form(divisor=7), Form(packed=True), Form(packed=True, divisor=7)], ids=["padded", "packed", "packed to 7"]
)
def test_a_step_is_the_same_however_sequences_lie_in_a_microbatch(
    worker: MegatronWorker, make_batch: MakeBatch, monkeypatch: pytest.MonkeyPatch, form: Form
) -> None:
    worker.reset()
    batch = make_batch(seed=3, noise=0.1, budget_tokens=60)
    sequences = [sample.tokens for sample in batch.samples]
    expected = (worker.logprobs(sequences, 0.7), [worker.step(batch).metrics for _ in range(2)])
    worker.reset()
    monkeypatch.setattr(worker, "_form", form)
    found = (worker.logprobs(sequences, 0.7), [worker.step(batch).metrics for _ in range(2)])
    assert found[0] is not None
    assert expected[0] is not None
    for one, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    for step, reference in zip(found[1], expected[1], strict=True):
        assert step == pytest.approx(reference, rel=1e-5, abs=1e-7)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU with Transformer Engine")
def test_packed_sequences_on_a_gpu_have_the_log_probabilities_of_padded_ones(
    make_model: MakeModel, make_batch: MakeBatch, make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written where there is no GPU, and never run yet."""
    made = make_worker(make_model(dtype="bfloat16"), dtype="bfloat16")
    try:
        sequences = [sample.tokens for sample in make_batch().samples]
        assert made._form.packed
        packed = made.logprobs(sequences, 1.0)
        monkeypatch.setattr(made, "_form", Form())
        padded = made.logprobs(sequences, 1.0)
        assert packed is not None
        assert padded is not None
        np.testing.assert_allclose(np.concatenate(packed), np.concatenate(padded), atol=0.1)
    finally:
        made.close()


def test_no_sample_makes_one_masked_token() -> None:
    batch = collate([], {}, torch.device("cpu"))
    assert batch.ids.shape == (1, 1)
    assert not batch.mask.any()


def _four() -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    return np.arange(4, dtype=np.int32), np.zeros(4, np.bool_), np.zeros(4, np.float32), 1.0

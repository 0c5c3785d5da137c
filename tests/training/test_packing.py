import numpy as np
import torch

from reef.training.packing import split
from reef.training.padding import collate
from reef.types import Sample


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
    batch = collate([sample, longer], [gains, zeros], [weights, zeros], torch.device("cpu"))
    assert batch.ids[0].tolist() == [7, 8, 9, 0]
    assert batch.targets[0].tolist() == [8, 9, 0, 0]
    assert batch.mask[0].tolist() == [False, True, False, False]
    assert batch.old_logprobs[0].tolist() == [0, -1.5, 0, 0]
    assert batch.advantages[0].tolist() == [0, 2, 0, 0]
    assert batch.weights[0].tolist() == [0, 0.5, 0, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 3]
    assert batch.temperature[:, 0].tolist() == [np.float32(0.7), 1.0]


def test_no_sample_makes_one_masked_token() -> None:
    batch = collate([], [], [], torch.device("cpu"))
    assert batch.ids.shape == (1, 1)
    assert not batch.mask.any()


def _four() -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    return np.arange(4, dtype=np.int32), np.zeros(4, np.bool_), np.zeros(4, np.float32), 1.0

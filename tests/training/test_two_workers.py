"""What one worker leaves, another takes up, or refuses where it is not its own. One worker lives at a time."""

from collections.abc import Callable
from pathlib import Path

import pytest

from reef.errors import LoadFailedError
from reef.training.worker import MegatronWorker
from reef.types import Batch

MakeModel = Callable[..., Path]
MakeBatch = Callable[..., Batch]
MakeWorker = Callable[..., MegatronWorker]


def test_a_new_worker_has_the_digest_of_one_that_was_reset(
    make_model: MakeModel, make_batch: MakeBatch, make_worker: MakeWorker
) -> None:
    digests = []
    for used in (False, True):
        made = make_worker(make_model())
        if used:
            made.step(make_batch(seed=7))
            made.reset()
        digests.append((made.digest(), made.step(make_batch()).metrics, made.digest()))
        made.close()
    assert digests[0] == digests[1]


@pytest.mark.parametrize(
    ("other", "changes", "message"),
    [
        ({"architecture": "llama"}, {}, "model_type is llama, expected qwen3"),
        ({"tied": False}, {}, "tied is False, expected True"),
        ({}, {"dtype": "bfloat16"}, "dtype is torch.bfloat16, expected torch.float32"),
    ],
)
def test_a_checkpoint_of_another_trainer_is_refused(
    make_model: MakeModel,
    make_worker: MakeWorker,
    tmp_path: Path,
    other: dict[str, object],
    changes: dict[str, object],
    message: str,
) -> None:
    stranger = make_worker(make_model(**other), **changes)
    stranger.save(tmp_path / "other")
    stranger.close()
    fresh = make_worker(make_model())
    try:
        before = fresh.digest()
        with pytest.raises(LoadFailedError, match=f"checkpoint .*other is of another trainer: {message}"):
            fresh.restore(tmp_path / "other")
        assert fresh.digest() == before
    finally:
        fresh.close()


def test_a_release_of_another_model_is_refused(make_model: MakeModel, make_worker: MakeWorker, tmp_path: Path) -> None:
    stranger = make_worker(make_model("llama"))
    stranger.publish("a", tmp_path)
    stranger.close()
    fresh = make_worker(make_model())
    try:
        before = fresh.digest()
        with pytest.raises(
            LoadFailedError, match=r"release .*a is not of this model: .*k_norm\.weight is missing, exp"
        ):
            fresh.load_weights(tmp_path / "a")
        assert fresh.digest() == before
    finally:
        fresh.close()

"""The entropy of next-token distributions against torch.distributions. One rank here; tensor ranks in two processes."""

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from torch.distributions import Categorical

from reef.config import Layout
from reef.training.entropy import ROWS, entropies
from reef.training.megatron import join_ranks, leave_ranks

pytestmark = pytest.mark.timeout(180)

VOCAB = 50


def rows(count: int, *, cut: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [N, V] of every sharpness, and a temperature for each row; `cut`: most entries are impossible."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(count, VOCAB, generator=generator) * torch.logspace(-2, 2, count)[:, None] + 300.0
    if cut:
        logits[:, 1 : VOCAB // 2 + 5] = -torch.inf  # of the second of two tensor ranks, some
        logits[0, :-1] = -torch.inf  # a single one is left, and nothing of the first rank's
    return logits, 0.3 + 1.5 * torch.rand(count, generator=generator)


def expected(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scaled = logits.double() / temperature.double()[:, None]
    probabilities = scaled.softmax(-1)
    return Categorical(probs=probabilities).entropy().float()


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Any:
    join_ranks(0, 1, Layout(), tmp_path_factory.mktemp("ranks") / "store", 0)
    yield
    leave_ranks()


@pytest.mark.parametrize("count", [1, 7, ROWS, ROWS + 1, 2 * ROWS + 3])
@pytest.mark.parametrize("cut", [False, True], ids=["every entry", "impossible entries"])
def test_entropies_are_those_of_torch(count: int, cut: bool) -> None:
    logits, temperature = rows(count, cut=cut)
    given = logits.clone()
    found = entropies(logits, temperature)
    assert (found.shape, found.dtype) == ((count,), torch.float32)
    torch.testing.assert_close(found, expected(logits, temperature), atol=2e-5, rtol=1e-4)
    assert torch.equal(logits, given)


def test_of_no_rows_there_is_no_entropy() -> None:
    found = entropies(torch.zeros(0, VOCAB, dtype=torch.bfloat16), torch.zeros(0))
    assert (found.shape, found.dtype) == ((0,), torch.float32)


def test_equal_entries_have_the_logarithm_of_their_number() -> None:
    found = entropies(torch.full((2, VOCAB), -1e4), torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(found, torch.full((2,), float(torch.tensor(VOCAB).log())))


def test_a_distribution_that_is_certain_has_none() -> None:
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, 3] = 5.0
    assert entropies(logits, torch.ones(1)).item() == 0.0


def test_bfloat16_is_counted_in_float32() -> None:
    logits, temperature = rows(16)
    half = (logits - 300.0).bfloat16()
    torch.testing.assert_close(entropies(half, temperature), expected(half.float(), temperature), atol=2e-5, rtol=1e-4)


def test_no_gradient_goes_through_a_figure() -> None:
    logits, temperature = rows(3)
    assert not entropies(logits.requires_grad_(), temperature).requires_grad


def entropy_on_a_rank(rank: int, store: Path, answers: Any) -> None:
    join_ranks(rank, 2, Layout(tensor=2), store, 0)
    part = VOCAB // 2
    for cut in (False, True):
        logits, temperature = rows(ROWS + 1, cut=cut)
        here = logits[:, part * parallel_state.get_tensor_model_parallel_rank() :][:, :part].contiguous()
        answers.put((cut, entropies(here, temperature).tolist()))
    leave_ranks()


@pytest.mark.slow
def test_a_vocabulary_that_is_cut_over_tensor_ranks_has_the_same_entropy(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    args = [(rank, tmp_path / "store", answers) for rank in (0, 1)]
    processes = [context.Process(target=entropy_on_a_rank, args=each, daemon=True) for each in args]
    for process in processes:
        process.start()
    found = [answers.get(timeout=150) for _ in range(4)]
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    for cut, values in found:
        torch.testing.assert_close(
            torch.tensor(values), expected(*rows(ROWS + 1, cut=cut)), atol=2e-5, rtol=1e-4, msg=str(cut)
        )

"""KL estimators: the vectors of METHODS 4.3, and what their gradients are on average."""

import pytest
import torch

from reef.methods.kl import Estimator, kl

ALL: tuple[Estimator, ...] = ("k1", "k2", "k3")


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", [0.1, 0.2, 0.3]), ("k2", [0.005, 0.02, 0.045]), ("k3", [0.004837418, 0.018730753, 0.040818221])],
)
def test_the_estimators_are_the_published_vectors(estimator: Estimator, expected: list[float]) -> None:
    logprobs, reference = torch.tensor([0.5, 0.7, 0.9]), torch.tensor([0.4, 0.5, 0.6])
    found = kl(logprobs, reference, torch.ones(3, dtype=torch.bool), estimator)
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-8)


LOGITS = torch.tensor([0.3, -0.5, 1.1, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.2, 0.6, -0.4], dtype=torch.float64).log_softmax(0)


def mean_gradient(estimator: Estimator) -> tuple[float, torch.Tensor]:
    """Mean and mean gradient by the logits when the policy samples: exact, over all four tokens."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    estimates = kl(logprobs, REFERENCE, torch.ones(4, dtype=torch.bool), estimator)
    mean = (logprobs.detach().exp() * estimates).sum()
    mean.backward()
    assert logits.grad is not None
    return mean.item(), logits.grad


def true_kl(*, forward: bool) -> tuple[float, torch.Tensor]:
    """KL(policy || reference), or with `forward` KL(reference || policy), and its gradient."""
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)
    value = (
        (REFERENCE.exp() * (REFERENCE - logprobs)).sum() if forward else (logprobs.exp() * (logprobs - REFERENCE)).sum()
    )
    value.backward()
    assert logits.grad is not None
    return value.item(), logits.grad


def test_k1_and_k3_have_the_divergence_as_their_mean() -> None:
    expected = true_kl(forward=False)[0]
    assert mean_gradient("k1")[0] == pytest.approx(expected)
    assert mean_gradient("k3")[0] == pytest.approx(expected)
    assert mean_gradient("k2")[0] == pytest.approx(expected, rel=0.2)


def test_in_a_loss_k1_holds_nothing_k2_holds_the_policy_and_k3_holds_it_the_other_way_round() -> None:
    torch.testing.assert_close(mean_gradient("k1")[1], torch.zeros(4, dtype=torch.float64))
    torch.testing.assert_close(mean_gradient("k2")[1], true_kl(forward=False)[1])
    torch.testing.assert_close(mean_gradient("k3")[1], true_kl(forward=True)[1])


@pytest.mark.parametrize("estimator", ALL)
def test_a_masked_position_is_zero_whatever_stands_there(estimator: Estimator) -> None:
    extremes = [float("nan"), float("inf"), -float("inf"), 1e30, -1e30]
    logprobs = torch.tensor([*extremes, -1.0], requires_grad=True)
    reference = torch.tensor([0.0, float("nan"), -float("inf"), -1e30, 1e30, -1.5])
    mask = torch.tensor([False] * 5 + [True])
    found = kl(logprobs, reference, mask, estimator)
    found.sum().backward()
    assert found[:5].tolist() == [0.0] * 5
    assert found[5] > 0
    assert logprobs.grad is not None
    assert logprobs.grad[:5].tolist() == [0.0] * 5
    assert logprobs.grad[5] > 0


@pytest.mark.parametrize("estimator", ALL)
def test_a_token_far_from_the_reference_stays_finite(estimator: Estimator) -> None:
    logprobs = torch.tensor([100.0, -100.0], requires_grad=True)
    found = kl(logprobs, torch.zeros(2), torch.ones(2, dtype=torch.bool), estimator)
    found.sum().backward()
    assert found.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    assert logprobs.grad[0] > 0  # minimising brings the probability down again


def test_k3_is_exact_close_to_the_reference_where_the_plain_formula_is_not() -> None:
    difference = torch.tensor([1e-4])
    found = kl(difference, torch.zeros(1), torch.ones(1, dtype=torch.bool), "k3").item()
    assert found == pytest.approx(5e-9, rel=0.05)

"""The critic's loss, worked by hand."""

import pytest
import torch

from reef.methods.value import value_loss


def run(
    values: list[float], old: list[float], targets: list[float], clip: float | None, mask: list[bool] | None = None
) -> tuple[list[float], list[float], list[float]]:
    """Loss, gradient of its sum by values, and clipfrac."""
    leaf = torch.tensor(values, requires_grad=True)
    counts = torch.ones(len(values), dtype=torch.bool) if mask is None else torch.tensor(mask)
    loss, metrics = value_loss(leaf, torch.tensor(old), torch.tensor(targets), counts, clip)
    loss.sum().backward()
    assert leaf.grad is not None
    assert not metrics["clipfrac"].requires_grad
    return loss.tolist(), leaf.grad.tolist(), metrics["clipfrac"].tolist()


def test_without_a_clip_it_is_the_square_without_a_half() -> None:
    assert run([1.0, -2.0], [9.0, 9.0], [3.0, -2.5], None) == ([4.0, 0.25], [-4.0, 1.0], [0.0, 0.0])


def test_a_value_that_moved_no_further_than_the_clip_is_as_without_it() -> None:
    loss, gradient, clipped = run([1.125, 0.875, 1.25], [1.0] * 3, [2.0] * 3, 0.25)
    assert loss == [0.875**2, 1.125**2, 0.75**2]
    assert gradient == [-1.75, -2.25, -1.5]
    assert clipped == [0.0] * 3


def test_a_value_that_came_nearer_by_more_than_the_clip_gains_no_more() -> None:
    # From 1 to 1.75 with the target 2: counted as 1.25. From 1 to -0.5 with the target -1: counted as 0.75.
    loss, gradient, clipped = run([1.75, -0.5], [1.0, 1.0], [2.0, -1.0], 0.25)
    assert loss == [0.75**2, 1.75**2]
    assert gradient == [0.0, 0.0]
    assert clipped == [1.0, 1.0]


def test_a_value_that_went_astray_by_more_than_the_clip_is_called_back() -> None:
    loss, gradient, clipped = run([0.0], [1.0], [2.0], 0.25)
    assert (loss, gradient, clipped) == ([4.0], [-4.0], [0.0])


def test_rounding_clips_nothing() -> None:
    values = torch.linspace(-3, 3, 1001)
    _, metrics = value_loss(values, values + 0.1234567, values * 7.7, torch.ones(1001, dtype=torch.bool), 0.2)
    assert metrics["clipfrac"].sum() == 0


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("extreme", [float("nan"), float("inf"), -float("inf"), 1e30, -1e30])
def test_a_masked_position_has_no_loss_and_no_gradient_whatever_stands_there(
    clip: float | None, extreme: float
) -> None:
    mask = [False, False, False, True]
    loss, gradient, clipped = run(
        [extreme, 1.0, 1.0, 1.0], [1.0, extreme, 1.0, 1.0], [2.0, 2.0, extreme, 2.0], clip, mask
    )
    assert (loss, gradient, clipped) == ([0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, -2.0], [0.0] * 4)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_all_masked_is_all_zero(clip: float | None) -> None:
    nan = float("nan")
    assert run([nan, 1.0], [0.0, nan], [nan, nan], clip, [False, False]) == ([0.0] * 2, [0.0] * 2, [0.0] * 2)

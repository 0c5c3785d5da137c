"""What the comparison with TRL stands on: when a gain counts as reached, the grown model, its section of the page."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.common import STARTER
from benchmarks.report import TRL_TITLE, with_trl
from benchmarks.trl.curve import Point, at, reaches
from benchmarks.trl.model import grow

CURVE = [
    Point(step=0, seconds=0.0, rollouts=0, accuracy=0.5),
    Point(step=2, seconds=1.0, rollouts=128, accuracy=0.6),
    Point(step=4, seconds=2.5, rollouts=256, accuracy=0.7),
    Point(step=6, seconds=4.0, rollouts=384, accuracy=0.65),
]


def test_a_gain_is_reached_at_the_first_point_that_has_it() -> None:
    assert reaches(CURVE, 0.15) == CURVE[2]
    assert reaches(CURVE, 0.35) is None


def test_at_a_time_the_last_weights_that_were_there_count() -> None:
    assert at(CURVE, 2.4) == CURVE[1]
    assert at(CURVE, 4.0) == CURVE[3]
    assert at(CURVE, 4.1) is None  # the run had ended: nobody knows


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Two wait for each other for minutes where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_the_grown_model_answers_as_the_starter_and_all_that_writes_learns(tmp_path: Path) -> None:
    small = AutoModelForCausalLM.from_pretrained(str(STARTER), dtype=torch.float32).eval()
    large = AutoModelForCausalLM.from_pretrained(str(grow(STARTER, tmp_path)), dtype=torch.float32).eval()
    ids = torch.arange(3, 63).reshape(2, 30)
    with torch.no_grad():
        assert torch.allclose(large(ids).logits, small(ids).logits, atol=1e-3)  # of values up to about 20
    assert 4_500_000 < large.num_parameters() < 5_500_000
    large(ids, labels=ids).loss.backward()
    for name, parameter in large.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert parameter.grad.abs().max() > 0, name


def test_the_section_is_replaced_and_the_rest_of_the_page_stays() -> None:
    once = with_trl("# Performance\n", f"{TRL_TITLE}\nold\n")
    assert with_trl(once, f"{TRL_TITLE}\nnew\n") == f"# Performance\n{TRL_TITLE}\nnew\n"

"""Scenarios: made once, one of them trains, and it does not change under a chain."""

from typing import Any

import pytest

from reef.errors import ConflictError, NotFoundError
from reef.ledger import scenarios


def test_the_first_scenario_trains_and_later_ones_only_record(book: Any) -> None:
    made, created = book.write(scenarios.create, "other", "grpo", 7.5)
    assert (made, created) == (scenarios.Scenario("other", "grpo", "auto", 7.5), True)
    assert book.read(scenarios.training) == "arithmetic"
    assert [scenario.name for scenario in book.read(scenarios.all_of)] == ["other", "arithmetic"]  # oldest first


def test_creating_a_scenario_again_gives_the_one_that_is_there(book: Any) -> None:
    before = book.read(scenarios.get, "arithmetic")
    assert book.write(scenarios.create, "arithmetic", "grpo", 99.0) == (before, False)
    with pytest.raises(ConflictError, match="arithmetic has recipe grpo, the request names sao") as refused:
        book.write(scenarios.create, "arithmetic", "sao", 99.0)
    assert (refused.value.status, refused.value.param) == (409, "recipe")


def test_another_scenario_cannot_take_over_the_training(book: Any) -> None:
    book.write(scenarios.create, "other", "grpo", 7.5)
    book.write(scenarios.set_training, "arithmetic")
    with pytest.raises(ConflictError, match="arithmetic trains; other needs a run directory of its own"):
        book.write(scenarios.set_training, "other")
    assert book.read(scenarios.training) == "arithmetic"


def test_a_mode_is_kept_over_a_restart(book: Any) -> None:
    book.write(scenarios.set_mode, "arithmetic", "manual")
    book.reopen()
    assert book.read(scenarios.get, "arithmetic").mode == "manual"


def test_an_unknown_scenario_is_named(book: Any) -> None:
    assert book.read(scenarios.find, "nothing") is None
    for op, arguments in ((scenarios.get, ("nothing",)), (scenarios.set_mode, ("nothing", "manual"))):
        with pytest.raises(NotFoundError, match="no scenario nothing") as missing:
            book.write(op, *arguments)
        assert missing.value.code == "scenario_not_found"


def test_a_service_that_is_started_with_another_recipe_trains_by_that(book: Any) -> None:
    book.write(scenarios.create, "arithmetic", "grpo", 1.0)
    book.write(scenarios.set_recipe, "sao")
    assert book.read(scenarios.get, "arithmetic").recipe == "sao"
    assert book.write(scenarios.create, "arithmetic", "sao", 2.0)[1] is False

"""A house without engines, for tests of what does not ask them."""

from __future__ import annotations

from typing import Any

from reef.chat.dialect import Dialect
from reef.chat.template import Template
from reef.config import Config
from reef.ledger.ledger import Ledger
from reef.observe import Metrics
from reef.service.access import Access
from reef.service.house import House
from reef.service.turns import Turns
from tests.conftest import STARTER


def make_house(config: Config, ledger: Ledger, engines: Any = None, **fields: Any) -> House:
    """`fields` are the house's own; it asks for no key."""
    template = Template(STARTER)
    dialect = Dialect(template, STARTER, "auto", "auto")
    turns = Turns(ledger, template, dialect, True, 0)
    access = Access(config.reef.model_copy(update={"access": "open"}))
    return House(config, ledger, engines, template, dialect, turns, Metrics(), access, **fields)

"""What the routes share: the rooms below, which scenario a request belongs to, and whether we can answer yet."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection
from starlette.requests import Request as HttpRequest

from reef.chat.dialect import Dialect
from reef.chat.template import Template
from reef.config import SCENARIO_NAME, Config
from reef.engines.pool import Engines
from reef.errors import BadRequestError, BusyError, ConflictError, NotFoundError, UnavailableError
from reef.ledger import releases, scenarios
from reef.ledger.ledger import Ledger
from reef.ledger.scenarios import Scenario
from reef.observe import Metrics, log
from reef.service.access import Access, caller, headers_of, require_scenario
from reef.service.turns import Turns
from reef.storage import Storage

if TYPE_CHECKING:
    from reef.dispatcher import Dispatcher  # imports Ray: not for a service that only records

DEFAULT_SCENARIO = "default"
MAX_KNOWN_SCENARIOS = 65536  # remembered in memory; the ledger knows them all


@dataclass(slots=True)
class House:
    """One running service. `storage` and `dispatcher` are there once start-up has got to them."""

    config: Config
    ledger: Ledger
    engines: Engines
    template: Template
    dialect: Dialect
    turns: Turns
    metrics: Metrics
    access: Access
    storage: Storage | None = None
    dispatcher: "Dispatcher | None" = None
    waiting_for: str | None = "the engine and the trainer"  # None once ready
    failure: str | None = None  # why start-up failed
    following_error: str | None = None  # what does not work though another service owns the ledger
    started_at: float = field(default_factory=time.time)
    num_in_flight: int = 0
    background: set[asyncio.Task[Any]] = field(default_factory=set)
    num_deleted: Counter[str] = field(default_factory=Counter)  # receipts since the start, by why
    _known: dict[str, Scenario] = field(default_factory=dict)
    _training: str | None = None

    @property
    def trains(self) -> bool:
        return self.config.training.backend != "none"

    async def is_training(self, scenario: str) -> bool:
        """Whether a scenario's reports train. Once one does it stays so: no ledger is asked twice."""
        if self._training is None and self.trains:
            self._training = await self.ledger.read(scenarios.training)
        return scenario == self._training

    def require_ready(self) -> Storage:
        """Raises UnavailableError while starting."""
        if self.waiting_for is not None or self.storage is None:
            raise UnavailableError(f"not ready: {self.failure or f'starting {self.waiting_for}'}", retry_after_s=2)
        return self.storage

    def scenario_name(self, http: HttpRequest) -> str:
        """The scenario that a request names by header; else the one that its key is bound to, else the one that trains.

        Raises:
            ForbiddenError: the key is bound to others.
        """
        name = (
            headers_of(http).get("x-reef-scenario")
            or caller(http).only_scenario
            or self.config.recipe.scenario
            or DEFAULT_SCENARIO
        )
        require_scenario(http, name)
        return name

    async def scenario_of(self, http: HttpRequest) -> Scenario:
        """The scenario of a request (`scenario_name`), created where that is allowed.

        Raises:
            ForbiddenError: the key is bound to others.
            NotFoundError: it is unknown and `reef.implicit-scenarios` is off.
            ConflictError: `x-reef-recipe` is not its recipe.
        """
        name = self.scenario_name(http)
        recipe = headers_of(http).get("x-reef-recipe")
        scenario = self._known.get(name)
        if scenario is None:
            scenario = await self.ledger.read(scenarios.find, name)
            if scenario is None and not self.config.reef.implicit_scenarios:
                raise NotFoundError(
                    f"no scenario {name}, and reef.implicit-scenarios is off: create it with POST /reef/scenarios",
                    param="x-reef-scenario",
                    code="scenario_not_found",
                )
            if scenario is None:
                scenario, _ = await self.create_scenario(name, recipe)
            if len(self._known) < MAX_KNOWN_SCENARIOS:
                self._known[name] = scenario
        if recipe is not None and recipe != scenario.recipe:
            raise ConflictError(
                f"scenario {name} has recipe {scenario.recipe}, the request names {recipe}", param="x-reef-recipe"
            )
        return scenario

    def forget_scenarios(self) -> None:
        """They may have another recipe from now on."""
        self._known.clear()

    async def create_scenario(self, name: str, recipe: str | None) -> tuple[Scenario, bool]:
        """The scenario, and whether this call made it. The first one gets the chain."""
        storage = self.require_ready()
        if not SCENARIO_NAME.fullmatch(name):
            raise BadRequestError(
                f"a scenario's name has 1-64 letters, digits, '.', '_' or '-', got {name[:80]!r}", param="name"
            )
        own = self.config.recipe.implementation
        if recipe is not None and recipe != own:
            raise ConflictError(f"this service runs recipe {own}, the request names {recipe}", param="recipe")

        def create(connection: Connection) -> tuple[Scenario, bool]:
            made = scenarios.create(connection, name, own, time.time())
            if scenarios.training(connection) == name and releases.head(connection, name) is None:
                releases.append(connection, storage.base_release(name))
            return made

        made = await self.ledger.write(create)
        if self.dispatcher is not None:
            self.dispatcher.notify()
        return made

    @contextmanager
    def admit(self) -> Iterator[None]:
        """One more request in work, its body and its whole answer included. Raises BusyError over the bound."""
        if self.num_in_flight >= self.config.reef.max_in_flight:
            raise BusyError(f"{self.num_in_flight} requests are in work already (reef.max-in-flight)", retry_after_s=1)
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1

    def count_deleted(self, num_receipts: int, reason: str) -> None:
        """The content of receipts was deleted: by receipt, session or scenario as asked, or by age or size."""
        if num_receipts:
            self.turns.forget()
            self.template.forget()
            self.num_deleted[reason] += num_receipts
            self.metrics.deleted.labels(reason).inc(num_receipts)
            log.info("deleted the content of %d receipts (%s)", num_receipts, reason)

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold on to a task that must end though nobody awaits it."""
        self.background.add(task)
        task.add_done_callback(self.background.discard)

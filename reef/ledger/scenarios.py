"""Scenarios: who they are, which one trains, and whether it does so by itself."""

from dataclasses import dataclass

from sqlalchemy import Connection, insert, select, update

from reef.errors import ConflictError, NotFoundError
from reef.ledger.schema import meta, scenarios


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario as the ledger knows it; `created_at` is in seconds since the epoch."""

    name: str
    recipe: str
    mode: str  # auto | manual
    created_at: float


def create(connection: Connection, name: str, recipe: str, now: float) -> tuple[Scenario, bool]:
    """The scenario, and whether this call created it. The first one ever created trains, if none was named before.

    Raises:
        ConflictError: it exists with another recipe.
    """
    found = find(connection, name)
    if found is not None:
        if found.recipe != recipe:
            raise ConflictError(
                f"scenario {name} has recipe {found.recipe}, the request names {recipe}", param="recipe"
            )
        return found, False
    connection.execute(insert(scenarios).values(name=name, recipe=recipe, mode="auto", created_at=now))
    if training(connection) is None:
        set_training(connection, name)
    return Scenario(name, recipe, "auto", now), True


def find(connection: Connection, name: str) -> Scenario | None:
    """The scenario of that name, or None where there is none."""
    row = connection.execute(select(scenarios).where(scenarios.c.name == name)).first()
    return Scenario(row.name, row.recipe, row.mode, row.created_at) if row else None


def get(connection: Connection, name: str) -> Scenario:
    """Raises NotFoundError."""
    scenario = find(connection, name)
    if scenario is None:
        raise NotFoundError(f"no scenario {name}", param="scenario", code="scenario_not_found")
    return scenario


def all_of(connection: Connection) -> list[Scenario]:
    """All scenarios, oldest first."""
    rows = connection.execute(select(scenarios).order_by(scenarios.c.created_at, scenarios.c.name))
    return [Scenario(row.name, row.recipe, row.mode, row.created_at) for row in rows]


def training(connection: Connection) -> str | None:
    """The scenario whose reports train (an engine holds one set of weights, so there is one)."""
    return connection.scalar(select(meta.c.value).where(meta.c.key == "training_scenario"))


def set_training(connection: Connection, name: str) -> None:
    """Raises ConflictError where another scenario trains already: its chain and this engine belong together."""
    current = training(connection)
    if current == name:
        return
    if current is not None:
        raise ConflictError(f"in this run directory {current} trains; {name} needs a run directory of its own")
    connection.execute(insert(meta).values(key="training_scenario", value=name))


def set_recipe(connection: Connection, recipe: str) -> None:
    """What every scenario's reports train by from now on: a service has one recipe, and may be started with another."""
    connection.execute(update(scenarios).where(scenarios.c.recipe != recipe).values(recipe=recipe))


def set_mode(connection: Connection, name: str, mode: str) -> None:
    """Set whether a scenario trains by itself (`auto`) or when told (`manual`). Raises NotFoundError."""
    get(connection, name)
    connection.execute(update(scenarios).where(scenarios.c.name == name).values(mode=mode))

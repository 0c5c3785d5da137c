"""`reef replay`: makes a release again from the ledger, from the base on, beside a running service or without one.

The same code brings the trainer back after a crash: `reef.recovery.replay`.
"""

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from reef.config import Config, RecipeSection
from reef.errors import ConfigError, ConflictError, GoneError
from reef.ledger import batches, releases, scenarios
from reef.ledger.reading import open_reading
from reef.recovery import replay
from reef.training.cluster import Trainer
from reef.training.manifest import content_id_of
from reef.training.settings import models_beside, recipe_from, settings
from reef.types import Release

T = TypeVar("T")
Say = Callable[[str], None]


def run(config: Config, scenario: str | None, to: str | None, directory: Path | None, say: Say) -> int:
    """Train every release up to `to` (none: the head) again in a fresh directory; 1 where one came out different.

    The last one stays in `directory` (none: `RUN-DIR-replay/RELEASE`), a model as any release is.

    Raises:
        NotFoundError: there is no such scenario or release.
        ConfigError: the model that training began with is not there, or `directory` is not fresh.
        ConflictError: nothing was trained up to there.
        GoneError: receipts that it was trained on were deleted.
    """
    return asyncio.run(_run(config, scenario, to, directory, say))


async def _run(config: Config, scenario: str | None, to: str | None, directory: Path | None, say: Say) -> int:
    async def read(query: Callable[..., T], *args: Any) -> T:
        def work() -> T:
            with open_reading(config.ledger_url) as connection:
                return query(connection, *args)

        return await asyncio.to_thread(work)

    async def once(store: Callable[..., Awaitable[T]], *args: Any) -> T:
        return await store(*args)

    target = await _target(read, scenario, to)
    steps = await read(releases.steps_to, target, 0)
    if not steps:
        raise ConflictError(f"{target.id} is the model as it came: there is nothing to train again")
    base = (await read(releases.chain, target.scenario, 1, 1))[0]
    if not config.inference.model_path.is_dir():
        raise ConfigError(f"inference.model-path: there is no directory {config.inference.model_path}")
    found = await asyncio.to_thread(content_id_of, config.inference.model_path)
    if found != base.content_id:
        raise ConfigError(
            f"inference.model-path {config.inference.model_path} holds {found}, training began with {base.content_id}"
        )
    if gone := [f"{release.num_deleted} of {release.id}" for release in steps if release.num_deleted]:
        raise GoneError(f"{target.id} cannot be made again: receipts that it needs were deleted: {', '.join(gone)}")
    directory = _fresh(directory or config.reef.run_dir.with_name(f"{config.reef.run_dir.name}-replay") / target.id)
    say(f"replaying {len(steps)} releases from {base.id} to {target.id} in {directory}")
    own = config.model_copy(
        update={
            "reef": config.reef.model_copy(update={"run_dir": directory}),
            "recipe": await _recipe(read, steps) or config.recipe,
        }
    )
    trainer = Trainer(own, config.inference.model_path)
    different = 0
    changed = ""
    before: Path | None = None
    try:
        await asyncio.to_thread(trainer.start)
        async for again in replay(read, trainer, settings(own), steps, directory, once):
            release, made = again.release, again.made
            if again.changed != changed:
                changed = again.changed
                say(f"from here on {changed}: bits may differ" if changed else "from here on set up as it was")
            same = made.content_id == release.content_id
            different += not same
            say(f"{release.id}  {made.content_id}  {'equal' if same else f'DIFFERENT: it was {release.content_id}'}")
            if before is not None:
                shutil.rmtree(before)
            before = Path(made.path)
    finally:
        await asyncio.to_thread(trainer.stop)
        if before is None:  # it came to nothing
            shutil.rmtree(directory, ignore_errors=True)
    say(f"{before}: {'every release is equal' if not different else f'{different} of {len(steps)} are different'}")
    return 1 if different else 0


async def _recipe(read: Callable[..., Awaitable[Any]], steps: Sequence[Release]) -> RecipeSection | None:
    """The recipe that has every model that steps need beside the policy; None where none is needed.

    Raises:
        ConflictError: no single one has them all.
    """
    chosen: tuple[Release, Mapping[str, Any]] | None = None
    for release in steps:
        method = (await read(batches.settings_of, release.batch_id))["method"]
        needed = models_beside(method)
        if chosen is None or needed.items() > models_beside(chosen[1]).items():
            chosen = (release, method) if needed else chosen
        elif not needed.items() <= (held := models_beside(chosen[1])).items():
            raise ConflictError(
                f"{release.id} was trained beside {needed}, {chosen[0].id} beside {held}: no workers have both, and "
                "one replay cannot go over the two; replay up to the release before with --to"
            )
    return None if chosen is None else recipe_from(chosen[1])


async def _target(read: Callable[..., Awaitable[Any]], scenario: str | None, to: str | None) -> Release:
    name = scenario or await read(scenarios.training)
    if name is None:
        raise ConflictError("no scenario was ever trained in this ledger")
    await read(scenarios.get, name)
    target: Release | None = await read(releases.head, name) if to is None else await read(releases.get, name, to)
    if target is None:
        raise ConflictError(f"scenario {name} has no releases of its own")
    return target


def _fresh(directory: Path) -> Path:
    with contextlib.suppress(FileNotFoundError):
        if any(directory.iterdir()):
            raise ConfigError(f"{directory} is not empty: remove it, or give another --directory")
    directory.mkdir(parents=True, exist_ok=True)
    return directory

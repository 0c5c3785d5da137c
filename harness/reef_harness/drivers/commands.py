"""The commands of this room: ``stream`` and ``groups``, which send graded rollouts of a file's items to a service."""

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from reef_harness import service
from reef_harness.client import MAX_CONNECTIONS, TIMEOUT_S, Client, Retry
from reef_harness.drivers.driver import Driver, Options, Progress
from reef_harness.drivers.groups import GroupsDriver
from reef_harness.drivers.interrupts import finish_on_sigint
from reef_harness.drivers.records import GOLDLESS
from reef_harness.drivers.stream import StreamDriver
from reef_harness.errors import HarnessError, TooManyRequests, Unreachable, WrongRecords
from reef_harness.evaluation.items import read_items
from reef_harness.graders import Grader
from reef_harness.graders.named import grader_of
from reef_harness.progress import ReleaseBar, RolloutBar, tell
from reef_harness.types import Item, Json

_COMPLAINTS_SHOWN = 5
_TOLD_FROM_S = 30.0  # of trying that are left: a request with less began in an outage that was told of


def add_to(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to ``reef-harness``. Each sets ``run``: parsed arguments in, the exit status out."""
    stream = commands.add_parser("stream", help="rollouts of one prompt each, many in flight (SAO)")
    _add_options(stream)
    groups = commands.add_parser("groups", help="several rollouts of each prompt, compared with one another (GRPO)")
    _add_options(groups)
    groups.add_argument("--group-size", type=_count, help="rollouts of a prompt (default: the service's)")


def _add_options(parser: argparse.ArgumentParser) -> None:
    service.add_options(parser)
    parser.add_argument("--items", type=Path, required=True, help="JSONL: id, prompt or messages, gold")
    parser.add_argument("--grader", required=True, help="see reef-harness graders")
    parser.add_argument(
        "--in-flight",
        type=_count,
        default=16,
        help="rollouts (of groups: groups) sampled at once (default: %(default)s)",
    )
    parser.add_argument(
        "--releases", type=_count, help="end after so many releases that these reports trained (default: any)"
    )
    parser.add_argument("--rollouts", type=_count, help="end after so many reported rollouts (default: any)")
    parser.add_argument("--epochs", type=_count, help="times through the items (default: 1; with --releases any)")
    parser.add_argument("--seed", type=int, help="shuffle the items of each epoch (default: in the file's order)")
    parser.add_argument("--records", type=Path, help="JSONL of all rollouts; one that is there is gone on with")
    parser.add_argument(
        "--max-tokens", type=_count, default=64, help="tokens of an answer at most (default: %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling (default: %(default)s)")
    parser.add_argument(
        "--timeout-s", type=float, default=TIMEOUT_S, help="seconds that an answer may take (default: %(default)g)"
    )
    parser.add_argument("--max-ahead", type=_ahead, metavar="N",
                        help="batches ahead of the releases (default: groups 1, stream: any)")  # fmt: skip
    parser.add_argument("--tags", type=_tag, nargs="*", default=[], metavar="NAME=VALUE", help="kept with each answer")
    parser.set_defaults(run=_run)


def _count(text: str) -> int:
    return _whole(text, 1)


def _ahead(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return value


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value


def _run(arguments: argparse.Namespace) -> int:
    items, complaints = read_items(arguments.items)
    for complaint in complaints[:_COMPLAINTS_SHOWN]:
        print(f"left out: {complaint}", file=sys.stderr)
    if len(complaints) > _COMPLAINTS_SHOWN:
        print(f"left out: {len(complaints) - _COMPLAINTS_SHOWN} more", file=sys.stderr)
    return asyncio.run(_drive(arguments, items, grader_of(arguments.grader)))


async def _drive(arguments: argparse.Namespace, items: Sequence[Item], grader: Grader) -> int:
    connections = max(MAX_CONNECTIONS, 2 * arguments.in_flight)  # reports need some beside the answers in work
    async with await service.connect(arguments, timeout_s=arguments.timeout_s, max_connections=connections) as client:
        client.retry = Retry(on_pause=_Outages())
        config = (await client.contract())["config"]
        bar = _bar(arguments, len(items), config)
        failure: HarnessError | OSError | None = None
        with bar, _driver(arguments, client, _epochs(arguments, items), grader, config, bar) as driver:
            bar.begin(driver.snapshot())
            async with finish_on_sigint(driver.stop):
                try:
                    end = await driver.run(releases=arguments.releases, rollouts=arguments.rollouts)
                except (HarnessError, OSError) as error:
                    end, failure = driver.snapshot(), error
    print(_summary(end, arguments.releases), file=sys.stderr)
    again = f"the same command goes on from {arguments.records}" if arguments.records else ""
    if failure is not None:
        if again and not isinstance(failure, WrongRecords):
            print(again, file=sys.stderr)
        raise failure
    if driver.stopping:
        told = "stopped" if end.owed else "stopped: what was in flight is reported"
        print("; ".join(filter(None, (told, again))), file=sys.stderr)
        return 130
    return _status(end)


def _status(end: Progress) -> int:
    """1 where nothing could be reported; what an earlier life reported counts where only gold was lacking now."""
    if end.reported:
        return 0
    with_gold = sum(count for reason, (count, _) in end.failures.items() if reason not in GOLDLESS)
    return 1 if with_gold or end.rollouts == end.failed > 0 else 0


class _Outages:
    """Tells once of an outage that the service does not answer, and until when it is tried."""

    def __init__(self) -> None:
        self._until = 0.0

    def __call__(self, error: HarnessError, left_s: float) -> None:
        """A request failed and is tried again, for ``left_s`` at most."""
        now = time.monotonic()
        if isinstance(error, TooManyRequests) or now < self._until or left_s < _TOLD_FROM_S:
            return
        self._until = now + left_s
        what = "does not answer" if isinstance(error, Unreachable) else "is not ready"
        at = time.strftime("%H:%M:%S", time.localtime(time.time() + left_s))
        tell(f"the service {what}, and is tried until {at}: {error}")


def _driver(
    arguments: argparse.Namespace,
    client: Client,
    items: Iterator[Item],
    grader: Grader,
    config: Json,
    bar: ReleaseBar | RolloutBar,
) -> Driver:
    options = Options(
        in_flight=arguments.in_flight,
        temperature=arguments.temperature,
        max_tokens=arguments.max_tokens,
        tags=dict(arguments.tags),
        records=arguments.records,
        progress=bar,
    )
    batch, size = int(config["batch-size"]), _size(arguments, config)
    if arguments.command == "stream":
        return StreamDriver(client, items, grader, batch=batch, max_ahead=arguments.max_ahead, **options)
    ahead = 1 if arguments.max_ahead is None else arguments.max_ahead
    groups = max(1, -(-batch // size))  # whole groups make a batch
    return GroupsDriver(client, items, grader, group_size=size, groups_per_batch=groups, max_ahead=ahead, **options)


def _size(arguments: argparse.Namespace, config: Json) -> int:
    """Rollouts of a prompt. A method without groups has no size of its own."""
    return 1 if arguments.command == "stream" else arguments.group_size or int(config.get("group-size") or 8)


def _num_epochs(arguments: argparse.Namespace) -> int | None:
    if arguments.epochs is None and not arguments.releases and not arguments.rollouts:
        return 1
    return int(arguments.epochs) if arguments.epochs else None


def _bar(arguments: argparse.Namespace, num_items: int, config: Json) -> ReleaseBar | RolloutBar:
    if arguments.releases:
        return ReleaseBar(arguments.releases)
    epochs = _num_epochs(arguments)
    bounds = (arguments.rollouts, epochs and epochs * num_items * _size(arguments, config))
    return RolloutBar(min(filter(None, bounds)))


def _epochs(arguments: argparse.Namespace, items: Sequence[Item]) -> Iterator[Item]:
    """The items, time after time; shuffled anew each time with a seed, the same in each life of a run."""
    epoch, epochs = 0, _num_epochs(arguments)
    while epochs is None or epoch < epochs:
        order = list(items)
        if arguments.seed is not None:
            random.Random(f"{arguments.seed}/{epoch}").shuffle(order)
        yield from order
        epoch += 1


def _summary(end: Progress, releases: int | None) -> str:
    told = f"{end.rollouts - end.failed} rollouts reported, {end.failed} failed, {end.releases} releases trained"
    if releases and end.releases < releases:
        told += f" of {releases}"
    if end.waiting:
        told += f"; {end.waiting} wait for the service to use them"
    if end.standstill:
        told += f"; {end.standstill}"
    if end.owed:
        told += f"; {end.owed} reports are owed"
    for reason, (count, last) in end.failures.items():
        told += f"\n{count} failed with {reason}, the last: {last}"
    return told

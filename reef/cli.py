"""The commands.

reef serve -c serve.yaml [--section.key VALUE ...] [--dry-run | --print-config]
reef status | releases [SCENARIO] | why RECEIPT_OR_REPORT      ask a running service
reef doctor                                                    what this machine has, and what is missing
"""

import argparse
import http.client
import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from reef.config import Config, load, split_flags
from reef.errors import ConfigError, NotFoundError, ReefError, UnavailableError

DEFAULT_FILE = Path("serve.yaml")
TIMEOUT_S = 30


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status (0 done, 1 failed, 2 wrong usage or configuration)."""
    settings, words = split_flags(sys.argv[1:] if argv is None else argv)
    arguments = _parser().parse_args(words)
    try:
        path = arguments.config or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)
        config = load(path, settings)
        return int(arguments.run(arguments, config))
    except ConfigError as error:
        print(f"reef: {error.message}", file=sys.stderr)
        return 2
    except ReefError as error:
        print(f"reef: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # before the service took over the signals
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="reef",
        description="A service that lets a language model learn from the traffic it serves.",
        epilog="Any setting can be given as --section.key VALUE, e.g. --training.options.lr 2e-6.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("-c", "--config", type=Path, help=f"configuration file (default: {DEFAULT_FILE})")
        made.set_defaults(run=run)
        return made

    serve = command("serve", _serve, "Start the service.")
    serve.add_argument("--dry-run", action="store_true", help="check everything, start nothing")
    serve.add_argument("--print-config", action="store_true", help="print the resolved configuration, secrets hidden")
    for name, run, text in (
        ("status", _status, "What a running service is doing."),
        ("releases", _releases, "The release chain of a scenario, newest first."),
        ("why", _why, "The story of a receipt or a report."),
    ):
        ask = command(name, run, text)
        ask.add_argument("--url", help="the service (default: the one of the configured run directory)")
        ask.add_argument("--json", action="store_true", help="print the answer as JSON")
        if name == "releases":
            ask.add_argument("scenario", nargs="?", help="default: the one that trains")
            ask.add_argument("--limit", type=int, default=20)
        if name == "why":
            ask.add_argument("id", help="a receipt (rcp_...) or a report")
    command("doctor", _doctor, "Check this machine and the configuration.")
    return parser


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    from reef import checks

    if arguments.print_config:
        print(yaml.safe_dump(config.dump(), sort_keys=False), end="")
        return 0
    lines = checks.dry_run(config)
    if arguments.dry_run:
        print("\n".join(lines))
        return 0
    import uvloop

    from reef.service.run import serve

    return uvloop.run(serve(config, lambda text: print(f"reef: {text}", flush=True)))


def _doctor(_arguments: argparse.Namespace, config: Config) -> int:
    from reef import checks

    print("\n".join(checks.machine()))
    print("\n".join(checks.dry_run(config)))
    return 0


def _status(arguments: argparse.Namespace, config: Config) -> int:
    status = _get(_url(arguments, config), "/reef/status", config)
    if arguments.json:
        print(json.dumps(status, indent=2))
        return 0
    scenario, training = status["scenario"], status["training"]
    print(f"ready     {status['ready']}" + (f" (waiting for {status['waiting_for']})" if not status["ready"] else ""))
    if scenario is not None:
        print(f"scenario  {scenario['name']}: step {scenario['step']}, head {scenario['head']}")
        print(
            f"queue     {scenario['pending']} pending, {scenario['reserved']} reserved, batch {scenario['batch_size']}"
        )
    if training is not None:
        print(f"trainer   {training['phase']}")
    for engine in status["engines"]:
        served = engine["release_id"] or "no release"
        print(f"engine    {engine['state']}, serves {served}, {engine['in_flight']} in flight")
    for error in filter(
        None,
        (status["failure"], status["ledger"]["error"], training and training["error"], training and training["paused"]),
    ):
        print(f"error     {error}")
    return 0


def _releases(arguments: argparse.Namespace, config: Config) -> int:
    url = _url(arguments, config)
    name = arguments.scenario or _training_scenario(url, config)
    answer = _get(url, f"/reef/scenarios/{quote(name, safe='')}/releases?limit={arguments.limit}", config)
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return 0
    print(f"{'':1} {'release':<14} {'step':>5} {'operation':<9} {'reward':>7} {'gap':>9} {'samples':>7}  created")
    for release in answer["releases"]:
        metrics = release["metrics"]
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(release["created_at"]))
        print(
            f"{'*' if release['current'] else ' '} {release['release_id']:<14} {release['step']:>5} "
            f"{release['operation']:<9} {_figure(metrics.get('reward_mean'), '.3f'):>7} "
            f"{_figure(metrics.get('train_rollout_logprob_abs_diff'), '.1e'):>9} "
            f"{_figure(metrics.get('num_samples'), '.0f'):>7}  {created}"
        )
    return 0


def _why(arguments: argparse.Namespace, config: Config) -> int:
    url = _url(arguments, config)
    try:
        receipt = _get(url, f"/reef/receipts/{quote(arguments.id, safe='')}", config)
        ids = receipt["reports"]
    except NotFoundError:
        receipt, ids = None, [arguments.id]
    stories = [_get(url, f"/reef/reports/{quote(report_id, safe='')}", config) for report_id in ids]
    if arguments.json:
        print(json.dumps({"receipt": receipt, "reports": stories}, indent=2))
        return 0
    if receipt is not None:
        spans = ", ".join(f"{span['release_id']} [{span['start']}, {span['end']})" for span in receipt["spans"])
        exact = "exact" if receipt["exact"] else f"not exact ({receipt['inexact_reason']})"
        print(f"receipt {receipt['agent_record_id']}: {len(receipt['token_ids'])} tokens from {spans}, {exact}")
        if not stories:
            print("no report references it")
    for story in stories:
        print(f"report {story['agent_record_id']}: score {story['score']}, {_fate(story)}")
    return 0


def _fate(story: dict[str, Any]) -> str:
    if story["state"] == "trained":
        return f"trained in step {story['step']}, release {story['release_id']}"
    reason = f": {story['reason']}" if story["reason"] else ""
    return f"{story['state']}{reason}"


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _training_scenario(url: str, config: Config) -> str:
    status = _get(url, "/reef/status", config)
    if status["scenario"] is None:
        raise NotFoundError("no scenario exists yet")
    return str(status["scenario"]["name"])


def _url(arguments: argparse.Namespace, config: Config) -> str:
    if arguments.url:
        return str(arguments.url).rstrip("/")
    path = config.reef.run_dir / "service.json"
    try:
        return str(json.loads(path.read_text())["url"])
    except (FileNotFoundError, NotADirectoryError):
        raise UnavailableError(f"no service has run in {config.reef.run_dir}: give --url, or --reef.run-dir") from None
    except (OSError, ValueError, KeyError) as error:
        raise UnavailableError(f"cannot read {path}: {error}; give --url") from None


def _get(url: str, path: str, config: Config) -> Any:
    headers = {}
    if config.reef.token is not None:
        headers["authorization"] = f"Bearer {config.reef.token.get_secret_value()}"
    elif key := os.environ.get("REEF_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    try:
        request = urllib.request.Request(url + path, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise (NotFoundError if error.code == 404 else ReefError)(_message(error, url)) from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no service answers at {url}: {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnavailableError(f"{url} does not answer as Reef does: {error!r}") from None


def _message(error: urllib.error.HTTPError, url: str) -> str:
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return f"{url} does not answer as Reef does: HTTP status {error.code}"

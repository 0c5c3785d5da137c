"""The commands.

reef serve -c serve.yaml [--section.key VALUE ...] [--dry-run | --print-config]
reef status | releases [SCENARIO] | why ID                     ask a running service; of a receipt, report or release
reef rollback RELEASE | promote RELEASE [--force]              move its chain
reef token NAME [--role ROLE ...] [--scenario NAME ...]        make a key: for whom, and the lines to configure it
reef replay [SCENARIO] [--to RELEASE]                          make a release again from the ledger
reef export --format atif SCENARIO [--out FILE]                conversations out of the ledger, a line of JSON each
reef doctor [--ledger]                                         what this machine has, and what is missing; or what is
                                                               wrong in the ledger, beside a running service too
A running service is asked with --reef.token, else REEF_API_KEY, else (on this machine) the key in its run directory.
`serve --dry-run` and `doctor` answer for another machine with --gpus N --gpu-memory-gib G --nodes K.
"""

import argparse
import http.client
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

import yaml

from reef import keys
from reef.config import LOOPBACK, ROLES, Config, load, split_flags
from reef.errors import ConfigError, NotFoundError, ReefError, UnavailableError

if TYPE_CHECKING:
    from reef.checks import Findings
    from reef.memory.hardware import Hardware

DEFAULT_FILE = Path("serve.yaml")
TIMEOUT_S = 30
GPU_MEMORY_GIB = 80.0  # of a machine that `--gpus` describes
# What `reef why` says of each event that `reef/ledger/story.py` tells.
EVENTS = {
    "written": "receipt {receipt_id} written, {tokens} tokens from {releases}, {exact}",
    "claimed": "report {report_id} accepted with score {score}, claims {receipts}",
    "recorded": "report {report_id} with score {score} recorded, not to be trained",
    "pending": "report {report_id} pending, complete for the next batch",
    "waiting": "report {report_id} waiting",
    "reserved": "report {report_id} reserved in batch {batch_id}",
    "attempt_failed": "attempt {attempt} of batch {batch_id} failed",
    "aborted": "batch {batch_id} given up, report {report_id} pending again",
    "step_failed": "attempt {attempt} of batch {batch_id} failed, report {report_id} dropped",
    "dropped": "report {report_id} dropped",
    "trained": "report {report_id} trained in step {step}, as release {release_id}",
    "held": "release {release_id} held",
    "released": "release {release_id} released",
    "rejected": "release {release_id} rejected",
    "quarantined": "release {release_id} quarantined",
    "verified": "release {release_id} loaded and verified",
    "rolled_away": "release {release_id} left by {operation} {by}",
    "brought_back": "release {release_id} brought back by {operation} {by}",
    "deleted": "content of receipt {receipt_id} deleted",
}


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
    except BrokenPipeError:  # `reef releases | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
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
        ("why", _why, "The story of a receipt, a report or a release."),
        ("rollback", _rollback, "Weights, trainer and queue back to an earlier release."),
        ("promote", _promote, "Serve a release that is held, quarantined, or was left behind."),
    ):
        ask = command(name, run, text)
        ask.add_argument("--url", help="the service (default: the one of the configured run directory)")
        ask.add_argument("--json", action="store_true", help="print the answer as JSON")
        if name == "releases":
            ask.add_argument("scenario", nargs="?", help="default: the one that trains")
            ask.add_argument("--limit", type=int, default=20)
        if name == "why":
            ask.add_argument("id", help="a receipt (rcp_...), a report or a release")
        if name in ("rollback", "promote"):
            ask.add_argument("release", help="the release's id, as `reef releases` shows it")
            ask.add_argument("--scenario", help="default: the one that trains")
        if name == "promote":
            ask.add_argument("--force", action="store_true", help="though it was rejected by the gate")
    token = command("token", _token, "Make a key, and print it with the lines that configure it.")
    token.add_argument("name", help="for whom it is: letters, digits, '_' and '-'")
    token.add_argument(
        "--role", action="append", choices=ROLES, help="what it may do; again for one more (default: infer and report)"
    )
    token.add_argument("--scenario", action="append", help="bind it to this one; again for one more (default: all)")
    replay = command("replay", _replay, "Make a release again from the ledger and compare it with what was published.")
    replay.add_argument("scenario", nargs="?", help="default: the one that trains")
    replay.add_argument("--to", metavar="RELEASE", help="default: the head of the chain")
    replay.add_argument("--directory", type=Path, help="where to work; default: RUN-DIR-replay/RELEASE")
    export = command("export", _export, "Write a scenario's conversations out of the ledger, a line of JSON each.")
    export.add_argument("scenario")
    export.add_argument("--format", choices=("atif",), required=True, help="atif: Agent Trajectory Interchange Format")
    export.add_argument("--out", type=Path, metavar="FILE", help="default: standard output")
    doctor = command("doctor", _doctor, "Check this machine and the configuration, or the ledger.")
    doctor.add_argument("--ledger", action="store_true", help="check the whole ledger and what it names on disk")
    for asked in (serve, doctor):
        also = "" if asked is doctor else "with --dry-run: "
        asked.add_argument("--gpus", type=int, help=also + "check for a machine with so many GPUs, instead of this one")
        asked.add_argument(
            "--gpu-memory-gib", type=float, default=GPU_MEMORY_GIB, help="of each of them (default: %(default)g)"
        )
        asked.add_argument("--nodes", type=int, default=1, help="so many such machines in a Ray cluster (default: 1)")
    return parser


def _serve(arguments: argparse.Namespace, config: Config) -> int:
    from reef import checks

    if arguments.print_config:
        print(yaml.safe_dump(config.dump(), sort_keys=False), end="")
        return 0
    hardware = _hardware(arguments)
    if arguments.dry_run:
        checks.port(config, hardware)
        return _report(checks.dry_run(config, hardware))
    if hardware.simulated:
        raise ConfigError("--gpus is a question about another machine: it goes with --dry-run")
    for problem in checks.dry_run(config, hardware).problems:  # an estimate ends no start
        print(f"reef: warning: {problem}", file=sys.stderr, flush=True)
    import uvloop

    from reef.service.run import serve

    return uvloop.run(serve(config, lambda text: print(f"reef: {text}", flush=True)))


def _doctor(arguments: argparse.Namespace, config: Config) -> int:
    from reef import checks, machine

    if arguments.ledger:
        return 1 if checks.ledger(config, _say, _progress) else 0
    hardware = _hardware(arguments)
    print("\n".join([*machine.describe(), machine.describe_gpus(hardware)]))
    return _report(checks.doctor(config, hardware))


def _report(found: "Findings") -> int:
    """Print what was found; the exit status is that of a wrong configuration where something stands in the way."""
    print("\n".join(found.lines))
    for problem in found.problems:
        print(f"reef: {problem}", file=sys.stderr)
    return 2 if found.problems else 0


def _hardware(arguments: argparse.Namespace) -> "Hardware":
    """The devices that the configuration is for: of this machine, or as the flags describe another one."""
    from reef import machine

    if arguments.gpus is None:
        if (arguments.gpu_memory_gib, arguments.nodes) != (GPU_MEMORY_GIB, 1):
            raise ConfigError("--gpu-memory-gib and --nodes describe the machines of --gpus: give that too")
        return machine.hardware()
    return machine.simulated(arguments.gpus, arguments.gpu_memory_gib, arguments.nodes)


def _say(text: str) -> None:
    """A line of the answer, in place of the progress where that is shown."""
    _progress("")
    print(text, flush=True)


def _progress(text: str) -> None:
    """How far it is, for who watches: on one line of a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


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
        owner = f" {training['owner'] or 'nobody'}" if training["phase"] == "following" else ""
        print(f"trainer   {training['phase']}{owner}")
        if held := training["held"]:
            waits_for = ", ".join(held["missing"]) or "its verdict"
            print(f"held      {held['release_id']}, waiting for {waits_for}")
    for alarm in (scenario or {}).get("alarms", ()):
        print(f"alarm     {alarm['release_id']}: {alarm['message']}")
    several = sum(engine["role"] == "serving" for engine in status["engines"]) > 1
    for engine in status["engines"]:
        served = engine["release_id"] or "no release"
        name = f"engine {engine['index']}" if several else "engine"
        name = name if engine["role"] == "serving" else engine["role"]
        print(f"{name:<10}{engine['state']}, serves {served}, {engine['in_flight']} in flight")
    if training is not None and training["paused"]:
        print(f"paused    {training['paused']}; reef promote RELEASE, or reef rollback RELEASE, goes on")
    errors = (
        status["failure"],
        status["ledger"]["error"],
        training and training["error"] != training["paused"] and training["error"],
        training and training["held"] and training["held"]["error"],
        *(engine["error"] for engine in status["engines"]),
    )
    for error in filter(None, errors):
        print(f"error     {error}")
    return 0


def _releases(arguments: argparse.Namespace, config: Config) -> int:
    url = _url(arguments, config)
    name = arguments.scenario or _training_scenario(url, config)
    answer = _get(url, f"/reef/scenarios/{quote(name, safe='')}/releases?limit={arguments.limit}", config)
    if arguments.json:
        print(json.dumps(answer, indent=2))
        return 0
    print(f"{'':1} {'release':<14} {'step':>5} {'operation':<11} {'reward':>7} {'gap':>9} {'samples':>7}  created")
    for release in answer["releases"]:
        metrics = release["metrics"]
        created = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(release["created_at"]))
        print(
            f"{'*' if release['current'] else ' '} {release['release_id']:<14} {release['step']:>5} "
            f"{release['operation']:<11} {_figure(metrics.get('reward_mean'), '.3f'):>7} "
            f"{_figure(metrics.get('train_rollout_logprob_abs_diff'), '.1e'):>9} "
            f"{_figure(metrics.get('num_samples'), '.0f'):>7}  {created}{_notes(release)}"
        )
    return 0


def _notes(release: dict[str, Any]) -> str:
    """What is unusual about a release."""
    notes = []
    if release["source_release_id"]:
        notes.append(f"repeats {release['source_release_id']}")
    if release["state"] != "released":
        notes.append(f"{release['state']}: {release['reason']}" if release["reason"] else release["state"])
    elif release["reason"]:
        notes.append(release["reason"])
    if release["replay_diverged"]:
        notes.append("replay diverged")
    if release["num_deleted"]:
        notes.append(f"{release['num_deleted']} of its samples were deleted")
    notes += [f"alarm: {alarm['message']}" for alarm in release["alarms"]]
    return f"  {'; '.join(notes)}" if notes else ""


def _why(arguments: argparse.Namespace, config: Config) -> int:
    url = _url(arguments, config)
    try:
        receipt = _get(url, f"/reef/receipts/{quote(arguments.id, safe='')}", config)
        ids = receipt["reports"]
    except NotFoundError:
        receipt, ids = None, [arguments.id]
    try:
        stories = [_get(url, f"/reef/reports/{quote(report_id, safe='')}", config) for report_id in ids]
    except NotFoundError:
        return _why_release(arguments, url, config)
    if arguments.json:
        print(json.dumps({"receipt": receipt, "reports": stories}, indent=2))
        return 0
    for event in (receipt or stories[0])["history"]:
        print(_told(event))
    if not stories:
        print("no report references it")
    return 0


def _why_release(arguments: argparse.Namespace, url: str, config: Config) -> int:
    """What made a release, and what is known of it by now. Raises NotFoundError: the id is that of nothing."""
    try:
        name = _training_scenario(url, config)
        route = f"/reef/scenarios/{quote(name, safe='')}/releases/{quote(arguments.id, safe='')}"
        release = _get(url, route, config)
    except NotFoundError:
        raise NotFoundError(f"no receipt, no report and no release {arguments.id}") from None
    if arguments.json:
        print(json.dumps({"release": release}, indent=2))
        return 0
    made, metrics, release_id = release["operation"], release["metrics"], release["release_id"]
    of = f" of batch {release['batch_id']}" if release["batch_id"] else ""
    print(f"{_at(release['created_at'])}  release {release_id} made by {made}{of}, step {release['step']}")
    if metrics:
        shown = (f"{key} {_figure(metrics.get(key), '.4g')}" for key in ("reward_mean", "response_length_mean"))
        print(f"{_at(None)}  its batch: {', '.join(shown)}")
    if release["verified_at"] is not None:
        print(f"{_at(release['verified_at'])}  release {release_id} loaded and verified")
    for result in release["evaluations"]:
        print(f"{_at(None)}  held-out result: {json.dumps(result)}")
    for alarm in release["alarms"]:
        print(f"{_at(None)}  alarm: {alarm['message']}")
    if notes := _notes({**release, "alarms": []}):
        print(f"{_at(None)}{notes}")
    return 0


def _at(when: float | None) -> str:
    """A column of local times; blank where nobody knows."""
    return " " * 19 if when is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when))


def _told(event: dict[str, Any]) -> str:
    """One event of a story as one line: when (local time; blank where nobody knows), what, why."""
    details = {name: ", ".join(value) if isinstance(value, list) else value for name, value in event.items()}
    details["exact"] = "exact" if event.get("exact") else "not exact"
    why = event.get("reason") or event.get("error")
    return f"{_at(event['at'])}  {EVENTS[event['event']].format_map(details)}{f': {why}' if why else ''}"


def _rollback(arguments: argparse.Namespace, config: Config) -> int:
    return _move(arguments, config, "rollback", {"release_id": arguments.release})


def _promote(arguments: argparse.Namespace, config: Config) -> int:
    return _move(arguments, config, "promote", {"release_id": arguments.release, "force": arguments.force})


def _move(arguments: argparse.Namespace, config: Config, how: str, body: dict[str, Any]) -> int:
    url = _url(arguments, config)
    name = arguments.scenario or _training_scenario(url, config)
    release = _ask(url, f"/reef/scenarios/{quote(name, safe='')}/{how}", config, body, timeout_s=None)
    if arguments.json:
        print(json.dumps(release, indent=2))
        return 0
    print(f"head is {release['release_id']} ({release['operation']}), step {release['step']}, {release['state']}")
    return 0


def _token(arguments: argparse.Namespace, config: Config) -> int:
    key = keys.new_key()
    entry = {"name": arguments.name, "hash": keys.hash_of(key), "roles": arguments.role or ["infer", "report"]}
    if arguments.scenario:
        entry["scenarios"] = arguments.scenario
    known = [other.model_dump(mode="json") for other in config.reef.tokens]
    load(None, ["--reef.tokens", json.dumps([*known, entry])], {})  # refuses what could not be configured
    print(f"{key}\n")
    print("The key is shown this once. Send it as `Authorization: Bearer KEY`. The configuration keeps its hash:\n")
    print(yaml.safe_dump({"reef": {"tokens": [entry]}}, sort_keys=False), end="")
    return 0


def _replay(arguments: argparse.Namespace, config: Config) -> int:
    from reef import replay

    signal.signal(signal.SIGINT, signal.default_int_handler)  # its workers are to be ended
    return replay.run(
        config, arguments.scenario, arguments.to, arguments.directory, lambda text: print(text, flush=True)
    )


def _export(arguments: argparse.Namespace, config: Config) -> int:
    from reef import export

    if arguments.out is None:
        export.atif(config, arguments.scenario, sys.stdout.buffer, _progress)
        sys.stdout.flush()
        _progress("")
        return 0
    partial = arguments.out.with_name(f"{arguments.out.name}.partial")  # what has the name is whole
    try:
        with partial.open("wb") as file:
            count = export.atif(config, arguments.scenario, file, _progress)
        partial.rename(arguments.out)
    except OSError as error:
        raise ReefError(f"cannot write {arguments.out}: {error.strerror}") from None
    finally:
        partial.unlink(missing_ok=True)
    _say(f"{count} conversations in {arguments.out}")
    return 0


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
    return _ask(url, path, config)


def _ask(
    url: str, path: str, config: Config, body: dict[str, Any] | None = None, timeout_s: float | None = TIMEOUT_S
) -> Any:
    """The JSON answer to a GET, or to a POST where there is a body."""
    headers = {"content-type": "application/json"}
    if (key := _key(url, config)) is not None:
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url + path, data, headers)
        with _opener(url).open(request, timeout=timeout_s) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        message = _message(error, url)
        if error.code == 401:
            message += f"; commands send --reef.token, else REEF_API_KEY, else {config.reef.run_dir / keys.FILE}"
        raise (NotFoundError if error.code == 404 else ReefError)(message) from None
    except urllib.error.URLError as error:
        raise UnavailableError(f"no service answers at {url}: {error.reason}") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise UnavailableError(f"{url} does not answer as Reef does: {error!r}") from None


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Asks a service on this machine itself, and never through a proxy of the environment, which would get the key."""
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if _is_here(url) else []))


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in LOOPBACK


def _key(url: str, config: Config) -> str | None:
    """The key to ask with. That of the run directory goes to no other machine."""
    if config.reef.token is not None:
        return config.reef.token.get_secret_value()
    if key := os.environ.get("REEF_API_KEY"):
        return key
    return keys.read_file(config.reef.run_dir / keys.FILE) if _is_here(url) else None


def _message(error: urllib.error.HTTPError, url: str) -> str:
    with error:
        try:
            return str(json.load(error)["error"]["message"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return f"{url} does not answer as Reef does: HTTP status {error.code}"

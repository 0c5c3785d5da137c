"""Writes docs/performance.md from work/bench/*.json: each figure there was printed by a command here."""

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.common import RESULTS, ROOT

PAGE = ROOT / "docs" / "performance.md"
HEAD = """# Performance

Written by `make bench` (about half an hour, on an otherwise idle machine); do not edit. Every figure stands
beside its reference from the same run. Machine: {machine}.
"""
TRL_TITLE = "\n## Beside TRL\n"  # the last section: that bench has a venv of its own and runs by itself
TRL_HEAD = ["Model, seed", "Gain", "TRL, s", "TRL, rollouts", "Reef, s", "Reef, rollouts", "Reef / TRL"]
TRL_HEAD += ["TRL then", "Reef then"]


def read(name: str) -> Any:
    """A benchmark's result."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    cells = [list(head), ["---"] * len(head), *([str(cell) for cell in line] for line in lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells) + "\n"


def demo() -> str:
    seeds = read("demo")["seeds"]
    lines = [
        (
            seed["seed"],
            f"{seed['accuracy_before']:.3f} ({seed['interval_before'][0]:.3f}–{seed['interval_before'][1]:.3f})",
            f"{seed['accuracy_after']:.3f} ({seed['interval_after'][0]:.3f}–{seed['interval_after'][1]:.3f})",
            f"{seed['accuracy_after'] - seed['accuracy_before']:+.3f}",
            seed["releases"],
            seed["rollouts"],
            f"{seed['wall_clock_s']:.0f}",
        )
        for seed in seeds
    ]
    head = ["Seed", "Before (95% interval)", "After (95% interval)", "Gain", "Releases", "Rollouts", "Seconds in all"]
    return (
        "\n## The demo\n\nHeld-out accuracy on 1,000 problems that training never draws, one answer each at\n"
        "temperature 1. The headroom is a planted habit:\n"
        "see [the starter's card](../recipes/arithmetic/starter/README.md).\n"
        "Seconds are those of the whole command, start and evaluation included (`python -m benchmarks.demo`).\n\n"
        + rows(head, lines)
    )


def loop() -> str:
    found = read("loop")
    seconds = found["seconds"]
    memory = [(name, size) for name, size in found["rss_mib"].items()]
    return (
        "\n## The loop\n\n"
        f"Median seconds of {found['releases']} releases of {found['samples_per_release']} samples, one batch at a\n"
        "time (`python -m benchmarks.loop`). Client's side: sample, grade, report, train and load, whole; the rest is\n"
        "the service's. The client shares the two cores.\n\n"
        + rows(["Phase", "Seconds"], [(phase, f"{value:.4f}") for phase, value in seconds.items()])
        + f"\n`/healthz` p99: {found['healthz_idle_p99_ms']} ms idle, {found['healthz_busy_p99_ms']} ms in the loop\n"
        f"(steps and loads included). Ready {found['ready_in_s']} s after the start. Resident memory, shared pages\n"
        "counted in each process:\n\n" + rows(["Process", "MiB"], memory)
    )


def gateway() -> str:
    found = read("gateway")
    names = ("stub_rps", "skeleton_rps", "rps", "share", "skeleton_added_p50_ms", "added_p50_ms", "added_p99_ms")
    lines = [(clients, *(found[f"{name}_{clients}"] for name in names)) for clients in (1, 32, 128)]
    head = ["Clients", "Stub alone, requests/s", "Skeleton, requests/s", "Reef, requests/s", "Reef / skeleton"]
    head += ["Skeleton: added p50, ms", "Reef: added p50, ms", "Reef: added p99, ms"]
    return (
        "\n## The gateway\n\nChat completions, no two alike, through the record-only service to a stub engine that\n"
        "answers at once, beside the stub alone and beside a bare skeleton: FastAPI, one call to the engine, one row\n"
        "(`make bench-gateway`). Every answer has a durable receipt, so requests/s are receipts/s. Load generator and\n"
        "stub share the two cores with the service; the three take turns.\n\n" + rows(head, lines)
    )


def engine() -> str:
    found = read("engine")
    lines = [
        (
            row["concurrency"],
            round(row["embedded"]),
            round(row["sglang"]),
            round(row["generate"]),
            f"{row['embedded'] / row['generate']:.2f}",
            f"{row['sglang'] / row['generate']:.2f}",
        )
        for row in found["rows"]
    ]
    head = ["Concurrency", "Embedded", "SGLang", "`generate`", "Embedded / `generate`", "SGLang / `generate`"]
    return (
        "\n## The engines\n\nNew tokens/s on the starter model, the embedded engine and SGLang over HTTP, both\n"
        "without a GPU, beside transformers' `generate` in process on a fixed batch of the same size\n"
        "(`python -m benchmarks.engine`).\n\n" + rows(head, lines)
    )


def step() -> str:
    lines = [
        (
            f"{case['case']}, {case['threads']} threads",
            f"{case['plain_step_s'] * 1000:.1f}",
            f"{case['megatron_step_s'] * 1000:.1f}",
            f"{case['ratio']:.2f}",
        )
        for case in read("step")
    ]
    head = ["Case", "Plain PyTorch, ms", "Megatron, ms", "Ratio"]
    return (
        "\n## One step\n\nA GRPO step through Megatron-Core beside a plain PyTorch step: transformers' model and\n"
        "torch's AdamW on the same batch with the same threads (`python -m benchmarks.step`).\n\n" + rows(head, lines)
    )


def publish() -> str:
    found = read("publish")
    lines = [
        (
            row["server"],
            row["transport"],
            *(f"{row[name]:.3f}" for name in ("pause_s", "transfer_s", "verify_s", "read_s")),
            f"{row['ratio']:.2f}",
        )
        for row in found["loads"]
    ]
    head = ["Engine", "Transport", "Pause, s", "of it transfer, s", "Verify, s", "Reading the file, s", "Pause / read"]
    return (
        f"\n## From the trainer to the engine\n\nA release of {found['parameters'] / 1e6:.0f}M parameters in float32 "
        f"({found['size_bytes'] / 1e6:.0f} MB), written by one Megatron\n"
        f"worker in {found['publish_s']:.2f} s, then read by an engine, or sent to it over gloo. The reference is the\n"
        "time to read its file into memory in the same run (`python -m benchmarks.publish`).\n\n" + rows(head, lines)
    )


def checkpoint() -> str:
    found = read("checkpoint")
    lines = [
        ("written while training stands still (the reference)", f"{found['whole_s']:.3f}"),
        ("begun: training stands still", f"{found['begin_s']:.3f}"),
        ("finished between two later steps: training stands still", f"{found['finish_s']:.3f}"),
        ("a step", f"{found['step_s']:.3f}"),
        ("a step while it is written", f"{found['step_meanwhile_s']:.3f}"),
    ]
    return (
        f"\n## A checkpoint\n\nOf {found['parameters'] / 1e6:.0f}M parameters, "
        f"{found['checkpoint_bytes'] / 1e6:.0f} MB (`python -m benchmarks.checkpoint`).\n\n"
        + rows(["What", "Seconds"], lines)
    )


def ledger() -> str:
    found = read("ledger")
    small, large = (f"{size:,}" for size in found["receipts"])
    disk = found["disk"]
    lines = [
        (name, *(f"{value:.3f}" for value in values), f"{found['ratio'][name]:.2f}")
        for name, values in found["median_ms"].items()
    ]
    return (
        f"\n## The ledger\n\nMedian milliseconds with {small} receipts and with {large}; as many reports\n"
        "wait in both, and the answers are as long. The two take turns (`make bench-ledger`).\n\n"
        + rows(["Question", f"{small} receipts, ms", f"{large} receipts, ms", "Ratio"], lines)
        + f"\nA sampled token takes {disk['bytes_per_sampled_token']:.0f} bytes, for id and log-probability;\n"
        f"one of a prompt 4, shared by its {found['choices']} choices. With all else, indices included, the file has\n"
        f"{disk['file_bytes_per_token']:.0f} bytes a token, {disk['file_bytes_per_receipt']:.0f} a receipt of "
        f"{found['output_tokens']} sampled tokens with its report and its place in\n"
        f"a batch. `reef doctor --ledger` reads the larger one in {found['audit_s'][-1]:.0f} s.\n"
    )


def trl_lines(runs: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A line for each run and gain; a dash where a side did not reach it, or had ended before."""

    def cells(point: dict[str, Any] | None) -> tuple[str, str]:
        return (f"{point['seconds']:.1f}", f"{point['rollouts']:,}") if point else ("–", "–")

    def number(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    return [
        (
            f"{run['model']}, {run['seed']}",
            f"+{gain}",
            *cells(found["trl"]),
            *cells(found["reef"]),
            number(found["ratio"], ".2f"),
            number(found["trl"] and found["trl"]["accuracy"], ".3f"),
            number(found["reef_accuracy_at_trl_seconds"], ".3f"),
        )
        for run in runs
        for gain, found in run["gains"].items()
    ]


def trl() -> str:
    found = read("trl")
    runs = found["runs"]
    models = {run["model"]: [other for other in runs if other["model"] == run["model"]] for run in runs}
    steps = [
        (model, *(f"{median(run['step_s'][side] for run in of):.3f}" for side in ("trl", "reef")))
        for model, of in models.items()
    ]
    where = [
        (model, name, f"{median(run[kind].get(name, 0.0) for run in of):.3f}")
        for model, of in models.items()
        for kind in ("phases", "cpu_s_per_release")
        for name in of[0][kind]
    ]
    grown = " 5M is the\nstarter grown to 4.8M parameters that change nothing at first." if "5M" in models else ""
    return (
        f"{TRL_TITLE}\nGRPO by TRL's GRPOTrainer in one process (float32, no gradient checkpointing, no vLLM) and by\n"
        "the whole service: HTTP, a durable receipt for every answer, Ray, Megatron, a release for every step. Same\n"
        "model, prompts, grader, 8 x 8 samples a step, loss, learning rate. Wall clock and rollouts are those from\n"
        f"the first rollout to a gain in held-out accuracy ({found['problems']:,} problems, measured after the run,\n"
        f"every {found['every']} steps; –: not within {found['steps']}); then both accuracies at the moment when TRL\n"
        f"had reached it (`make bench-trl`).{grown}\n\n"
        + rows(TRL_HEAD, trl_lines(runs))
        + "\n"
        + rows(["Model", "TRL, s a step", "Reef, s a release"], steps)
        + "\nWhere Reef's time goes, for one release: seconds by phase of the training loop (rollouts go on\n"
        "meanwhile), then processor seconds by process (the client too).\n\n"
        + rows(["Model", "What", "Seconds"], where)
    )


def with_trl(page: str, section: str) -> str:
    """The page with this for its TRL section, the last one."""
    return page.partition(TRL_TITLE)[0] + section


def put_trl() -> None:
    """Write the TRL section anew and leave the rest of the page."""
    PAGE.write_text(with_trl(PAGE.read_text(encoding="utf-8"), trl()), encoding="utf-8")


def main() -> None:
    machine = read("loop")["machine"]
    text = f"{machine['cores']} cores, no GPU, {machine['platform']}, Python {machine['python']}"
    parts = (demo, loop, gateway, ledger, engine, step, publish, checkpoint)
    _, title, kept = PAGE.read_text(encoding="utf-8").partition(TRL_TITLE)
    page = HEAD.format(machine=text) + "".join(part() for part in parts)
    PAGE.write_text(with_trl(page, title + kept), encoding="utf-8")
    print(f"written: {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

"""A run whose traffic is frozen: the receipts lie in its ledger before it first starts, and only grades are posted.

Batches then follow from the order of the reports alone, and on a CPU so does every bit of what is trained: two runs
over a copy of one frozen directory must give the same chain, whoever was killed in between.
"""

from __future__ import annotations

import asyncio
import io
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from sqlalchemy import Connection, update

from reef.ledger import receipts, releases, scenarios
from reef.ledger.ledger import Ledger
from reef.ledger.schema import meta
from reef.training.manifest import content_id_of
from reef.types import FinishReason, Generation, Operation, Release, Request, Sampling, Span
from tests.conftest import STARTER

RUN_ID = "f0f0"
SCENARIO = "frozen"
GROUP, GROUPS = 2, 2
BATCH = GROUP * GROUPS
PROMPT_TOKENS, SAMPLED_TOKENS = 6, 8
CHECKPOINT_EVERY = 3
SETTINGS = (
    *("--recipe.scenario", SCENARIO),
    *("--recipe.config.group-size", str(GROUP)),
    *("--recipe.config.batch-size", str(BATCH)),
    *("--recipe.config.max-staleness", "100000"),
    *("--recipe.config.group-deadline-s", "100000"),
    *("--training.options.lr", "1e-5"),
    *("--training.threads", "1"),
    *("--training.checkpoint-every", str(CHECKPOINT_EVERY)),
    *("--training.micro-batch-tokens", str(2 * (PROMPT_TOKENS + SAMPLED_TOKENS))),  # two microbatches a batch
)
RETRY_S = 0.02


def release_id(number: int) -> str:
    return f"{RUN_ID}-{number:06d}"


BASE = release_id(0)


def freeze(run_dir: Path, num_batches: int) -> None:
    """Make a run directory with the receipts of so many batches."""
    run_dir.mkdir(parents=True)
    prompts, sampled, logprobs = _sample(num_batches * GROUPS)

    def fill(connection: Connection) -> None:
        connection.execute(update(meta).where(meta.c.key == "run_id").values(value=RUN_ID))
        scenarios.create(connection, SCENARIO, "grpo", 0.0)
        releases.append(connection, _base())
        for group, prompt in enumerate(prompts):
            request = Request(
                id=f"req-{group}",
                scenario=SCENARIO,
                api="completions",
                prompt_ids=prompt,
                sampling=Sampling(max_tokens=SAMPLED_TOKENS),
                n=GROUP,
                body=b"{}",
                created_at=0.0,
            )
            generations = [
                Generation(sampled[i], logprobs[i], FinishReason.LENGTH, (Span(0, SAMPLED_TOKENS, BASE),))
                for i in range(group * GROUP, (group + 1) * GROUP)
            ]
            made = [
                receipts.make(request, choice, generation, "frozen", f"rcp-{group * GROUP + choice}", 0.0)
                for choice, generation in enumerate(generations)
            ]
            receipts.record(connection, request, made)

    ledger = Ledger.open(f"sqlite:///{run_dir / 'ledger.db'}")
    try:
        asyncio.run(ledger.write(fill))
    finally:
        ledger.close()


def _base() -> Release:
    return Release(
        id=BASE,
        scenario=SCENARIO,
        number=0,
        parent=None,
        content_id=content_id_of(STARTER),
        operation=Operation.BASE,
        policy_version=0,
        step=0,
        batch_id=None,
        path=str(STARTER),
        checkpoint=None,
        restorable=True,
        created_at=0.0,
    )


def _sample(num_groups: int) -> tuple[Any, Any, Any]:
    """Prompts [groups, P], answers to them [groups * GROUP, N], and the starter's log-probabilities of the answers.

    All ids are drawn evenly: the starter itself would often say the same twice, and such a group moves no weight.
    """
    import torch  # here, as below: fast tests are collected beside this file
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(STARTER).eval()
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.config.vocab_size, (num_groups, PROMPT_TOKENS), generator=random)
    answers = torch.randint(model.config.vocab_size, (num_groups * GROUP, SAMPLED_TOKENS), generator=random)
    ids = torch.cat([prompts.repeat_interleave(GROUP, dim=0), answers], dim=1)
    with torch.no_grad():
        logits = model(ids).logits[:, PROMPT_TOKENS - 1 : -1].float()
    logprobs = torch.log_softmax(logits, dim=-1).gather(2, answers[..., None])[..., 0]
    return prompts.numpy().astype(np.int32), answers.numpy().astype(np.int32), logprobs.numpy()


def report(number: int) -> dict[str, Any]:
    """The body of the report of receipt `number`; scores within a group differ."""
    return {
        "agent_record_id": report_id(number),
        "references": [f"rcp-{number}"],
        "score": float(number % GROUP) + 0.25 * (number % 3),
        "group": f"group-{number // GROUP}",
    }


def report_id(number: int) -> str:
    return f"rep-{number:06d}"


class Grader:
    """Posts the reports in their order, each again and again until it is acknowledged, in a thread of its own."""

    def __init__(self) -> None:
        self.url: str | None = None  # of the service; None while nobody knows it
        self.num_acknowledged = 0
        self.refused: str | None = None  # an answer that no retry mends
        self._goal = 0
        self._client = httpx.Client(timeout=120)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="grader", daemon=True)
        self._thread.start()

    def post(self, num_batches: int) -> None:
        """Go on until the reports of so many batches, counted from the beginning, are acknowledged."""
        self._goal = num_batches * BATCH

    def close(self) -> None:
        self._ended.set()
        self._thread.join(10)
        self._client.close()

    def _run(self) -> None:
        while not self._ended.is_set() and self.refused is None:
            if self.num_acknowledged == self._goal or not self._acknowledged(report(self.num_acknowledged)):
                time.sleep(RETRY_S)
            else:
                self.num_acknowledged += 1

    def _acknowledged(self, body: dict[str, Any]) -> bool:
        url = self.url
        if url is None:
            return False
        try:
            answer = self._client.post(f"{url}/reef/report", json=body)
        except httpx.HTTPError:
            return False
        if answer.status_code not in (200, 503):
            self.refused = f"{body['agent_record_id']}: {answer.status_code} {answer.text}"
        return answer.status_code == 200


class LedgerFile:
    """What another process sees in a run directory's ledger."""

    def __init__(self, run_dir: Path) -> None:
        self._uri = f"file:{run_dir / 'ledger.db'}?mode=ro"

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self._uri, uri=True, timeout=30)) as connection:
            return connection.execute(query, values).fetchall()

    def head(self) -> str:
        """The newest release."""
        return str(self.rows("select id from releases order by number desc limit 1")[0][0])

    def contents(self) -> list[str]:
        """Content ids, the base's first; the release of number n is at position n."""
        return [content for (content,) in self.rows("select content_id from releases order by number")]

    def trained(self) -> list[str]:
        """Reports in the order in which the chain was trained on them."""
        query = (
            "select s.report_id from releases r join batches b on b.id = r.batch_id and b.state = 'committed' "
            "join batch_samples s on s.batch_id = b.id where s.trains order by r.number, s.position"
        )
        return [name for (name,) in self.rows(query)]

    def states(self) -> dict[str, int]:
        """Reports by state."""
        return dict(self.rows("select state, count(*) from reports group by state"))

    def attempt(self) -> int:
        """The attempt that a reserved batch is in; 0: none is reserved."""
        found = self.rows("select attempt from batches where state = 'reserved'")
        return int(found[0][0]) if found else 0


def differences(found: Path, expected: Path) -> list[str]:
    """What two trainer checkpoints do not share, bit by bit: weights, moments, steps, random state."""
    a, b = _load(found), _load(expected)
    names = sorted(a.keys() ^ b.keys())
    return names + [name for name in sorted(a.keys() & b.keys()) if a[name] != b[name]]


def _load(checkpoint: Path) -> dict[str, Any]:
    import torch
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    _load_state_dict(state, FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    common = torch.load(checkpoint / "common.pt", weights_only=False)
    return dict(_leaves({"sharded": state, "common": common}))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of a nested state by its dotted name, tensors as (dtype, shape, bytes)."""
    import torch

    if isinstance(value, io.BytesIO):
        value = torch.load(value, weights_only=False)
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{name}[{index}]")
    elif isinstance(value, torch.Tensor):
        yield name, (value.dtype, tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
    else:
        yield name, value

"""The engines that serve: who answers which request, and loads into several of them at once."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from aiohttp import web

import reef.engines.lent as lent
import reef.engines.pool as pool
import reef.engines.replica as replica
from reef.engines.host import EngineHost
from reef.engines.pool import Engines
from reef.errors import ConfigError, ConflictError, EngineError, LoadFailedError, UnavailableError
from reef.observe import Metrics
from reef.types import Probe

pytestmark = pytest.mark.slow  # engines and services of its own

PROMPT = [1, 294, 201, 20, 13, 21, 31, 2, 201, 1, 298, 297, 201]
PROBE = Probe((4, 5, 6), (-1.0, -1.0))  # what a FakeEngine scores
WRONG = Probe((4, 5, 6), (-1.0, -1.1))


@pytest.fixture(scope="module")
def ask(generate):
    """`await ask(engines, session, release, max_tokens=12)`: one greedy answer of whoever is given the request."""

    async def run(engines, session=None, release=None, **options):
        async with engines.acquire(session, release) as client:
            return await generate(client, **options)

    return run


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def value(counter) -> float:
    return counter._value.get()


# --- the real engine --------------------------------------------------------------------------------------------------


class Real:
    """Two real embedded engines, in an event loop that lives as long as the module."""

    def __init__(self, config, published, starter) -> None:
        self.published = published
        self.starter = starter
        self.metrics = Metrics()
        self.runner = asyncio.Runner()
        self.config = config
        self.engines = self.run(self._make())

    async def _make(self):
        return Engines(self.config, self.metrics)

    def run(self, work):
        return self.runner.run(work)

    def load(self, release_id, probe=None, path=None):
        self.run(self.engines.load(self.published(release_id, path or self.starter, probe)))

    def probe(self) -> Probe:
        async def score():
            async with self.engines.acquire() as client:
                return await client.score(PROMPT)

        return Probe(tuple(PROMPT), tuple(self.run(score()).tolist()))

    def releases(self) -> list[str | None]:
        return [engine["release_id"] for engine in self.engines.describe()]


@pytest.fixture(scope="module")
def real(tmp_path_factory, config, published, starter):
    settings = ["--inference.replicas", "2", "--inference.context-length", "500"]
    directory = tmp_path_factory.mktemp("real")
    real = Real(config(directory, "--inference.model-path", str(starter), *settings), published, starter)
    try:
        real.run(real.engines.start(published("r0", starter)))
        yield real
    finally:
        real.run(real.engines.stop())
        real.runner.close()


def test_replicas_serve_the_release_they_were_started_with_and_have_files_of_their_own(real, ask) -> None:
    for index, seen in enumerate(real.engines.describe()):
        assert (seen["role"], seen["index"]) == ("serving", index)
        assert (seen["state"], seen["release_id"], seen["error"], seen["in_flight"]) == ("ready", "r0", None, 0)
        assert psutil.Process(seen["pid"]).is_running()
        assert seen["build"].startswith("reef-embedded")
        assert (real.config.logs_dir / f"engine-{index}.log").exists()
    assert len(set(real.engines.pids())) == 2
    assert real.engines.context_length == 500
    assert real.engines.build.startswith("reef-embedded")
    assert real.run(ask(real.engines)).spans[0].release_id == "r0"


def test_the_very_same_weights_loaded_change_no_greedy_answer_and_agree_with_the_probe(real, ask) -> None:
    before, probe, pids = real.run(ask(real.engines)), real.probe(), real.engines.pids()
    real.load("r1", probe)
    after = real.run(ask(real.engines))
    assert after.output_ids.tolist() == before.output_ids.tolist()
    assert np.abs(after.logprobs - before.logprobs).max() < 1e-4
    assert after.spans[0].release_id == real.engines.served == "r1"
    assert real.releases() == ["r1", "r1"]
    assert real.engines.pids() == pids


def test_requests_that_wait_for_a_load_are_answered_by_the_new_release(real, ask) -> None:
    async def both():
        running = [asyncio.create_task(ask(real.engines, max_tokens=200)) for _ in range(4)]
        await until(lambda: [engine["in_flight"] for engine in real.engines.describe()] == [2, 2])
        loading = asyncio.create_task(real.engines.load(real.published("r2", real.starter)))
        await asyncio.sleep(0)
        assert real.engines.state == "loading"
        waiting = [asyncio.create_task(ask(real.engines)) for _ in range(4)]
        await loading
        return [await task for task in running], [await task for task in waiting]

    running, waiting = real.run(both())
    for generation in running:
        assert generation.spans[-1].end == 200  # every token has its release
        assert {span.release_id for span in generation.spans} <= {"r1", "r2"}
    assert all(generation.spans[0].release_id == "r2" for generation in waiting)


def test_a_probe_that_was_not_known_at_the_start_can_be_checked_later(real) -> None:
    served, good = real.engines.served, real.probe()
    real.run(real.engines.verify(real.published(served, real.starter, good)))
    wrong = Probe(good.ids, tuple(value - 0.5 for value in good.logprobs))
    with pytest.raises(LoadFailedError, match=r"engine-1: .*differ by 0\.5 on the probe of"):
        real.run(real.engines.verify(real.published(served, real.starter, wrong)))
    with pytest.raises(LoadFailedError, match="expected another"):
        real.run(real.engines.verify(real.published("another", real.starter)))


def test_an_engine_killed_in_the_middle_is_restarted_with_the_release_it_served_while_the_other_answers(
    real, ask, monkeypatch
) -> None:
    real.load("r3")
    restarts = value(real.metrics.engine_restarts)

    async def kill():
        may_start, start = asyncio.Event(), EngineHost.start

        async def later(host, *arguments):
            await may_start.wait()
            return await start(host, *arguments)

        monkeypatch.setattr(EngineHost, "start", later)
        running = [asyncio.create_task(ask(real.engines, "doomed", max_tokens=450)) for _ in range(2)]
        await until(lambda: any(engine["in_flight"] == 2 for engine in real.engines.describe()))
        (doomed,) = [engine for engine in real.engines.describe() if engine["in_flight"] == 2]
        os.kill(doomed["pid"], signal.SIGKILL)
        for task in running:
            with pytest.raises(EngineError):  # it was in the engine that died
                await task
        await until(lambda: real.engines.describe()[doomed["index"]]["state"] == "restarting")
        assert "ended with -9" in real.engines.describe()[doomed["index"]]["error"]
        assert real.engines.state == "ready"
        assert (await ask(real.engines, "doomed")).spans[0].release_id == "r3"
        assert real.engines.describe()[doomed["index"]]["state"] == "restarting"
        may_start.set()
        await until(lambda: real.engines.describe()[doomed["index"]]["state"] == "ready")
        return doomed["pid"]

    pid = real.run(kill())
    assert pid not in real.engines.pids()
    assert real.releases() == ["r3", "r3"]
    assert value(real.metrics.engine_restarts) == restarts + 1


def test_a_candidate_is_an_engine_of_its_own_with_another_release(real, ask) -> None:
    real.run(real.engines.start_candidate(real.published("trial", real.starter, real.probe()), 1.0))
    serving, candidate = real.engines.describe()[:2], real.engines.describe()[2]
    assert [engine["release_id"] for engine in serving] == ["r3", "r3"]
    assert (candidate["role"], candidate["state"], candidate["release_id"]) == ("candidate", "ready", "trial")
    assert (real.config.logs_dir / "engine-candidate.log").exists()
    assert len(set(real.engines.pids())) == 3
    assert real.run(ask(real.engines)).spans[0].release_id == "trial"
    assert real.run(ask(real.engines, release="r3")).spans[0].release_id == "r3"
    real.engines.end_trial()
    assert real.run(ask(real.engines)).spans[0].release_id == "r3"
    real.run(real.engines.start_candidate(real.published("second", real.starter, real.probe()), 0.0))
    assert real.engines.describe()[2]["pid"] == candidate["pid"]  # it stays, for the next one
    assert real.run(ask(real.engines, release="second")).spans[0].release_id == "second"
    real.engines.end_trial()


def test_a_release_that_disagrees_with_its_probe_everywhere_is_refused_and_a_good_one_opens_the_gate(real, ask) -> None:
    good, pids = real.probe(), [engine["pid"] for engine in real.engines.describe() if engine["role"] == "serving"]
    wrong = Probe(good.ids, tuple(value - 0.5 for value in good.logprobs))
    with pytest.raises(LoadFailedError, match=r"release bad does not load: engine-0: .*differ by 0\.5.*; engine-1: "):
        real.load("bad", wrong)
    assert real.engines.state == "failed"
    assert real.engines.served == "r3"
    assert not any(psutil.pid_exists(pid) for pid in pids)  # they were restarted
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"engine-0 is failed .*differ by 0\.5") as refused:
        real.run(ask(real.engines))
    assert refused.value.retry_after_s is not None
    assert time.monotonic() - started < 20  # at once: nothing will open by waiting
    real.load("good", good)
    assert real.run(ask(real.engines)).spans[0].release_id == real.engines.served == "good"


def test_stop_ends_the_processes_and_answers_nobody(real, ask) -> None:  # the last one of `real`
    pids = real.engines.pids()
    real.run(real.engines.stop())
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert real.engines.pids() == []
    with pytest.raises(UnavailableError, match="stopped"):
        real.run(ask(real.engines))
    real.run(real.engines.stop())  # once more is nothing


def test_an_engine_that_cannot_start_says_why_with_the_end_of_its_log(tmp_path, config, published, starter) -> None:
    damaged = shutil.copytree(starter, tmp_path / "damaged")
    (damaged / "config.json").unlink()

    async def run():
        engines = Engines(config(tmp_path), Metrics())
        with pytest.raises(EngineError, match=r"(?s)engine-0 ended with 2.*config\.json"):
            await engines.start(published("r0", damaged))
        await engines.stop()

    asyncio.run(run())


# --- engines that fail on demand --------------------------------------------------------------------------------------


@pytest.fixture
def with_fakes(tmp_path, config, published, fake_hosts):
    """Run `work(engines, hosts)` over two replicas whose servers are fakes, started with release r0."""

    def run(work, *settings, prepare=lambda hosts: None):
        async def main():
            settled = config(tmp_path, "--inference.replicas", "2", *settings)
            engines = Engines(settled, Metrics(), fake_hosts.__getitem__)
            prepare(fake_hosts)
            try:
                async with asyncio.timeout(120):
                    await engines.start(published("r0"))
                    await work(engines, fake_hosts)
            finally:
                await engines.stop()

        asyncio.run(main())

    return run


def refuses(http, body):
    return web.Response(status=500, text="no memory")


def states(engines) -> list[tuple[str, str | None]]:
    return [(engine["state"], engine["release_id"]) for engine in engines.describe()]


def answers(hosts, name="engine-0") -> int:
    """How many requests the servers of a replica have had, probes not counted."""
    calls = [call for engine in hosts[name].engines for call in engine.calls]
    return sum(route == "/generate" and body["sampling_params"]["max_new_tokens"] > 0 for route, body in calls)


def disagree(engine) -> None:
    engine.answers["/generate"] = lambda http, body: web.Response(status=500, text="no agreement")


def loads_something_else(http, body):
    return {"success": True}


# Ways in which a load fails on one replica, its restart included.


def by_a_refusal(host):
    host.engine.answers["/update_weights_from_disk"] = refuses


def by_other_weights(host):
    host.engine.answers["/update_weights_from_disk"] = loads_something_else


def by_a_hang(host):
    host.engine.answers["/update_weights_from_disk"] = host.engine.never


def by_its_probe(host):
    disagree(host.engine)


def by_a_refusal_later(host):
    """The load fails once the event that this gives is set, and not by the time that it takes."""
    may_fail, loop = asyncio.Event(), asyncio.get_running_loop()

    async def answer(http, body):
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(may_fail.wait(), loop))
        return refuses(http, body)

    host.engine.answers["/update_weights_from_disk"] = answer
    return may_fail


@pytest.mark.parametrize("fails", [by_a_refusal, by_other_weights, by_a_hang, by_its_probe])
def test_a_replica_that_fails_a_load_serves_nothing_until_it_is_back_with_the_release_while_the_other_answers(
    with_fakes, published, ask, monkeypatch, fails
) -> None:
    monkeypatch.setattr(replica, "BACKOFF_S", 0.01)

    async def work(engines, hosts):
        fails(hosts["engine-1"])
        hosts["engine-1"].starts_fail = EngineError("no port")
        await engines.load(published("r1", probe=PROBE))
        assert (engines.state, engines.served) == ("ready", "r1")
        assert states(engines) == [("ready", "r1"), ("restarting", "r0")]
        assert "no port" in engines.describe()[1]["error"]
        for number in range(8):
            assert (await ask(engines, f"session {number}")).spans[0].release_id == "r1"
            assert (await ask(engines, release="r1")).spans[0].release_id == "r1"
        assert (answers(hosts, "engine-0"), answers(hosts, "engine-1")) == (16, 0)
        hosts["engine-1"].starts_fail = None
        await until(lambda: states(engines)[1][0] == "ready")
        assert states(engines) == [("ready", "r1"), ("ready", "r1")]
        assert engines.describe()[1]["error"] is None
        assert hosts["engine-1"].engine.version == "r1"

    with_fakes(work, "--inference.load-timeout-s", "0.3", "--inference.max-restarts", "100")


def test_a_replica_that_dies_in_the_middle_of_a_load_comes_back_with_the_new_release(
    with_fakes, published, ask
) -> None:
    async def work(engines, hosts):
        host = hosts["engine-1"]
        host.engine.answers["/update_weights_from_disk"] = host.engine.never
        loading = asyncio.create_task(engines.load(published("r1", probe=PROBE)))
        await until(lambda: states(engines)[0] == ("ready", "r1"))
        assert states(engines)[1] == ("loading", "r0")
        assert engines.served == "r1"
        assert {(await ask(engines)).spans[0].release_id for _ in range(4)} == {"r1"}
        await host.die()
        await loading
        assert states(engines) == [("ready", "r1"), ("ready", "r1")]
        assert len(host.engines) == 2

    with_fakes(work)


def test_a_replica_in_the_middle_of_a_restart_holds_no_load_up_and_comes_back_with_its_release(
    with_fakes, published
) -> None:
    async def work(engines, hosts):
        host = hosts["engine-1"]
        await host.hang_in_a_restart()
        await engines.load(published("r1", probe=PROBE))
        await engines.load(published("r2", probe=PROBE))
        assert states(engines) == [("ready", "r2"), ("restarting", "r0")]
        host.may_start.set()
        await until(lambda: states(engines)[1][0] == "ready")
        assert states(engines) == [("ready", "r2"), ("ready", "r2")]
        assert len(host.engines) == 2

    with_fakes(work)


def test_where_the_replicas_in_rotation_fail_a_load_those_that_are_not_have_to_try(with_fakes, published) -> None:
    async def work(engines, hosts):
        await hosts["engine-1"].hang_in_a_restart()
        hosts["engine-0"].starts_fail = EngineError("no port")
        by_a_refusal(hosts["engine-0"])
        loading = asyncio.create_task(engines.load(published("r1", probe=PROBE)))
        await until(lambda: states(engines)[0][0] == "failed")
        assert not loading.done()
        hosts["engine-1"].may_start.set()
        await loading
        assert states(engines) == [("restarting", "r0"), ("ready", "r1")]

    with_fakes(work)


def test_a_replica_that_comes_back_with_a_release_while_the_others_fail_it_is_not_loaded_once_more(
    with_fakes, published
) -> None:
    async def work(engines, hosts):
        await hosts["engine-1"].hang_in_a_restart()
        hosts["engine-0"].starts_fail = EngineError("no port")
        may_fail = by_a_refusal_later(hosts["engine-0"])
        loading = asyncio.create_task(engines.load(published("r1", probe=PROBE)))
        await asyncio.sleep(0)
        hosts["engine-1"].may_start.set()
        await until(lambda: states(engines)[1] == ("ready", "r1"))
        assert not loading.done()
        may_fail.set()
        await loading
        assert states(engines) == [("restarting", "r0"), ("ready", "r1")]
        (_, back) = hosts["engine-1"].engines
        assert [route for route, _ in back.calls].count("/update_weights_from_disk") == 1

    with_fakes(work)


def test_a_replica_that_was_given_up_is_tried_again_with_the_next_release(with_fakes, published, monkeypatch) -> None:
    monkeypatch.setattr(replica, "BACKOFF_S", 0.01)

    async def work(engines, hosts):
        hosts["engine-1"].starts_fail = EngineError("no port")
        await hosts["engine-1"].die()
        await until(lambda: states(engines)[1][0] == "failed")
        assert "giving up" in engines.describe()[1]["error"]
        assert engines.state == "ready"
        hosts["engine-1"].starts_fail = None
        await engines.load(published("r1"))
        await until(lambda: states(engines) == [("ready", "r1"), ("ready", "r1")])

    with_fakes(work, "--inference.max-restarts", "2")


def test_a_load_that_fails_on_every_replica_says_why_for_each_and_nobody_answers_until_the_next(
    with_fakes, published, ask
) -> None:
    async def work(engines, hosts):
        by_a_refusal(hosts["engine-0"])
        with pytest.raises(
            LoadFailedError, match=r"release r1 does not load: engine-0: .*differ.* of r1.*; engine-1: .*differ"
        ):
            await engines.load(published("r1", probe=WRONG))
        assert [len(host.engines) for host in hosts.values()] == [2, 2]  # twice on every replica
        assert states(engines) == [("failed", "r0"), ("failed", "r0")]
        assert (engines.state, engines.served) == ("failed", "r0")
        with pytest.raises(UnavailableError, match=r"engine-0 is failed \(.*differ.*engine-1 is failed"):
            await ask(engines)
        with pytest.raises(UnavailableError):
            await ask(engines, release="r0")
        await engines.load(published("r0", probe=PROBE))
        assert states(engines) == [("ready", "r0"), ("ready", "r0")]
        assert (await ask(engines)).spans[0].release_id == "r0"

    with_fakes(work)


def test_one_replica_that_starts_is_enough_and_the_other_is_tried_again(with_fakes, ask, monkeypatch) -> None:
    monkeypatch.setattr(replica, "BACKOFF_S", 0.01)

    def prepare(hosts):
        hosts["engine-0"].starts_fail = EngineError("no port")

    async def work(engines, hosts):
        assert states(engines) == [("restarting", None), ("ready", "r0")]
        assert (await ask(engines)).spans[0].release_id == engines.served == "r0"
        assert engines.context_length == 512
        hosts["engine-0"].starts_fail = None
        await until(lambda: states(engines)[0] == ("ready", "r0"))

    with_fakes(work, "--inference.max-restarts", "100", prepare=prepare)


def test_a_start_that_no_replica_takes_is_a_failed_load_only_where_one_disagrees(
    tmp_path, config, published, fake_hosts
) -> None:
    async def main():
        engines = Engines(config(tmp_path, "--inference.replicas", "2"), Metrics(), fake_hosts.__getitem__)
        fake_hosts["engine-0"].starts_fail = OSError(12, "no memory")
        fake_hosts["engine-1"].starts_fail = EngineError("no port")
        with pytest.raises(EngineError, match=r"engine-0: .*no memory; engine-1: no port"):
            await engines.start(published("r0"))
        fake_hosts["engine-1"].starts_fail = None
        with pytest.raises(LoadFailedError, match=r"no memory; engine-1: .*differ"):
            await engines.start(published("r0", probe=WRONG))
        await engines.load(published("r1", probe=PROBE))  # as start-up does: what was verified before
        assert engines.served == "r1"
        await engines.stop()

    asyncio.run(main())


def test_a_later_probe_takes_out_only_the_replica_that_disagrees(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        disagree(hosts["engine-0"].engine)
        hosts["engine-0"].may_start.clear()
        await engines.verify(published("r0", probe=PROBE))
        assert [state for state, _ in states(engines)] == ["restarting", "ready"]
        assert (await ask(engines, release="r0")).spans[0].release_id == "r0"
        hosts["engine-0"].may_start.set()
        await until(lambda: [state for state, _ in states(engines)] == ["ready", "ready"])
        assert len(hosts["engine-0"].engines) == 2

    with_fakes(work)


def test_requests_wait_for_a_gate_and_then_get_503_with_when_to_come_back(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        may_fail = [by_a_refusal_later(host) for host in (hosts["engine-0"], hosts["engine-1"])]
        loading = asyncio.create_task(engines.load(published("r1")))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="engine-0 is loading, engine-1 is loading") as refused:
            await ask(engines)
        assert refused.value.retry_after_s == 2
        for event in may_fail:
            event.set()
        await loading
        assert (await ask(engines)).spans[0].release_id == "r1"

    with_fakes(work, "--inference.pause-wait-s", "0.1")


def test_requests_that_wait_are_answered_by_the_first_replica_that_opens(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        may_fail = by_a_refusal_later(hosts["engine-0"])
        loading = asyncio.create_task(engines.load(published("r1")))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(ask(engines)) for _ in range(4)]
        with pytest.raises(ConflictError):  # it waited for what was served, and that is something else now
            await ask(engines, release="r0")
        assert {(await task).spans[0].release_id for task in waiting} == {"r1"}
        assert not loading.done()
        assert answers(hosts, "engine-1") == 4
        may_fail.set()
        await loading

    with_fakes(work)


def test_no_wait_is_a_wait_of_nothing(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        assert (await ask(engines)).spans[0].release_id == "r0"
        loading = asyncio.create_task(engines.load(published("r1")))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError):
            await ask(engines)
        await loading

    with_fakes(work, "--inference.pause-wait-s", "0")


# --- who answers ------------------------------------------------------------------------------------------------------


def holding(hosts):
    """Requests of all replicas are not answered until the future they gave is set."""
    for host in hosts.values():
        host.engine.answers["/generate"] = host.engine.never


def in_flight(engines) -> list[int]:
    return [engine["in_flight"] for engine in engines.describe()]


def test_a_request_goes_to_the_replica_with_the_fewest_in_work(with_fakes, ask) -> None:
    async def work(engines, hosts):
        holding(hosts)
        running = []
        for count in range(1, 9):
            running.append(asyncio.create_task(ask(engines)))
            await asyncio.sleep(0)
            assert sum(in_flight(engines)) == count
            assert max(in_flight(engines)) - min(in_flight(engines)) <= 1
        for task in running:
            task.cancel()
        await asyncio.wait(running)
        assert in_flight(engines) == [0, 0]

    with_fakes(work)


def test_a_session_stays_with_its_replica_as_long_as_that_is_in_rotation(with_fakes, ask) -> None:
    async def work(engines, hosts):
        for number in range(16):
            await ask(engines, "s")
            await ask(engines, f"other {number}")
        home, away = ("engine-0", "engine-1") if answers(hosts, "engine-0") >= 16 else ("engine-1", "engine-0")
        assert answers(hosts, home) >= 16
        assert answers(hosts, away) > 0  # ties fall by lot: the chance that all others went home too is 2^-16
        hosts[home].may_start.clear()
        await hosts[home].die()
        await until(lambda: "restarting" in [state for state, _ in states(engines)])
        before = answers(hosts, away)
        await ask(engines, "s")
        hosts[home].may_start.set()
        await until(lambda: [state for state, _ in states(engines)] == ["ready", "ready"])
        for _ in range(8):
            await ask(engines, "s")
        assert answers(hosts, away) == before + 9  # and there it stays

    with_fakes(work)


def test_only_so_many_sessions_are_remembered_the_oldest_is_forgotten(with_fakes, ask, monkeypatch) -> None:
    monkeypatch.setattr(pool, "MAX_SESSIONS", 3)

    async def work(engines, hosts):
        for session in ("a", "b", "c", "a", "d"):
            await ask(engines, session)
        assert list(engines._sessions) == ["c", "a", "d"]

    with_fakes(work)


def test_a_request_may_name_the_release_that_is_served_and_no_other(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        assert (await ask(engines, release="r0")).spans[0].release_id == "r0"
        with pytest.raises(ConflictError, match="release r1 does not answer: r0 is served") as refused:
            await ask(engines, release="r1")
        assert (refused.value.code, refused.value.param) == ("release_not_served", "x-reef-release")
        await engines.load(published("r1"))
        assert (await ask(engines, release="r1")).spans[0].release_id == "r1"
        with pytest.raises(ConflictError, match="r1 is served"):
            await ask(engines, release="r0")

    with_fakes(work)


# --- a candidate ------------------------------------------------------------------------------------------------------


def test_a_candidate_gets_its_share_of_what_names_no_release(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        assert engines.candidate is None
        await engines.start_candidate(published("c1", probe=PROBE), 1.0)
        assert (engines.candidate, engines.served) == ("c1", "r0")
        for session in (None, "s", "t"):
            assert (await ask(engines, session)).spans[0].release_id == "c1"
            assert (await ask(engines, session, "c1")).spans[0].release_id == "c1"
            assert (await ask(engines, session, "r0")).spans[0].release_id == "r0"
        with pytest.raises(ConflictError, match="r0 is served, c1 is on trial"):
            await ask(engines, release="c2")
        await engines.start_candidate(published("c1", probe=PROBE), 0.0)  # nothing but another share
        assert len(hosts["engine-candidate"].engines) == 1
        assert "/update_weights_from_disk" not in [route for route, _ in hosts["engine-candidate"].engine.calls]
        for session in (None, "s", "t"):
            assert (await ask(engines, session)).spans[0].release_id == "r0"
            assert (await ask(engines, session, "c1")).spans[0].release_id == "c1"

    with_fakes(work)


def test_half_of_the_sessions_are_on_trial_and_each_stays_where_it_is(with_fakes, published) -> None:
    async def work(engines, hosts):
        await engines.start_candidate(published("c1"), 0.5)
        counts: Counter[str] = Counter()
        for number in range(400):
            trial = {await _goes_to_candidate(engines, f"session {number}") for _ in range(3)}
            assert len(trial) == 1
            counts["sessions"] += trial.pop()
            counts["requests"] += await _goes_to_candidate(engines, None)
        assert 150 < counts["sessions"] < 250  # five standard deviations
        assert 150 < counts["requests"] < 250
        on_trial = {n for n in range(400) if await _goes_to_candidate(engines, f"session {n}")}
        await engines.start_candidate(published("c1"), 0.75)  # a larger share takes nobody out
        assert on_trial <= {n for n in range(400) if await _goes_to_candidate(engines, f"session {n}")}

    with_fakes(work)


async def _goes_to_candidate(engines, session) -> bool:
    async with engines.acquire(session) as client:
        return client.url == engines.describe()[-1]["url"]


def test_another_candidate_is_loaded_into_the_same_engine_and_a_load_leaves_it_alone(
    with_fakes, published, ask
) -> None:
    async def work(engines, hosts):
        await engines.start_candidate(published("c1"), 1.0)
        await engines.start_candidate(published("c2", probe=PROBE), 1.0)
        assert engines.candidate == "c2"
        assert len(hosts["engine-candidate"].engines) == 1
        await engines.load(published("r1"))
        assert (engines.served, engines.candidate) == ("r1", "c2")
        assert (await ask(engines)).spans[0].release_id == "c2"
        await engines.load(published("c2"))  # promoted: who names it is answered by those that serve
        await ask(engines, release="c2")
        assert answers(hosts, "engine-candidate") == 1

    with_fakes(work)


@pytest.mark.parametrize("first", [None, "c1"])
def test_a_candidate_that_does_not_load_is_none(with_fakes, published, ask, first) -> None:
    async def work(engines, hosts):
        if first is not None:
            await engines.start_candidate(published(first), 1.0)
        with pytest.raises(LoadFailedError, match=r"candidate c2 does not load: .*differ by 0\.1"):
            await engines.start_candidate(published("c2", probe=WRONG), 1.0)
        assert engines.candidate is None
        assert hosts["engine-candidate"].pid is None
        assert [engine["role"] for engine in engines.describe()] == ["serving", "serving"]
        assert (await ask(engines)).spans[0].release_id == "r0"
        await engines.start_candidate(published("c3", probe=PROBE), 1.0)
        assert (await ask(engines)).spans[0].release_id == "c3"

    with_fakes(work)


def test_while_a_candidate_that_died_restarts_the_others_answer_and_who_names_it_gets_503(
    with_fakes, published, ask
) -> None:
    async def work(engines, hosts):
        await engines.start_candidate(published("c1"), 1.0)
        hosts["engine-candidate"].may_start.clear()
        await hosts["engine-candidate"].die()
        await until(lambda: engines.describe()[2]["state"] == "restarting")
        assert engines.candidate == "c1"
        assert (await ask(engines)).spans[0].release_id == "r0"
        assert (await ask(engines, "s")).spans[0].release_id == "r0"
        with pytest.raises(UnavailableError, match="engine-candidate is restarting") as refused:
            await ask(engines, release="c1")
        assert refused.value.retry_after_s == 2
        hosts["engine-candidate"].may_start.set()
        await until(lambda: engines.describe()[2]["state"] == "ready")
        assert (await ask(engines)).spans[0].release_id == "c1"
        assert (await ask(engines, release="c1")).spans[0].release_id == "c1"

    with_fakes(work, "--inference.pause-wait-s", "0.1")


def test_a_candidate_that_is_taken_away_ends_what_it_has_begun(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        engines.end_trial()  # there is none
        await engines.start_candidate(published("c1"), 1.0)
        held, loop = asyncio.Event(), asyncio.get_running_loop()
        engine = hosts["engine-candidate"].engine

        async def answer(http, body):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(held.wait(), loop))
            return engine.generation([5, 6, 2])

        engine.answers["/generate"] = answer
        running = asyncio.create_task(ask(engines))
        await until(lambda: answers(hosts, "engine-candidate") == 1)
        engines.end_trial()
        assert engines.candidate is None
        assert engines.describe()[2]["in_flight"] == 1
        assert (await ask(engines)).spans[0].release_id == "r0"
        with pytest.raises(ConflictError):
            await ask(engines, release="c1")
        held.set()
        assert (await running).spans[0].release_id == "c1"
        pid = hosts["engine-candidate"].pid
        await engines.start_candidate(published("c2"), 0.0)
        assert (engines.candidate, hosts["engine-candidate"].pid) == ("c2", pid)
        await engines.stop()
        assert hosts["engine-candidate"].pid is None

    with_fakes(work)


# --- an engine that is lent -------------------------------------------------------------------------------------------


def test_a_release_that_is_lent_is_answered_whatever_is_served_and_by_nobody_else(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        await engines.lend(published("e1", probe=PROBE), "a")
        assert (engines.served, engines.describe()[-1]["role"]) == ("r0", "evaluation")
        await engines.load(published("e2"))
        for session in (None, "s"):
            assert (await ask(engines, session, "e1")).spans[0].release_id == "e1"
            assert (await ask(engines, session)).spans[0].release_id == "e2"
        with pytest.raises(ConflictError, match="answers for e1 now") as refused:
            await engines.lend(published("e2"), "b")
        assert refused.value.code == "engine_taken"
        await engines.lend(published("e1"), "b")  # a second borrower
        assert (len(hosts["engine-evaluation"].engines), engines.lent) == (1, "e1")
        gone = [await engines.give_back(*loan) for loan in (("e1", "a"), ("e1", "a"), ("e2", "b"), ("e1", "c"))]
        assert gone == [True, False, False, False]  # nobody ends what another one borrowed
        assert (await ask(engines, release="e1")).spans[0].release_id == "e1"
        assert await engines.give_back("e1", "b")
        assert engines.lent is None
        assert len(engines.describe()) == 2
        with pytest.raises(ConflictError, match="e1 does not answer: e2 is served"):
            await ask(engines, release="e1")
        await engines.lend(published("e2"), "d")  # what is served, too: it stays when another one is served
        await engines.load(published("e3"))
        assert (await ask(engines, release="e2")).spans[0].release_id == "e2"

    with_fakes(work)


def test_an_engine_that_does_not_start_is_not_lent_and_leaves_room_for_the_next(with_fakes, published, ask) -> None:
    async def work(engines, hosts):
        hosts["engine-evaluation"].starts_fail = EngineError("no port")
        with pytest.raises(EngineError, match=r"no engine answers for e1: .*no port"):
            await engines.lend(published("e1"), "a")
        hosts["engine-evaluation"].starts_fail = None
        with pytest.raises(EngineError, match=r"no engine answers for e1: .*differ"):
            await engines.lend(published("e1", probe=WRONG), "a")
        assert [engine["role"] for engine in engines.describe()] == ["serving", "serving"]
        await engines.lend(published("e2"), "a")
        assert (await ask(engines, release="e2")).spans[0].release_id == "e2"

    with_fakes(work)


def test_an_engine_that_nobody_asks_any_more_ends_by_itself(with_fakes, published, ask, monkeypatch) -> None:
    clock = SimpleNamespace(now=0.0, looks=0)

    def monotonic() -> float:
        clock.looks += 1
        return clock.now

    monkeypatch.setattr(lent, "LOOK_S", 0.01)
    monkeypatch.setattr(lent, "time", SimpleNamespace(monotonic=monotonic))

    async def work(engines, hosts):
        await engines.lend(published("e1"), "a")
        for _ in range(4):  # together longer than it may be idle
            await ask(engines, release="e1")
            looks = clock.looks
            await until(lambda: clock.looks > looks + 2)  # noqa: B023 (asked before the next)
            clock.now += 200.0
        await ask(engines, release="e1")
        assert engines.describe()[-1]["role"] == "evaluation"
        looks = clock.looks
        await until(lambda: clock.looks > looks + 2)
        clock.now += 301.0
        await until(lambda: len(engines.describe()) == 2)
        assert await engines.give_back("e1", "a") is False

    with_fakes(work, "--evaluation.engine-idle-s", "300")


def test_an_engine_given_back_while_it_starts_is_not_lent_and_another_release_can_be(
    with_fakes, published, ask
) -> None:
    async def work(engines, hosts):
        hosts["engine-evaluation"].may_start.clear()
        lending = asyncio.create_task(engines.lend(published("e1"), "a"))
        await until(lambda: engines.lent == "e1")
        await asyncio.sleep(0.05)
        assert await engines.give_back("e1", "a")
        with pytest.raises(ConflictError, match="given back while it started"):
            await lending
        hosts["engine-evaluation"].may_start.set()
        await engines.lend(published("e2"), "b")
        assert (await ask(engines, release="e2")).spans[0].release_id == "e2"

    with_fakes(work)


def test_a_stop_ends_a_start_under_way_and_lends_no_more(with_fakes, published) -> None:
    async def work(engines, hosts):
        hosts["engine-evaluation"].may_start.clear()
        lending = [asyncio.create_task(engines.lend(published("e1"), loan)) for loan in ("a", "b")]
        await until(lambda: engines.lent == "e1")
        await asyncio.sleep(0.05)
        await asyncio.wait_for(engines.stop(), 60)
        ended = await asyncio.gather(*lending, return_exceptions=True)
        assert [type(each) for each in ended] == [UnavailableError] * 2
        with pytest.raises(UnavailableError, match="lends no engine"):
            await engines.lend(published("e1"), "c")
        assert hosts["engine-evaluation"].pid is None

    with_fakes(work)


# --- an engine that somebody else runs --------------------------------------------------------------------------------


def test_an_attached_engine_serves_alone_and_has_no_room_for_a_candidate(
    tmp_path, config, published, fake_engine, ask
) -> None:
    with pytest.raises(ConfigError, match=r"inference\.replicas is 2"):
        config(tmp_path, "--inference.url", fake_engine.url, "--inference.replicas", "2")

    async def main():
        engines = Engines(config(tmp_path, "--inference.url", fake_engine.url), Metrics())
        await engines.start(published("v0"))
        assert (await ask(engines)).output_ids.tolist() == [5, 6, 2]
        assert engines.pids() == []
        with pytest.raises(ConfigError, match=r"inference\.url"):
            await engines.start_candidate(published("c1"), 0.5)
        fake_engine.answers["/update_weights_from_disk"] = lambda http, body: {"success": False, "message": "no disk"}
        with pytest.raises(LoadFailedError, match="no disk"):
            await engines.load(published("r1"))
        with pytest.raises(UnavailableError, match="no disk"):
            await ask(engines)
        del fake_engine.answers["/update_weights_from_disk"]
        await engines.load(published("r2"))
        assert engines.served == "r2"
        await engines.stop()

    asyncio.run(main())

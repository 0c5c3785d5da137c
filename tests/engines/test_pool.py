"""The engines that serve: loads, restarts, and who may send a request meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import time

import numpy as np
import psutil
import pytest
from aiohttp import web

import reef.engines.pool as pool
from reef.config import load as load_config
from reef.engines.pool import Engines
from reef.errors import EngineError, LoadFailedError, UnavailableError
from reef.observe import Metrics
from reef.types import Probe, Published, Request, Sampling

pytestmark = pytest.mark.slow  # engines and services of its own

PROMPT = [1, 294, 201, 20, 13, 21, 31, 2, 201, 1, 298, 297, 201]


def request(max_tokens=12, temperature=0.0) -> Request:
    return Request(
        id=f"req_{time.monotonic_ns()}",
        scenario="s",
        api="completions",
        prompt_ids=np.array(PROMPT, dtype=np.int32),
        sampling=Sampling(max_tokens=max_tokens, temperature=temperature, ignore_eos=True),
        n=1,
        body=b"{}",
        created_at=0.0,
    )


async def ask(engines, **sampling):
    async with engines.acquire() as client:
        (generation,) = await client.generate(request(**sampling))
    return generation


def published(release_id, path="/weights", probe=None) -> Published:
    return Published(release_id=release_id, path=str(path), content_id="sha256:0", size_bytes=1, probe=probe)


def config(tmp_path, *settings):
    (tmp_path / "run" / "logs").mkdir(parents=True, exist_ok=True)
    return load_config(None, ["--reef.run-dir", str(tmp_path / "run"), *settings], environ={})


def value(counter) -> float:
    return counter._value.get()


# --- the real engine --------------------------------------------------------------------------------------------------


class Real:
    """Engines over the real embedded engine, in an event loop that lives as long as the module."""

    def __init__(self, directory, starter) -> None:
        self.starter = starter
        self.metrics = Metrics()
        self.runner = asyncio.Runner()
        self.config = config(directory, "--inference.model-path", str(starter), "--inference.context-length", "500")
        self.engines = self.run(self._make())
        self.base = published("r0", starter)

    async def _make(self):
        return Engines(self.config, self.metrics)

    def run(self, work):
        return self.runner.run(work)

    def load(self, release_id, probe=None, path=None):
        self.run(self.engines.load(published(release_id, path or self.starter, probe)))

    def probe(self) -> Probe:
        async def score():
            async with self.engines.acquire() as client:
                return await client.score(PROMPT)

        return Probe(tuple(PROMPT), tuple(self.run(score()).tolist()))


@pytest.fixture(scope="module")
def real(tmp_path_factory, starter):
    real = Real(tmp_path_factory.mktemp("real"), starter)
    try:
        real.run(real.engines.start(real.base))
        yield real
    finally:
        real.run(real.engines.stop())
        real.runner.close()


def test_it_serves_the_release_it_was_started_with(real) -> None:
    seen = real.engines.describe()
    assert (seen["state"], seen["release_id"], seen["error"]) == ("ready", "r0", None)
    assert psutil.Process(seen["pid"]).is_running()
    assert seen["build"].startswith("reef-embedded")
    assert real.engines.context_length == 500
    assert real.run(ask(real.engines)).spans[0].release_id == "r0"
    assert real.engines.describe()["in_flight"] == 0


def test_the_very_same_weights_loaded_change_no_greedy_answer_and_agree_with_the_probe(real) -> None:
    before, probe, pid = real.run(ask(real.engines)), real.probe(), real.engines.describe()["pid"]
    real.load("r1", probe)
    after = real.run(ask(real.engines))
    assert after.output_ids.tolist() == before.output_ids.tolist()
    assert np.abs(after.logprobs - before.logprobs).max() < 1e-4
    assert after.spans[0].release_id == real.engines.served == "r1"
    assert real.engines.describe()["pid"] == pid
    assert real.engines.last_load["total_s"] > 0


def test_requests_that_wait_for_a_load_are_answered_by_the_new_release(real) -> None:
    async def both():
        running = [asyncio.create_task(ask(real.engines, max_tokens=200)) for _ in range(2)]
        await asyncio.sleep(0.05)
        loading = asyncio.create_task(real.engines.load(published("r2", real.starter)))
        await asyncio.sleep(0)
        assert real.engines.state == "loading"
        waiting = [asyncio.create_task(ask(real.engines)) for _ in range(2)]
        await loading
        return [await task for task in running], [await task for task in waiting]

    running, waiting = real.run(both())
    for generation in running:
        assert generation.spans[-1].end == 200  # every token has its release
        assert {span.release_id for span in generation.spans} <= {"r1", "r2", "r0"}
    assert all(generation.spans[0].release_id == "r2" for generation in waiting)


def test_a_probe_that_was_not_known_at_the_start_can_be_checked_later(real) -> None:
    served = real.engines.served
    real.run(real.engines.verify(published(served, real.starter, real.probe())))
    good = real.probe()
    wrong = Probe(good.ids, tuple(value - 0.5 for value in good.logprobs))
    with pytest.raises(LoadFailedError, match=r"differ by 0\.5 on the probe of"):
        real.run(real.engines.verify(published(served, real.starter, wrong)))
    with pytest.raises(LoadFailedError, match="expected another"):
        real.run(real.engines.verify(published("another", real.starter)))


def test_an_engine_killed_in_the_middle_is_restarted_with_the_release_it_served(real) -> None:
    real.load("r3")
    restarts = value(real.metrics.engine_restarts)

    async def kill():
        running = asyncio.create_task(ask(real.engines, max_tokens=450))
        await asyncio.sleep(0.05)
        pid = real.engines.describe()["pid"]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError):  # it was in the engine that died
            await running
        while real.engines.state == "ready":
            await asyncio.sleep(0.01)
        assert real.engines.state == "restarting"
        assert "-9" in real.engines.error
        after = await ask(real.engines)  # waits for the gate
        return pid, after

    pid, after = real.run(kill())
    assert after.spans[0].release_id == real.engines.served == "r3"
    assert real.engines.describe()["pid"] != pid
    assert (real.engines.state, real.engines.error) == ("ready", None)
    assert value(real.metrics.engine_restarts) == restarts + 1


def test_a_release_that_disagrees_with_its_probe_fails_after_a_restart_too_and_a_good_one_opens_the_gate(real) -> None:
    good = real.probe()
    wrong = Probe(good.ids, tuple(value - 0.5 for value in good.logprobs))
    pid = real.engines.describe()["pid"]
    failures = value(real.metrics.load_failures)
    with pytest.raises(LoadFailedError, match=r"release bad does not load: .*differ by 0\.5"):
        real.load("bad", wrong)
    assert real.engines.state == "failed"
    assert value(real.metrics.load_failures) == failures + 1
    assert not psutil.pid_exists(pid)  # it was restarted
    started = time.monotonic()
    with pytest.raises(UnavailableError, match=r"the engine is failed: .*differ by 0\.5") as refused:
        real.run(ask(real.engines))
    assert refused.value.retry_after_s is not None
    assert time.monotonic() - started < 1  # at once: nothing will open by waiting
    real.load("good", good)
    assert real.run(ask(real.engines)).spans[0].release_id == real.engines.served == "good"


def test_stop_ends_the_process_and_answers_nobody(real) -> None:  # the last one of `real`
    pid = real.engines.describe()["pid"]
    real.run(real.engines.stop())
    assert not psutil.pid_exists(pid)
    assert real.engines.describe()["pid"] is None
    with pytest.raises(UnavailableError, match="stopped"):
        real.run(ask(real.engines))
    real.run(real.engines.stop())  # once more is nothing


def test_an_engine_that_cannot_start_says_why_with_the_end_of_its_log(tmp_path, starter) -> None:
    damaged = shutil.copytree(starter, tmp_path / "damaged")
    (damaged / "config.json").unlink()

    async def run():
        engines = Engines(config(tmp_path), Metrics())
        with pytest.raises(EngineError, match=r"(?s)the engine ended with 2.*config\.json"):
            await engines.start(published("r0", damaged))
        await engines.stop()

    asyncio.run(run())


# --- engines that fail on demand --------------------------------------------------------------------------------------


class FakeHost:
    """Starts a FakeEngine where EngineHost starts a process; `prepare(engine)` breaks what it starts."""

    def __init__(self, make_fake_engine) -> None:
        self.make = make_fake_engine
        self.engines = []
        self.prepare = lambda engine: None
        self.starts_fail = None
        self._gone = asyncio.Event()

    @property
    def pid(self):
        return None if self._gone.is_set() or not self.engines else 1

    @property
    def engine(self):
        return self.engines[-1]

    async def start(self, model_path, version, ready_timeout_s):
        if self.starts_fail is not None:
            self._gone.set()
            raise self.starts_fail
        self.engines.append(self.make(version))
        self.prepare(self.engine)
        self._gone = asyncio.Event()
        return self.engine.url

    async def wait(self):
        await self._gone.wait()
        return -9

    async def stop(self):
        if self.engines:
            await asyncio.to_thread(self.engine.stop)
        self._gone.set()

    async def die(self):
        await self.stop()


@pytest.fixture
def with_fakes(tmp_path, make_fake_engine):
    """Run `work(engines, host)` over engines whose servers are fakes, started with release r0."""

    def run(work, *settings):
        async def main():
            host = FakeHost(make_fake_engine)
            engines = Engines(config(tmp_path, *settings), Metrics(), host)
            await engines.start(published("r0"))
            try:
                async with asyncio.timeout(30):
                    await work(engines, host)
            finally:
                await engines.stop()

        asyncio.run(main())

    return run


PROBE = Probe((4, 5, 6), (-1.0, -1.0))  # what a FakeEngine scores
WRONG = Probe((4, 5, 6), (-1.0, -1.1))


def test_an_engine_that_answers_500_to_an_update_is_restarted_with_the_release(with_fakes) -> None:
    async def work(engines, host):
        host.engine.answers["/update_weights_from_disk"] = lambda http, body: web.Response(status=500, text="no memory")
        await engines.load(published("r1", probe=PROBE))
        assert len(host.engines) == 2
        assert host.engine.version == engines.served == "r1"
        assert (engines.state, engines.error) == ("ready", None)
        assert value(engines._metrics.load_failures) == 1
        assert (await ask(engines)).spans[0].release_id == "r1"

    with_fakes(work)


@pytest.mark.parametrize("route", ["/update_weights_from_disk", "/pause_generation", "/continue_generation"])
def test_an_engine_that_never_answers_a_load_is_given_up_in_time_by_name_and_restarted(
    with_fakes, caplog, route
) -> None:
    async def work(engines, host):
        first = host.engine
        first.answers[route] = first.never
        started = time.monotonic()
        await engines.load(published("r1"))
        assert time.monotonic() - started < 10
        assert len(host.engines) == 2
        assert (engines.served, engines.state) == ("r1", "ready")
        assert first.url in caplog.text

    with_fakes(work, "--inference.load-timeout-s", "0.3")


def test_an_engine_that_hangs_in_the_probe_is_given_up_too(with_fakes) -> None:
    async def work(engines, host):
        host.engine.answers["/generate"] = host.engine.never
        await engines.load(published("r1", probe=PROBE))
        assert len(host.engines) == 2
        assert engines.served == "r1"

    with_fakes(work, "--inference.load-timeout-s", "0.3")


def test_an_engine_that_loads_something_else_is_restarted(with_fakes) -> None:
    async def work(engines, host):
        host.engine.answers["/update_weights_from_disk"] = lambda http, body: {"success": True}
        await engines.load(published("r1"))
        assert len(host.engines) == 2
        assert engines.served == "r1"

    with_fakes(work)


def test_a_release_that_fails_in_place_and_after_a_restart_closes_the_gate(with_fakes) -> None:
    async def work(engines, host):
        with pytest.raises(LoadFailedError, match="release r1 does not load"):
            await engines.load(published("r1", probe=WRONG))
        assert len(host.engines) == 2
        assert (engines.state, engines.served) == ("failed", "r0")
        with pytest.raises(UnavailableError, match="failed"):
            await ask(engines)
        await engines.load(published("r2", probe=PROBE))
        assert (engines.state, engines.served, engines.error) == ("ready", "r2", None)

    with_fakes(work)


@pytest.mark.parametrize("scored", [None, float("nan")])
def test_a_probe_without_a_number_is_no_agreement(with_fakes, scored) -> None:
    def broken(http, body):
        entries = [[None, 4, None], [scored, 5, None], [-1.0, 6, None]]
        text = json.dumps({"output_ids": [], "meta_info": {"input_token_logprobs": entries}})
        return web.Response(text=text, content_type="application/json")

    async def work(engines, host):
        host.prepare = lambda engine: engine.answers.update({"/generate": broken})
        host.prepare(host.engine)
        with pytest.raises(LoadFailedError):
            await engines.load(published("r1", probe=PROBE))

    with_fakes(work)


def test_requests_wait_for_a_closed_gate_and_then_get_503_with_when_to_come_back(with_fakes) -> None:
    async def work(engines, host):
        host.engine.answers["/update_weights_from_disk"] = host.engine.never
        loading = asyncio.create_task(engines.load(published("r1")))
        await asyncio.sleep(0.05)
        with pytest.raises(UnavailableError, match="the engine is loading") as refused:
            await ask(engines)
        assert refused.value.retry_after_s == 2
        await loading
        assert (await ask(engines)).spans[0].release_id == "r1"

    with_fakes(work, "--inference.load-timeout-s", "0.6", "--inference.pause-wait-s", "0.1")


def test_a_request_that_was_in_an_engine_when_it_was_replaced_fails_as_the_engines_fault(with_fakes) -> None:
    async def work(engines, host):
        host.engine.answers["/generate"] = host.engine.never
        running = asyncio.create_task(ask(engines))
        while not any(route == "/generate" for route, _ in host.engine.calls):
            await asyncio.sleep(0.01)
        host.engine.answers["/update_weights_from_disk"] = lambda http, body: web.Response(status=500)
        await engines.load(published("r1"))
        with pytest.raises(EngineError):
            await running
        assert engines.num_in_flight == 0

    with_fakes(work)


def test_the_pause_mode_decides_whether_the_cache_is_kept(with_fakes) -> None:
    async def work(engines, host):
        await engines.load(published("r1"))
        bodies = dict(host.engine.calls)
        assert bodies["/pause_generation"] == {"mode": "in_place"}
        assert bodies["/update_weights_from_disk"]["flush_cache"] is False
        routes = [route for route, _ in host.engine.calls]
        load = routes.index("/update_weights_from_disk")
        assert routes[load - 1 : load + 2] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
        ]

    with_fakes(work, "--inference.pause-mode", "in_place")


def test_an_engine_that_dies_is_restarted_with_the_newest_release_that_it_should_serve(with_fakes) -> None:
    async def work(engines, host):
        await engines.load(published("r1"))
        await host.die()
        while len(host.engines) < 2 or engines.state != "ready":
            await asyncio.sleep(0.01)
        assert host.engine.version == engines.served == "r1"

    with_fakes(work)


@pytest.mark.parametrize("failure", [EngineError("no port"), OSError(12, "no memory")])
def test_an_engine_that_dies_too_often_in_a_row_is_given_up_until_a_load_brings_it_back(
    with_fakes, monkeypatch, failure
) -> None:
    monkeypatch.setattr(pool, "BACKOFF_S", 0.01)

    async def work(engines, host):
        host.starts_fail = failure
        await host.die()
        while engines.state != "failed":
            await asyncio.sleep(0.01)
        assert "giving up" in engines.error
        with pytest.raises(UnavailableError, match="giving up"):
            await ask(engines)
        host.starts_fail = None
        await engines.load(published("r1"))
        assert (engines.state, engines.served) == ("ready", "r1")
        await host.die()  # and it is watched again
        started = len(host.engines)
        while len(host.engines) == started or engines.state != "ready":
            await asyncio.sleep(0.01)

    with_fakes(work, "--inference.max-restarts", "2")


# --- an engine that somebody else runs --------------------------------------------------------------------------------


@pytest.fixture
def attached(tmp_path, fake_engine):
    """Run `work(engines)` over engines attached to `fake_engine` by inference.url."""

    def run(work, *settings, start="v0"):
        async def main():
            engines = Engines(config(tmp_path, "--inference.url", fake_engine.url, *settings), Metrics())
            try:
                await engines.start(published(start))
                await work(engines)
            finally:
                await engines.stop()

        asyncio.run(main())

    return run


def test_an_attached_engine_that_has_the_release_is_used_as_it_is(attached, fake_engine) -> None:
    async def work(engines):
        seen = engines.describe()
        assert (seen["url"], seen["release_id"], seen["pid"]) == (fake_engine.url, "v0", None)
        assert (await ask(engines)).output_ids.tolist() == [5, 6, 2]

    attached(work)
    assert "/update_weights_from_disk" not in [route for route, _ in fake_engine.calls]


def test_an_attached_engine_with_other_weights_loads_the_release_first(attached, fake_engine) -> None:
    async def work(engines):
        assert fake_engine.version == engines.served == "r7"

    attached(work, start="r7")


def test_a_load_that_fails_on_an_attached_engine_leaves_it_running_and_closes_the_gate(attached, fake_engine) -> None:
    async def work(engines):
        fake_engine.answers["/update_weights_from_disk"] = lambda http, body: {"success": False, "message": "no disk"}
        with pytest.raises(LoadFailedError, match=r"the attached engine failed: .*no disk"):
            await engines.load(published("r1"))
        assert fake_engine.calls[-1][0] == "/continue_generation"
        with pytest.raises(UnavailableError, match="no disk"):
            await ask(engines)
        del fake_engine.answers["/update_weights_from_disk"]
        await engines.load(published("r2"))
        assert engines.served == "r2"

    attached(work)


def test_the_shorter_context_of_engine_and_configuration_holds(attached, fake_engine) -> None:
    async def shorter(engines):
        assert engines.context_length == 100

    async def longer(engines):
        assert engines.context_length == 512

    attached(shorter, "--inference.context-length", "100")
    attached(longer, "--inference.context-length", "4096")
    fake_engine.answers["/model_info"] = lambda http, body: {"weight_version": "v0"}
    with pytest.raises(EngineError, match=r"set inference\.context-length"):
        attached(longer)


def test_an_attached_engine_that_is_not_there_is_named(tmp_path, make_fake_engine) -> None:
    gone = make_fake_engine()
    gone.stop()

    async def main():
        settings = ["--inference.url", gone.url, "--reef.ready-timeout", "0.3"]
        engines = Engines(config(tmp_path, *settings), Metrics())
        with pytest.raises(EngineError, match=f"{gone.url} is not healthy after 0.3 s"):
            await engines.start(published("r0"))
        await engines.stop()

    asyncio.run(main())

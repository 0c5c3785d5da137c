"""One engine server: loads, verification, restarts; started here or by somebody else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import socket

import pytest
from aiohttp import web

import reef.engines.client as client_module
import reef.engines.replica as module
from reef.engines.replica import Replica
from reef.errors import EngineError, LoadFailedError
from reef.observe import Metrics
from reef.types import Probe, Published
from tests.engines.conftest import pass_time

PROBE = Probe((4, 5, 6), (-1.0, -1.0))  # what a FakeEngine scores
WRONG = Probe((4, 5, 6), (-1.0, -1.1))


def refuses(http, body):
    return web.Response(status=500, text="no memory")


def value(counter) -> float:
    return counter._value.get()


def routes(engine) -> list[str]:
    return [route for route, _ in engine.calls]


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.01)


@pytest.fixture
def with_replica(tmp_path, config, published, fake_hosts):
    """Run `work(replica, host)` over a replica whose servers are fakes, started with release r0."""

    def run(work, *settings):
        async def main():
            host = fake_hosts["engine-0"]
            replica = Replica(host.name, config(tmp_path, *settings), Metrics(), host)
            try:
                async with asyncio.timeout(120):
                    await replica.start(published("r0"))
                    await work(replica, host)
            finally:
                await replica.stop()

        asyncio.run(main())

    return run


def seen(replica) -> tuple[str, str | None, str | None]:
    return replica.state, replica.served, replica.error


# --- a load, and what can go wrong in it ------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "flushes"), [("retract", True), ("in_place", False), ("abort", True)])
def test_a_load_pauses_loads_and_continues_and_the_pause_mode_says_whether_the_cache_is_kept(
    with_replica, published, mode, flushes
) -> None:
    async def work(replica, host):
        await replica.load(published("r1", "/releases/r1", PROBE))
        load = routes(host.engine).index("/update_weights_from_disk")
        assert host.engine.calls[load - 1 : load + 2] == [
            ("/pause_generation", {"mode": mode}),
            (
                "/update_weights_from_disk",
                {"model_path": "/releases/r1", "weight_version": "r1", "flush_cache": flushes},
            ),
            ("/continue_generation", {}),
        ]
        assert seen(replica) == ("ready", "r1", None)
        assert replica.last_load["total_s"] > 0
        assert len(host.engines) == 1

    with_replica(work, "--inference.pause-mode", mode)


def test_the_time_in_which_a_replica_takes_no_requests_is_that_of_its_loads(with_replica, published) -> None:
    go_on = []

    async def slowly(http, body):
        while not go_on:
            await asyncio.sleep(0.01)
        return {"success": True}

    async def work(replica, host):
        before = replica.closed_s
        await asyncio.sleep(0.2)  # it is open
        assert replica.closed_s == before
        host.engine.answers["/pause_generation"] = slowly
        loading = asyncio.create_task(replica.load(published("r1", "/releases/r1", PROBE)))
        await until(lambda: replica.closed_s - before > 0.1)
        assert not loading.done()  # counted though it is not over yet
        go_on.append(True)
        await loading
        after = replica.closed_s
        assert after - before > 0.1
        await asyncio.sleep(0.1)
        assert replica.closed_s == after

    with_replica(work)


def loads_something_else(http, body):
    return {"success": True}


@pytest.mark.parametrize(
    ("route", "answer"),
    [
        ("/update_weights_from_disk", refuses),
        ("/update_weights_from_disk", loads_something_else),
        ("/pause_generation", refuses),
        ("/continue_generation", refuses),
        ("/generate", refuses),
    ],
)
def test_a_server_that_fails_a_load_is_restarted_with_the_release(with_replica, published, route, answer) -> None:
    async def work(replica, host):
        host.engine.answers[route] = answer
        await replica.load(published("r1", probe=PROBE))
        assert len(host.engines) == 2
        assert host.engine.version == "r1"
        assert seen(replica) == ("ready", "r1", None)
        assert value(replica._metrics.load_failures) == 1

    with_replica(work)


@pytest.mark.parametrize(
    "route", ["/update_weights_from_disk", "/pause_generation", "/continue_generation", "/generate"]
)
def test_a_server_that_never_answers_a_load_is_given_up_in_time_by_name_and_restarted(
    with_replica, published, caplog, monkeypatch, route
) -> None:
    monkeypatch.setattr(client_module, "CONTROL_TIMEOUT_S", 3600)

    async def work(replica, host):
        first = host.engine
        first.answers[route] = first.never
        await replica.load(published("r1", probe=PROBE))
        assert len(host.engines) == 2
        assert seen(replica) == ("ready", "r1", None)
        assert "release r1 did not load, restarting engine-0" in caplog.text
        assert first.url in caplog.text

    with_replica(work, "--inference.load-timeout-s", "0.6")


def test_a_release_that_fails_in_place_and_after_a_restart_closes_the_gate_until_a_good_one_comes(
    with_replica, published
) -> None:
    async def work(replica, host):
        with pytest.raises(LoadFailedError, match=r"differ by 0\.1 on the probe of r1"):
            await replica.load(published("r1", probe=WRONG))
        assert len(host.engines) == 2
        assert (replica.ready, replica.state, replica.served) == (False, "failed", "r0")
        assert "differ by 0.1" in replica.error
        await asyncio.sleep(0.05)  # nobody restarts it with a release that it has failed
        assert len(host.engines) == 2
        await replica.load(published("r2", probe=PROBE))
        assert len(host.engines) == 2
        assert seen(replica) == ("ready", "r2", None)

    with_replica(work)


@pytest.mark.parametrize("scored", [None, float("nan")])
def test_a_probe_without_a_number_is_no_agreement(with_replica, published, scored) -> None:
    def broken(http, body):
        entries = [[None, 4, None], [scored, 5, None], [-1.0, 6, None]]
        text = json.dumps({"output_ids": [], "meta_info": {"input_token_logprobs": entries}})
        return web.Response(text=text, content_type="application/json")

    async def work(replica, host):
        host.prepare = lambda engine: engine.answers.update({"/generate": broken})
        host.prepare(host.engine)
        with pytest.raises(LoadFailedError):
            await replica.load(published("r1", probe=PROBE))

    with_replica(work)


def test_a_request_that_was_in_a_server_when_it_was_replaced_fails_as_the_engines_fault(
    with_replica, published, generate
) -> None:
    async def ask(replica):
        with replica.use() as client:
            return await generate(client)

    async def work(replica, host):
        host.engine.answers["/generate"] = host.engine.never
        running = asyncio.create_task(ask(replica))
        await until(lambda: "/generate" in routes(host.engine))
        assert replica.num_in_flight == 1
        host.engine.answers["/update_weights_from_disk"] = refuses
        await replica.load(published("r1"))
        with pytest.raises(EngineError):
            await running
        assert replica.num_in_flight == 0

    with_replica(work)


# --- a server that ends -----------------------------------------------------------------------------------------------


def test_a_server_that_dies_is_restarted_with_the_newest_release_that_it_should_serve(with_replica, published) -> None:
    async def work(replica, host):
        await replica.load(published("r1"))
        await host.die()
        await until(lambda: len(host.engines) == 2 and replica.ready)
        assert host.engine.version == "r1"
        assert seen(replica) == ("ready", "r1", None)
        assert value(replica._metrics.engine_restarts) == 1

    with_replica(work)


def test_a_release_that_is_wanted_during_a_restart_is_the_first_that_is_served_after_it(
    with_replica, published
) -> None:
    async def work(replica, host):
        await host.hang_in_a_restart()  # it is starting with r0
        starting = replica._watcher
        replica.want(published("r1", probe=PROBE))
        host.may_start.set()
        await replica.gate.wait()
        assert (host.engine.version, replica.served) == ("r1", "r1")
        assert replica._watcher is starting

    with_replica(work)


def test_a_load_takes_over_from_a_restart_that_does_not_end(with_replica, published) -> None:
    async def work(replica, host):
        host.prepare = lambda engine: engine.answers.update({"/health": engine.never})
        await host.die()
        await until(lambda: len(host.engines) == 2)
        host.prepare = lambda engine: None
        await replica.load(published("r1"))
        assert (replica.served, host.engine.version) == ("r1", "r1")

    with_replica(work)


@pytest.mark.parametrize(
    ("failure", "restarts"), [(EngineError("no port"), 2), (OSError(12, "no memory"), 2), (ValueError("no port"), 12)]
)
def test_a_server_that_fails_too_often_in_a_row_is_given_up_until_a_load_brings_it_back(
    with_replica, published, monkeypatch, failure, restarts
) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.02)

    async def work(replica, host):
        host.starts_fail = failure
        await host.die()
        await until(lambda: replica.state == "failed")
        assert f"giving up after {restarts} restarts in a row" in replica.error
        assert "no port" in replica.error or "no memory" in replica.error
        host.starts_fail = None
        await replica.load(published("r1"))
        assert seen(replica) == ("ready", "r1", None)
        await host.die()  # and it is watched again
        started = len(host.engines)
        await until(lambda: len(host.engines) > started and replica.ready)

    with_replica(work, "--inference.max-restarts", str(restarts))


def test_one_that_recovers_is_tried_max_restarts_times_the_load_that_failed_being_the_first(
    with_replica, published, monkeypatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)

    async def work(replica, host):
        with pytest.raises(LoadFailedError):
            await replica.load(published("r1", probe=WRONG))
        replica.recover()
        replica.recover()  # it is under way: once more is nothing
        assert (replica.state, "differ by 0.1" in replica.error) == ("restarting", True)
        await until(lambda: replica.state == "failed")
        assert len(host.engines) == 4
        assert "giving up after 3 restarts in a row" in replica.error
        assert "differ by 0.1" in replica.error

    with_replica(work, "--inference.max-restarts", "3")


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_stop_ends_the_server_with_the_requests_in_work(with_replica, generate) -> None:
    async def ask(replica):
        with replica.use() as client:
            return await generate(client)

    async def work(replica, host):
        held = asyncio.Event()
        loop = asyncio.get_running_loop()

        async def answer(http, body):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(held.wait(), loop))
            return host.engine.generation([5, 6, 2])

        host.engine.answers["/generate"] = answer
        running = asyncio.create_task(ask(replica))
        await until(lambda: "/generate" in routes(host.engine))
        stopping = asyncio.create_task(replica.stop())
        with pytest.raises(EngineError):
            await running
        assert (replica.ready, replica.state) == (False, "stopped")
        held.set()
        await stopping
        assert host.pid is None

    with_replica(work)


# --- a server that somebody else runs ---------------------------------------------------------------------------------


@pytest.fixture
def attached(tmp_path, config, published, fake_engine):
    """Run `work(replica)` over a replica attached to `fake_engine` by inference.url."""

    def run(work, *settings, start="v0"):
        async def main():
            replica = Replica(
                "engine-0", config(tmp_path, "--inference.url", fake_engine.url, *settings), Metrics(), None
            )
            try:
                await replica.start(published(start))
                await work(replica)
            finally:
                await replica.stop()

        asyncio.run(main())

    return run


def test_an_attached_server_that_has_the_release_is_used_as_it_is(attached, fake_engine) -> None:
    async def work(replica):
        shown = replica.describe()
        assert (shown["url"], shown["release_id"], shown["pid"]) == (fake_engine.url, "v0", None)

    attached(work)
    assert "/update_weights_from_disk" not in routes(fake_engine)


def test_an_attached_server_that_was_left_paused_by_a_service_that_was_killed_goes_on(
    tmp_path, config, published, fake_engine
) -> None:
    def paused(http, body):
        goes_on = "/continue_generation" in routes(fake_engine)
        return fake_engine._default("/generate", body) if goes_on else refuses(http, body)

    async def main():
        fake_engine.answers["/generate"] = paused
        replica = Replica("engine-0", config(tmp_path, "--inference.url", fake_engine.url), Metrics(), None)
        await replica.start(published("v0", probe=PROBE))
        assert seen(replica) == ("ready", "v0", None)
        await replica.stop()

    asyncio.run(main())


def test_an_attached_server_with_other_weights_loads_the_release_first(attached, fake_engine) -> None:
    async def work(replica):
        assert fake_engine.version == replica.served == "r7"

    attached(work, start="r7")


def test_a_load_that_fails_on_an_attached_server_leaves_it_running_and_closes_the_gate(
    attached, published, fake_engine
) -> None:
    async def work(replica):
        begin = len(fake_engine.calls)
        fake_engine.answers["/update_weights_from_disk"] = lambda http, body: {"success": False, "message": "no disk"}
        with pytest.raises(LoadFailedError, match="no disk"):
            await replica.load(published("r1"))
        assert [route for route in routes(fake_engine)[begin:] if route.startswith(("/update", "/continue"))] == [
            "/update_weights_from_disk",
            "/continue_generation",  # it is left as it was found
            "/update_weights_from_disk",  # tried twice
        ]
        assert seen(replica) == ("failed", "v0", "the engine did not load /weights: no disk")
        replica.recover()  # there is nothing that we could restart: it is asked again
        del fake_engine.answers["/update_weights_from_disk"]
        await replica.gate.wait()
        assert seen(replica) == ("ready", "r1", None)
        await replica.load(published("r2"))
        assert seen(replica) == ("ready", "r2", None)

    attached(work)


def test_an_attached_server_that_somebody_restarted_gets_the_release_again(attached, fake_engine, monkeypatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)

    async def work(replica):
        fake_engine.version = "default"
        await until(lambda: fake_engine.version == "v0")
        await replica.gate.wait()
        assert replica.served == "v0"

    attached(work)


def test_an_attached_server_that_is_gone_for_a_while_is_out_of_rotation_until_it_is_back(
    attached, fake_engine, monkeypatch
) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "BACKOFF_S", 0.01)
    monkeypatch.setattr(module, "MAX_BACKOFF_S", 0.02)

    async def work(replica):
        fake_engine.answers["/model_info"] = refuses
        await until(lambda: not replica.ready)
        await until(lambda: value(replica._metrics.engine_restarts) > 7)  # more than max-restarts
        assert replica.state == "restarting"
        assert "no memory" in replica.error
        del fake_engine.answers["/model_info"]
        await replica.gate.wait()
        assert seen(replica) == ("ready", "v0", None)

    attached(work)


# --- a release that the trainer alone holds ---------------------------------------------------------------------------


def in_trainer(release: Published) -> Published:
    return dataclasses.replace(release, on_disk=False)


def test_a_server_that_dies_waits_for_the_files_of_the_release_wanted_and_says_that_it_does(
    tmp_path, config, published, fake_hosts
) -> None:
    asked = []

    async def main():
        host = fake_hosts["engine-0"]
        replica = Replica(host.name, config(tmp_path), Metrics(), host, lambda: asked.append(replica.lacks_files))
        try:
            await replica.start(published("r0"))
            replica.want(in_trainer(published("r1")))
            replica._open(published("r1"))  # as after a transfer
            await host.die()
            await until(lambda: asked)
            assert (asked, replica.lacks_files, replica.ready) == ([True], True, False)
            started = len(host.engines)
            replica.provide(published("r0"))  # not the one wanted
            await asyncio.sleep(0.02)
            assert (replica.lacks_files, len(host.engines)) == (True, started)
            replica.provide(published("r1"))
            await replica.gate.wait()
            assert (replica.served, host.engine.version, replica.lacks_files) == ("r1", "r1", False)
        finally:
            await replica.stop()

    asyncio.run(main())


def test_a_release_that_comes_while_a_server_restarts_is_loaded_once_its_files_are_there(
    tmp_path, config, published, fake_hosts
) -> None:
    asked = []

    async def main():
        host = fake_hosts["engine-0"]
        replica = Replica(host.name, config(tmp_path), Metrics(), host, lambda: asked.append(replica.lacks_files))
        try:
            await replica.start(published("r0"))
            await host.hang_in_a_restart()
            replica.want(in_trainer(published("r1")))  # the others were sent it meanwhile
            host.may_start.set()
            await until(lambda: asked)
            pass_time(3600)  # a step may take longer than a start
            await asyncio.sleep(0.05)
            assert (asked, replica.lacks_files, len(host.engines)) == ([True], True, 2)
            assert "/update_weights_from_disk" not in routes(host.engine)  # there is nothing to read
            replica.provide(published("r1"))
            await replica.gate.wait()
            assert (replica.served, host.engine.version, len(host.engines)) == ("r1", "r1", 2)
        finally:
            await replica.stop()

    asyncio.run(main())


def test_a_release_that_comes_while_the_old_server_is_ended_starts_none_without_its_files(
    tmp_path, config, published, fake_hosts, monkeypatch
) -> None:
    async def main():
        host = fake_hosts["engine-0"]
        replica = Replica(host.name, config(tmp_path), Metrics(), host, lambda: None)
        try:
            await replica.start(published("r0"))
            stop = host.stop

            async def stop_and_hear_of_a_release() -> None:
                await stop()
                monkeypatch.setattr(host, "stop", stop)
                replica.want(in_trainer(published("r1")))

            await host.die()
            monkeypatch.setattr(host, "stop", stop_and_hear_of_a_release)
            await until(lambda: replica.lacks_files)
            assert (replica.state, len(host.engines)) == ("restarting", 1)
            replica.provide(published("r1"))
            await replica.gate.wait()
            assert (replica.served, host.engine.version, len(host.engines)) == ("r1", "r1", 2)
        finally:
            await replica.stop()

    asyncio.run(main())


class Gone:
    """A trainer that no engine can meet."""

    buckets = ()
    backend = "gloo"

    def joined(self, engine):
        return False

    async def listen(self, engine):
        raise EngineError("the trainer is gone")


def test_an_attached_server_that_may_hold_half_of_a_release_goes_on_once_it_has_read_the_files(
    attached, published, fake_engine
) -> None:
    async def work(replica):
        begin = len(fake_engine.calls)
        await replica.load(published("r1"), Gone())
        assert seen(replica) == ("ready", "r1", None)
        changes = ("/pause", "/continue", "/update")
        assert [route for route, _ in fake_engine.calls[begin:] if route.startswith(changes)] == [
            "/pause_generation",
            "/update_weights_from_disk",
            "/continue_generation",
        ]

    attached(work)


def test_an_attached_server_that_may_hold_parts_of_two_releases_does_not_go_on_before_one_is_in(
    attached, published, fake_engine
) -> None:
    async def work(replica):
        fake_engine.answers["/update_weights_from_disk"] = refuses
        begin = len(fake_engine.calls)
        with pytest.raises(LoadFailedError):
            await replica.load(in_trainer(published("r1")), Gone())
        fake_engine.version = "r1"  # it was told the name with the last tensors
        with pytest.raises(LoadFailedError):
            await replica.load(published("r1"))
        assert "/continue_generation" not in routes(fake_engine)[begin:]
        del fake_engine.answers["/update_weights_from_disk"]
        await replica.load(published("r1"))
        assert routes(fake_engine)[begin:].count("/continue_generation") == 1
        assert seen(replica) == ("ready", "r1", None)

    attached(work)


def test_an_attached_server_that_a_killed_service_may_have_sent_a_part_of_a_release_reads_one_first(
    attached, fake_engine
) -> None:
    async def work(replica):
        loads = [body["weight_version"] for route, body in fake_engine.calls if route == "/update_weights_from_disk"]
        assert loads == ["v0"]  # though it says that it holds that

    attached(work, "--training.sync.transport", "distributed")


def test_an_attached_server_that_a_load_left_paused_goes_on_though_it_holds_the_release(
    attached, published, fake_engine
) -> None:
    async def work(replica):
        fails = [True]

        def once(http, body):
            return refuses(http, body) if fails and fails.pop() else {}

        fake_engine.answers["/continue_generation"] = once
        begin = len(fake_engine.calls)
        await replica.load(published("r1"))
        assert routes(fake_engine)[begin:].count("/continue_generation") == 2
        assert routes(fake_engine)[begin:].count("/update_weights_from_disk") == 1

    attached(work)


def test_a_transfer_that_fails_restarts_nothing_since_there_are_no_files_to_restart_with(
    with_replica, published
) -> None:
    async def work(replica, host):
        with pytest.raises(LoadFailedError, match="the trainer is gone"):
            await replica.load(in_trainer(published("r1")), Gone())
        assert (replica.state, len(host.engines)) == ("failed", 1)
        await replica.load(published("r1"))
        assert seen(replica) == ("ready", "r1", None)

    with_replica(work)


def test_the_shorter_context_of_engine_and_configuration_holds(attached, fake_engine) -> None:
    async def shorter(replica):
        assert replica.context_length == 100

    async def longer(replica):
        assert replica.context_length == 512

    attached(shorter, "--inference.context-length", "100")
    attached(longer, "--inference.context-length", "4096")
    fake_engine.answers["/model_info"] = lambda http, body: {"weight_version": "v0"}
    with pytest.raises(EngineError, match=r"set inference\.context-length"):
        attached(longer)


def test_an_attached_server_that_is_not_there_is_named(tmp_path, config, published) -> None:
    async def main(url):
        settings = ["--inference.url", url, "--reef.ready-timeout", "0.3"]
        replica = Replica("engine-0", config(tmp_path, *settings), Metrics(), None)
        with pytest.raises(EngineError, match=rf"engine-0 at {url} is not up after 0\.3 s"):
            await replica.start(published("r0"))
        assert replica.state == "failed"
        await replica.stop()

    with socket.socket() as taken:  # bound and not listening: nobody else gets the port, and it refuses
        taken.bind(("127.0.0.1", 0))
        asyncio.run(main(f"http://127.0.0.1:{taken.getsockname()[1]}"))

"""Tensors over a process group into a running engine: what Reef relies on, of any server that speaks SGLang's API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from reef.engines.client import EngineClient
from reef.engines.transfer import group_name, transfer_weights
from reef.errors import EngineError
from reef.training.buckets import buckets
from reef.training.send import Sender
from reef.types import Bucket, Published

pytestmark = pytest.mark.slow  # the contract's servers

PROMPT = [7, 40, 3, 18, 99, 120, 5, 61]
LONG = 1900  # tokens: still under way when the next call comes, also on a busy machine
BUCKET_BYTES = 30_000  # several buckets; the embedding is larger than one


class FileTransfer:
    """The trainer's side, with the tensors of a directory in the place of a trainer."""

    def __init__(self, model: Path) -> None:
        self.buckets = buckets(model, BUCKET_BYTES)
        self.tensors = load_file(model / "model.safetensors")
        self.backend = "gloo"
        self.num_listens = 0
        self.lose_at: int | None = None  # the bucket at which the group is lost
        self.sender = Sender()
        self._ports: dict[str, int] = {}

    def joined(self, engine: str) -> bool:
        return engine in self._ports

    async def listen(self, engine: str) -> tuple[str, int]:
        self.num_listens += 1
        host, self._ports[engine] = self.sender.listen(engine, "127.0.0.1")
        return host, self._ports[engine]

    async def join(self, engine: str, world_size: int, timeout_s: float) -> None:
        name = group_name(engine, self._ports[engine])
        await asyncio.to_thread(self.sender.join, engine, name, world_size, timeout_s)

    async def send(self, engine: str, number: int) -> None:
        if number == self.lose_at:
            self.sender.leave(engine)
        await asyncio.to_thread(self.sender.send, engine, self.buckets[number], self.tensors)


@pytest.fixture
def transfer(model_dir: Callable[[str], Path]) -> Iterator[FileTransfer]:
    """Sends model `qwen3-b`; the server holds `qwen3-a`."""
    made = FileTransfer(model_dir("qwen3-b"))
    yield made
    made.sender.close()


Step = Callable[[EngineClient], Any]


def with_client(server: Any, work: Step) -> Any:
    async def main() -> Any:
        client = EngineClient(server.url, 30)
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


async def put(client: EngineClient, transfer: FileTransfer, release_id: str, flush_cache: bool = True) -> None:
    release = Published(release_id, "/nowhere", "sha256:0", 1, None, on_disk=False)
    await transfer_weights(client, "engine-0", 1, transfer, release, flush_cache, 30)


def scores(server: Any) -> list[float]:
    answer = server.generate(PROMPT, 1, temperature=0, logprob_start_len=0)
    return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def expected(reference: Any, model: Path) -> list[float]:
    table = reference(model, PROMPT)
    return [table[i, token].item() for i, token in enumerate(PROMPT[1:])]


def test_weights_sent_in_buckets_are_those_of_the_files(server, transfer, reference, model_dir) -> None:
    async def work(client: EngineClient) -> None:
        for release_id in ("r1", "r2"):
            await client.pause("retract")
            await put(client, transfer, release_id)
            await client.resume()
            assert (await client.model_info())["weight_version"] == release_id

    assert len(transfer.buckets) > 3
    assert scores(server) == pytest.approx(expected(reference, server.path), abs=1e-4)
    with_client(server, work)
    assert scores(server) == pytest.approx(expected(reference, model_dir("qwen3-b")), abs=1e-4)
    assert transfer.num_listens == 1  # one group for both


def test_a_request_that_lives_through_a_transfer_has_a_span_for_each_release(server, transfer, reference) -> None:
    async def work(client: EngineClient) -> None:
        await client.pause("retract")
        await put(client, transfer, "r1")
        await client.resume()

    running = server.started(PROMPT, LONG, temperature=0)
    with_client(server, work)
    answer = running.result(60)
    spans = answer["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["v0", "r1"]
    assert 0 < spans[0]["end"] == spans[1]["start"] < LONG
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    ids = answer["output_ids"]
    models = {"v0": server.path, "r1": server.path.parent / "qwen3-b"}
    for span in spans:
        table = reference(models[span["version"]], PROMPT + ids)
        for i in range(span["start"], span["end"]):
            assert logprobs[i] == pytest.approx(table[len(PROMPT) + i - 1, ids[i]].item(), abs=1e-4)


def test_after_a_group_that_was_lost_the_next_transfer_makes_another(server, transfer, reference, model_dir) -> None:
    async def work(client: EngineClient) -> None:
        await client.pause("retract")
        transfer.lose_at = 2
        with pytest.raises(EngineError):
            await put(client, transfer, "r1")
        assert client.group is None
        transfer.lose_at = None
        await put(client, transfer, "r2")
        await client.resume()

    with_client(server, work)
    assert server.get("/model_info").json()["weight_version"] == "r2"
    assert scores(server) == pytest.approx(expected(reference, model_dir("qwen3-b")), abs=1e-4)
    assert transfer.num_listens == 2


def test_what_the_engine_cannot_do_is_an_error_that_names_the_route(server) -> None:
    bucket = Bucket(("model.norm.weight",), ("float32",), ((64,),))

    async def work(client: EngineClient) -> None:
        with pytest.raises(EngineError, match="/update_weights_from_distributed"):
            await client.receive(bucket, None, False, 10)  # no session
        with pytest.raises(EngineError, match="/end_weight_update"):
            await client.end_update(10)
        await client.begin_update(10)
        with pytest.raises(EngineError, match="/begin_weight_update"):
            await client.begin_update(10)
        client.group = "nobody"
        with pytest.raises(EngineError, match="nobody"):
            await client.receive(bucket, None, False, 10)
        await client.end_update(10)
        with pytest.raises(EngineError, match="/destroy_weights_update_group"):
            await client.leave_group(10)

    with_client(server, work)


# --- the embedded engine is stricter ----------------------------------------------------------------------------------


only_embedded = pytest.mark.parametrize("contract_server", ["embedded"], indirect=True)


@pytest.fixture
def fresh(server: Any) -> Iterator[Any]:
    """No session is left open."""
    yield server
    server.post("/end_weight_update")


async def begun(client: EngineClient, transfer: FileTransfer) -> None:
    host, port = await transfer.listen("engine-0")
    name = group_name("engine-0", port)
    await asyncio.gather(client.join_group(name, host, port, 2, "gloo", 20), transfer.join("engine-0", 2, 20))
    await client.begin_update(10)


@only_embedded
def test_nothing_of_a_half_received_release_is_in_use(fresh, transfer, reference) -> None:
    async def work(client: EngineClient) -> None:
        await begun(client, transfer)
        for number, bucket in enumerate(transfer.buckets[:-1]):
            await asyncio.gather(client.receive(bucket, "r1", True, 10), transfer.send("engine-0", number))
        with pytest.raises(EngineError, match=r"the weights received lacks? tensors: .*The weights before stay in use"):
            await client.end_update(10)

    with_client(fresh, work)
    assert fresh.get("/model_info").json()["weight_version"] == "v0"
    assert scores(fresh) == pytest.approx(expected(reference, fresh.path), abs=1e-4)


@only_embedded
def test_while_it_is_not_paused_a_transfer_waits_for_the_requests_before_it(fresh, transfer) -> None:
    running = fresh.started(PROMPT, LONG, temperature=0)
    with_client(fresh, lambda client: put(client, transfer, "r1"))
    answer = running.result(60)
    assert answer["meta_info"]["weight_version"] == "v0"
    assert [span["version"] for span in answer["meta_info"]["weight_versions"]] == ["v0"]
    assert fresh.generate(PROMPT, 1)["meta_info"]["weight_version"] == "r1"


@only_embedded
def test_a_flush_while_requests_are_paused_in_place_is_refused(fresh, transfer) -> None:
    running = fresh.started(PROMPT, LONG, temperature=0)
    fresh.post("/pause_generation", mode="in_place")
    with pytest.raises(EngineError, match="flush_cache is set but requests are running"):
        with_client(fresh, lambda client: put(client, transfer, "r1"))
    with_client(fresh, lambda client: put(client, transfer, "r1", flush_cache=False))
    fresh.post("/continue_generation")
    assert [span["version"] for span in running.result(60)["meta_info"]["weight_versions"]] == ["v0", "r1"]


@only_embedded
@pytest.mark.parametrize(
    ("bucket", "message"),
    [
        (Bucket(("model.norm.weight",), ("float32",), ((65,),)), r"model\.norm\.weight has shape \(65,\), expected"),
        (Bucket(("model.norm.weight",), ("int8",), ((64,),)), r"model\.norm\.weight is int8, expected one of float32"),
        (Bucket(("model.other.weight",), ("float32",), ((64,),)), r"model\.other\.weight came twice, or is not a"),
        (Bucket(("model.norm.weight",) * 2, ("float32",) * 2, ((64,),) * 2), r"got 2, 2 and 2 \(1 different\)"),
        (Bucket(("model.norm.weight",), (), ((64,),)), "got 0, 1 and 1"),
    ],
    ids=["shape", "dtype", "name", "twice", "lengths"],
)
def test_a_tensor_that_is_not_the_models_ends_the_group(fresh, transfer, bucket, message) -> None:
    async def work(client: EngineClient) -> None:
        await begun(client, transfer)
        with pytest.raises(EngineError, match=message):
            await client.receive(bucket, None, False, 10)
        with pytest.raises(EngineError, match="there is no group"):
            await client.receive(transfer.buckets[0], None, False, 10)
        transfer.tensors["large"] = torch.zeros(8 * 2**20)
        with pytest.raises(EngineError, match="failed"):  # the sender sees it too
            await asyncio.to_thread(
                transfer.sender.send, "engine-0", Bucket(("large",), ("float32",), ((8 * 2**20,),)), transfer.tensors
            )

    with_client(fresh, work)


@only_embedded
@pytest.mark.parametrize(
    ("route", "fields", "message"),
    [
        ("/init_weights_update_group", {"master_port": 1}, "master_address, rank_offset, world_size must be given"),
        ("/init_weights_update_group", {"master_port": "1"}, "master_port must be of type int"),
        ("/update_weights_from_distributed", {"names": []}, "dtypes, shapes must be given"),
        ("/update_weights_from_distributed", {"names": [1], "dtypes": [], "shapes": []}, "names must be a list of"),
        ("/update_weights_from_distributed", {"load_format": "flattened_bucket"}, "is not supported"),
        ("/begin_weight_update", {"other": 1}, "unknown field 'other'"),
    ],
)
def test_bodies_are_checked(fresh, route, fields, message) -> None:
    response = fresh.post(route, **fields)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@only_embedded
def test_only_gloo_is_spoken(fresh) -> None:
    address = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    response = fresh.post("/init_weights_update_group", **address)  # nccl is SGLang's default
    assert response.status_code == 400
    assert "backend is 'nccl'; this engine runs on a CPU and speaks 'gloo'" in response.json()["message"]

"""Routes by which weights come over a process group: SGLang's, in its order.

    /init_weights_update_group      join
    /begin_weight_update            a session begins
    /update_weights_from_distributed  once for each bucket of tensors
    /end_weight_update              all tensors are there: they replace the weights, at once
    /destroy_weights_update_group   leave

In SGLang each bucket is in use, and named, as soon as it has come. Here a session that breaks off changes nothing, and
the version that a bucket names counts from the end of its session.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reef.engines.embedded.engine import Engine
from reef.engines.embedded.errors import BadRequestError, ModelError
from reef.engines.embedded.http import control_fields, read_json, respond
from reef.engines.embedded.receive import Receiver

T = TypeVar("T")

DEFAULT_GROUP = "weight_update_group"
"""SGLang's."""


class Updates:
    """These routes over one engine."""

    def __init__(self, engine: Engine, receiver: Receiver) -> None:
        self._engine = engine
        self._receiver = receiver
        self._turn = asyncio.Lock()
        self._version: str | None = None
        self._flush_cache = False

    def routes(self) -> list[Route]:
        """All POST."""
        routes = {
            "/init_weights_update_group": self.join,
            "/destroy_weights_update_group": self.leave,
            "/begin_weight_update": self.begin,
            "/update_weights_from_distributed": self.receive,
            "/end_weight_update": self.end,
        }
        return [Route(path, endpoint, methods=["POST"]) for path, endpoint in routes.items()]

    async def join(self, request: Request) -> Response:
        """POST /init_weights_update_group."""
        types = {"master_address": str, "master_port": int, "rank_offset": int, "world_size": int}
        fields = control_fields(await read_json(request), types | {"group_name": str, "backend": str}, ignored=("rid",))
        missing = [name for name in types if name not in fields]
        if missing:
            raise BadRequestError(f"{', '.join(missing)} must be given")
        return await self._answer(
            lambda: self._receiver.join(
                fields.get("group_name", DEFAULT_GROUP),
                fields["master_address"],
                fields["master_port"],
                fields["rank_offset"],
                fields["world_size"],
                fields.get("backend", "nccl"),
            ),
            "Succeeded to initialize custom process group.",
        )

    async def leave(self, request: Request) -> Response:
        """POST /destroy_weights_update_group."""
        fields = control_fields(await read_json(request), {"group_name": str}, ignored=("rid",))
        name = fields.get("group_name", DEFAULT_GROUP)
        return await self._answer(lambda: self._receiver.leave(name), "Succeeded to destroy custom process group.")

    async def begin(self, request: Request) -> Response:
        """POST /begin_weight_update."""
        control_fields(await read_json(request), {}, ignored=("rid", "selector"))
        return await self._answer(self._begin, "Success")

    async def receive(self, request: Request) -> Response:
        """POST /update_weights_from_distributed."""
        lists = {"names": list, "dtypes": list, "shapes": list}
        fields = control_fields(
            await read_json(request),
            lists | {"group_name": str, "flush_cache": bool, "abort_all_requests": bool, "weight_version": str},
            ignored=("rid", "selector", "torch_empty_cache"),
            fixed={"load_format": (None,)},
        )
        missing = [name for name in lists if name not in fields]
        if missing:
            raise BadRequestError(f"{', '.join(missing)} must be given")
        for name, kind in (("names", str), ("dtypes", str), ("shapes", list)):
            if not all(isinstance(value, kind) for value in fields[name]):
                raise BadRequestError(f"{name} must be a list of type {kind.__name__}")
        if fields.get("abort_all_requests"):
            await self._engine.abort_matching(lambda _: True)
        return await self._answer(
            lambda: self._receive(
                fields.get("group_name", DEFAULT_GROUP),
                (fields["names"], fields["dtypes"], fields["shapes"]),
                fields.get("weight_version"),
                fields.get("flush_cache", True),
            ),
            "Succeeded to receive.",
        )

    async def end(self, request: Request) -> Response:
        """POST /end_weight_update: waits like a load from disk for the requests that came before, unless paused."""
        control_fields(await read_json(request), {}, ignored=("rid",))
        async with self._turn:
            try:
                weights = await _in_thread(self._receiver.take)
            except ModelError as error:
                return _failed(error)
            if weights is None:
                return respond({"success": True, "message": "Success"})
            outcome = await self._engine.load(weights, self._version, self._flush_cache)
        content = {"success": outcome.success, "message": outcome.message}
        return respond(content, 200 if outcome.success else 400)

    def _begin(self) -> None:
        self._receiver.begin()
        self._version, self._flush_cache = None, False

    def _receive(
        self, group: str, bucket: tuple[list[str], list[str], list[list[int]]], version: str | None, flush_cache: bool
    ) -> None:
        self._receiver.receive(group, *bucket)
        self._version = version or self._version
        self._flush_cache |= flush_cache

    async def _answer(self, work: Callable[[], None], message: str) -> Response:
        async with self._turn:
            try:
                await _in_thread(work)
            except ModelError as error:
                return _failed(error)
        return respond({"success": True, "message": message})


def _failed(error: ModelError) -> Response:
    message = f"Failed to update weights: {error}. The weights before stay in use."
    return respond({"success": False, "message": message}, 400)


async def _in_thread(work: Callable[[], T]) -> T:
    """Runs what waits for another process in a thread of its own, which does not hold up the end of this one."""
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised again by who waits)
            result.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return await asyncio.wrap_future(result)

"""The output items of a response, and the events that build them: reasoning, message, function calls.

    delta -> Output.push -> events ... -> Output.finish -> the last events; `Output.items` is what they built

A whole answer is made the same way, so that it cannot differ from a streamed one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from reef.chat.conversation import read_arguments
from reef.chat.reply import Delta, ReasoningDelta, Reply, TextDelta, ToolCallArguments, ToolCallBegin

Event = dict[str, Any]  # without its sequence number
Namespaces = Mapping[str, tuple[str, str]]  # of functions in one, by the name that the model knows: it, and their own


def whole_output(request_id: str, namespaces: Namespaces, reply: Reply, cut: bool) -> list[dict[str, Any]]:
    """The items of a reply that is whole. `cut`: it has no end, so that its last item is incomplete."""
    output = Output(request_id, namespaces)
    for delta in _deltas(reply):
        for _ in output.push(delta):
            pass
    for _ in output.finish(cut):
        pass
    return output.items


class Output:
    """The items as the deltas of one reply come. One is open at a time; the next kind of delta closes it."""

    def __init__(self, request_id: str, namespaces: Namespaces) -> None:
        self.items: list[dict[str, Any]] = []
        self._name = request_id.removeprefix("req_")
        self._namespaces = namespaces
        self._open: _Text | _Call | None = None

    def push(self, delta: Delta) -> Iterator[Event]:
        """The events of one more delta."""
        if isinstance(delta, ToolCallBegin):
            yield from self._close()
            namespace, name = self._namespaces.get(delta.name, (None, delta.name))
            yield from self._begin(_Call(self._place("fc"), delta.id, namespace, name))
        elif isinstance(delta, ToolCallArguments):
            if isinstance(self._open, _Call):
                yield self._open.add(delta.text)
        elif delta.text:
            kind = _Thinking if isinstance(delta, ReasoningDelta) else _Message
            if type(self._open) is not kind:
                yield from self._close()
                yield from self._begin(kind(self._place("rs" if kind is _Thinking else "msg")))
            assert self._open is not None
            yield self._open.add(delta.text)

    def finish(self, cut: bool) -> Iterator[Event]:
        """What closes the last item; a reply that says nothing at all is an empty message."""
        if not self.items:
            yield from self._begin(_Message(self._place("msg")))
        yield from self._close(cut)

    def _place(self, prefix: str) -> tuple[str, int]:
        index = len(self.items)
        return f"{prefix}_{self._name}_{index}", index

    def _begin(self, item: "_Text | _Call") -> Iterator[Event]:
        self._open = item
        self.items.append(item.shown("in_progress"))
        yield from item.begin()

    def _close(self, cut: bool = False) -> Iterator[Event]:
        if self._open is not None:
            item, self._open = self._open, None
            yield from item.end("incomplete" if cut or item.is_broken else "completed")
            self.items[item.index] = item.shown("incomplete" if cut or item.is_broken else "completed")


class _Text:
    """An item of one part of text."""

    part_type = ""
    event = ""
    is_broken = False

    def __init__(self, place: tuple[str, int]) -> None:
        self.id, self.index = place
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield _of("response.output_item.added", output_index=self.index, item=self.shown("in_progress"))
        yield self._of_part("response.content_part.added", part=self._part(""))

    def add(self, text: str) -> Event:
        self._texts.append(text)
        return self._of_part(f"{self.event}.delta", delta=text, **self._more)

    def end(self, status: str) -> Iterator[Event]:
        text = "".join(self._texts)
        yield self._of_part(f"{self.event}.done", text=text, **self._more)
        yield self._of_part("response.content_part.done", part=self._part(text))
        yield _of("response.output_item.done", output_index=self.index, item=self.shown(status))

    def shown(self, status: str) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def _more(self) -> dict[str, Any]:
        return {}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.part_type, "text": text}

    def _content(self, status: str) -> list[dict[str, Any]]:
        return [] if status == "in_progress" else [self._part("".join(self._texts))]

    def _of_part(self, type: str, **fields: Any) -> Event:
        return _of(type, item_id=self.id, output_index=self.index, content_index=0, **fields)


class _Thinking(_Text):
    part_type = "reasoning_text"
    event = "response.reasoning_text"

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": self._content(status),
            "encrypted_content": None,
        }


class _Message(_Text):
    part_type = "output_text"
    event = "response.output_text"

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": self._content(status),
        }

    @property
    def _more(self) -> dict[str, Any]:
        return {"logprobs": []}  # the receipt has them

    def _part(self, text: str) -> dict[str, Any]:
        return {**super()._part(text), "annotations": [], "logprobs": []}


class _Call:
    """A function call."""

    def __init__(self, place: tuple[str, int], call_id: str, namespace: str | None, name: str) -> None:
        self.id, self.index = place
        self._call_id = call_id
        self._namespace = namespace
        self._name = name
        self._arguments: list[str] = []

    @property
    def is_broken(self) -> bool:
        """Whether its arguments are none that a call can have: the reply has it as text."""
        try:
            read_arguments("".join(self._arguments))
        except ValueError:
            return True
        return False

    def begin(self) -> Iterator[Event]:
        yield _of("response.output_item.added", output_index=self.index, item=self.shown("in_progress"))

    def add(self, text: str) -> Event:
        self._arguments.append(text)
        return self._of_call("response.function_call_arguments.delta", delta=text)

    def end(self, status: str) -> Iterator[Event]:
        arguments = "".join(self._arguments)
        yield self._of_call("response.function_call_arguments.done", name=self._name, arguments=arguments)
        yield _of("response.output_item.done", output_index=self.index, item=self.shown(status))

    def shown(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            **({"namespace": self._namespace} if self._namespace is not None else {}),
            "arguments": "" if status == "in_progress" else "".join(self._arguments),
        }

    def _of_call(self, type: str, **fields: Any) -> Event:
        return _of(type, item_id=self.id, output_index=self.index, **fields)


def _deltas(reply: Reply) -> Sequence[Delta]:
    made: list[Delta] = [ReasoningDelta(reply.reasoning or ""), TextDelta(reply.content)]
    for index, call in enumerate(reply.tool_calls):
        made += [ToolCallBegin(index, call.id, call.name), ToolCallArguments(index, call.arguments)]
    return made


def _of(type: str, **fields: Any) -> Event:
    return {"type": type, **fields}

"""Tool calls between text: what holds for every format.

A format says which markers begin a call and reads on from there; `Calls` decides what becomes of what it read:

    text -> attempt -> begin -> arguments ... -> end -> text      a call
    text -> attempt ... FormatError               -> text      no call: all that was read since `attempt` is text

White space beside a call belongs to neither text nor call. It is dropped before a call, between calls and at the end of
the reply; text after a call keeps the white space before it if there is text before the call too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reef.chat.conversation import ToolCall, read_arguments
from reef.chat.parsing.source import SPACE, FormatError, HeldSpace, Markers, Reading, Source, ignore
from reef.chat.parsing.transcript import Transcript

BLANKS = " \t\r\n"


class Calls:
    """The tool calls of one reply, and the text around them."""

    def __init__(
        self,
        source: Source,
        transcript: Transcript,
        tools: Mapping[str, Mapping[str, Any]],
        call_id: Callable[[int], str],
    ) -> None:
        """`tools`: the parameters' JSON schema by the tool's name. `call_id`: the id of call 0, 1, ..."""
        self.tools = tools
        self._source = source
        self._transcript = transcript
        self._call_id = call_id
        self._index = -1
        self._space = HeldSpace(BLANKS)
        self._after_call = False
        self._raw: list[str] = []  # read since `attempt`
        self._name: str | None = None
        self._arguments: list[str] = []
        self._refused = False  # names no tool: what is read is text, yet read to its end

    @property
    def has_arguments(self) -> bool:
        """Whether some of the call's arguments have come."""
        return bool(self._arguments)

    def text(self, piece: str) -> None:
        """Text between calls."""
        if ready := self._trimmed(piece):
            self._transcript.text(ready)

    def attempt(self) -> None:
        """What is read from here on is one call, or else text."""
        self._raw = []
        self._name = None
        self._arguments = []
        self._refused = False
        self._source.sink = self._raw.append

    def begin(self, name: str) -> None:
        """The call's name is known. A call of a tool that there is not is text from here on, to its end."""
        if self._name is not None:
            raise FormatError
        self._name = name
        if name not in self.tools:
            self._refused = True
            self._source.sink = self.text
            self.text("".join(self._raw))
            return
        self._index += 1
        self._transcript.begin(self._index, self._call_id(self._index), name)
        self._transcript.arguments(self._index, "".join(self._arguments))

    def arguments(self, piece: str) -> None:
        """More of the arguments' JSON text, which may come before the name."""
        if self._refused:
            return
        self._arguments.append(piece)
        if self._name is not None:
            self._transcript.arguments(self._index, piece)

    def end(self) -> None:
        """The call is whole. Raises FormatError if it has no name, or arguments that `read_arguments` refuses."""
        if not self._refused:
            if self._name is None:
                raise FormatError
            if not self._arguments:
                self.arguments("{}")
            text = "".join(self._arguments)
            try:
                read_arguments(text)
            except ValueError:
                raise FormatError from None
            self._transcript.call(ToolCall(self._call_id(self._index), self._name, text))
            self._space.release()
            self._after_call = True
        self._raw = []
        self._name = None
        self._source.sink = self.text

    def close(self, *markers: str) -> Reading[None]:
        """Takes what may follow a call that has ended: one of these markers, also one that the end of the text cuts."""
        if not self._refused:
            self._source.sink = ignore
        blank = yield from self._source.skip(SPACE)
        marker = yield from self._source.literal(*markers, begun=True)
        self._source.sink = self.text
        if marker is None and not self._refused:
            self.text(blank)

    def fail(self) -> None:
        """What was read since `attempt` is text. A stream keeps what it has sent of it as a call."""
        if self._source.ended:
            self._source.take_rest()
        self._source.sink = self.text
        raw = "".join(self._raw)
        self._raw = []
        if self._name is None:
            self.text(raw)
        elif not self._refused:
            self._transcript.unstreamed_text(self._trimmed(raw))

    def finish(self) -> None:
        """The reply has ended."""
        if not self._after_call:
            self._transcript.text(self._space.release())

    def _trimmed(self, piece: str) -> str:
        ready = self._space.push(piece)
        if ready and self._after_call:
            self._after_call = False
            return ready if self._transcript.has_text else ready.lstrip(BLANKS)
        return ready


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    starts: Markers  # what begins a call
    special: frozenset[str]  # what may be a special token, and is needed in the text
    read: Callable[[Source, Calls, str], Reading[None]]  # calls, after `attempt` and the marker that began them
    opening: Callable[[Source, Calls], Reading[None]] | None = None  # calls without a marker, where the text begins
    short_ids: bool = False  # 9 characters, not 24


def read_with_calls(source: Source, calls: Calls, form: ToolFormat) -> Reading[None]:
    """Reads text and calls to the end."""
    source.sink = calls.text
    if form.opening is not None:
        try:
            yield from form.opening(source, calls)
        except FormatError:
            calls.fail()
    while (marker := (yield from source.before(form.starts))) is not None:
        calls.attempt()
        source.take(len(marker))
        try:
            yield from form.read(source, calls, marker)
        except FormatError:
            calls.fail()
    calls.finish()


def schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameters' JSON schema by the tool's name, of tools as OpenAI's chat API has them."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}

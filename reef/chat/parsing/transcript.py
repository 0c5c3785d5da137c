"""What the readers have found in one reply: deltas for a stream, and the whole reply."""

from reef.chat.conversation import ToolCall
from reef.chat.reply import Delta, ReasoningDelta, Reply, TextDelta, ToolCallArguments, ToolCallBegin


class Transcript:
    """One reply as it grows."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCall] = []
        self._deltas: list[Delta] = []
        self._kind: type[TextDelta] | type[ReasoningDelta] | int | None = None  # of the pieces; int: a call's arguments
        self._pieces: list[str] = []

    @property
    def has_text(self) -> bool:
        return bool(self._content)

    def text(self, piece: str) -> None:
        """Visible text."""
        self.unstreamed_text(piece)
        self._stream(TextDelta, piece)

    def unstreamed_text(self, piece: str) -> None:
        """Visible text of which a stream has sent something else already."""
        if piece:
            self._content.append(piece)

    def reasoning(self, piece: str) -> None:
        self._reasoning.append(piece)
        self._stream(ReasoningDelta, piece)

    def begin(self, index: int, call_id: str, name: str) -> None:
        self._close_piece()
        self._deltas.append(ToolCallBegin(index, call_id, name))

    def arguments(self, index: int, piece: str) -> None:
        self._stream(index, piece)

    def call(self, call: ToolCall) -> None:
        """A call that is whole; its deltas have been sent."""
        self._calls.append(call)

    def drain(self) -> list[Delta]:
        """Deltas since the last time, neighbours of one kind as one."""
        self._close_piece()
        deltas, self._deltas = self._deltas, []
        return deltas

    def reply(self) -> Reply:
        return Reply("".join(self._content), "".join(self._reasoning) or None, tuple(self._calls))

    def _stream(self, kind: type[TextDelta] | type[ReasoningDelta] | int, piece: str) -> None:
        if kind != self._kind:
            self._close_piece()
            self._kind = kind
        self._pieces.append(piece)

    def _close_piece(self) -> None:
        text = "".join(self._pieces)
        self._pieces.clear()
        if text and self._kind is not None:
            self._deltas.append(
                ToolCallArguments(self._kind, text) if isinstance(self._kind, int) else self._kind(text)
            )
        self._kind = None

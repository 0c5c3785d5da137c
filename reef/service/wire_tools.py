"""The tools of OpenAI's Responses: functions, and namespaces of functions.

A model knows functions by one name: of a namespace's it is `namespace.name`. Calls get their two names back.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field, Tag

from reef.errors import BadRequestError
from reef.service.wire import Body, JsonObject, ListOf
from reef.service.wire_items import Other, kind_of, qualified, unsupported
from reef.service.wire_openai import check_tools, shown_tool

# Run by the provider where the model asks for them; here none are, and a model that is not told of one never asks.
# Agents send them unasked (codex does), so that they are left out; the answer's `tools` shows what is left.
LEFT_OUT: Final = ("web_search", "web_search_preview")
_SHOWN: Final = {"type", "name", "description", "parameters", "strict"}


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None
    allowed_callers: ListOf[Literal["direct"]] | None = None
    async_: Literal[False] | None = Field(None, alias="async")
    defer_loading: Literal[False] | None = None
    output_schema: JsonObject | None = None  # what the client's own function returns: nothing that a model is told

    def shown(self) -> dict[str, Any]:
        """As an answer shows it."""
        return self.model_dump(include=_SHOWN)

    def told(self, name: str) -> Mapping[str, Any]:
        """As the chat template gets it."""
        told = self.model_dump(include={"description", "parameters"}, exclude_none=True)
        return shown_tool({"name": name, **told})


InNamespace = Annotated[
    Annotated[FunctionTool, Tag("<function>")] | Annotated[Other, Tag("<other>")],
    kind_of(("function",)),
]


class NamespaceTool(Body):
    """Functions under one name. Its description is not told: templates have no place for it."""

    type: Literal["namespace"]
    name: str
    description: str | None = None
    tools: ListOf[InNamespace]

    def shown(self) -> dict[str, Any]:
        """As an answer shows it."""
        functions = [tool.shown() for tool in self.tools if isinstance(tool, FunctionTool)]
        return {"type": self.type, "name": self.name, "description": self.description, "tools": functions}


Tool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[Other, Tag("<other>")],
    kind_of(("function", "namespace")),
]


class Tools:
    """The functions of one request."""

    def __init__(self, tools: Sequence[FunctionTool | NamespaceTool | Other]) -> None:
        self._kept = [tool for tool in tools if not isinstance(tool, Other)]
        self.namespaces: dict[str, tuple[str, str]] = {}
        """Of the functions in namespaces, by the name that the model knows: namespace and name."""
        self.told: list[Mapping[str, Any]] = []
        """As the chat template gets them."""
        for tool in self._kept:
            if isinstance(tool, FunctionTool):
                self.told.append(tool.told(tool.name))
                continue
            for inner in tool.tools:
                if isinstance(inner, FunctionTool):
                    name = qualified(tool.name, inner.name)
                    self.namespaces[name] = (tool.name, inner.name)
                    self.told.append(inner.told(name))

    def shown(self) -> list[dict[str, Any]]:
        """As an answer shows them."""
        return [tool.shown() for tool in self._kept]


def check(tools: Sequence[FunctionTool | NamespaceTool | Other]) -> None:
    """Raises BadRequestError for a kind of tool that nothing here does, and for names that are none or stand twice."""
    for index, tool in enumerate(tools):
        if isinstance(tool, Other) and not tool.type.startswith(LEFT_OUT):
            raise _unknown(tool, f"tools.{index}")
        for inner_index, inner in enumerate(tool.tools if isinstance(tool, NamespaceTool) else ()):
            if isinstance(inner, Other):
                raise _unknown(inner, f"tools.{index}.tools.{inner_index}")
    check_tools([tool["function"]["name"] for tool in Tools(tools).told], "tools")


def _unknown(tool: Other, at: str) -> BadRequestError:
    return unsupported(at, f"a tool of type {tool.type[:80]}", "function tools are")

"""LiteLLM in a process of its own: it leaves sockets and event loops open, and warns, which is an error in our tests.

One JSON object a line: {"call": "completion", "arguments": {...}} in; {"answer": ...} or {"error", "message"} out.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

warnings.simplefilter("ignore")

import litellm  # noqa: E402

litellm.telemetry = False
litellm.suppress_debug_info = True


def completion(arguments: dict[str, Any]) -> dict[str, Any]:
    answer = litellm.completion(**arguments)
    if not arguments.get("stream"):
        return {"message": answer.choices[0].message.model_dump(exclude_none=True), **_rest(answer)}
    chunks = list(answer)
    whole = litellm.stream_chunk_builder(chunks, messages=arguments["messages"])
    num_pieces = sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks)
    return {
        "message": whole.choices[0].message.model_dump(exclude_none=True),
        "num_pieces": num_pieces,
        **_rest(whole),
    }


def responses(arguments: dict[str, Any]) -> dict[str, Any]:
    answer = litellm.responses(**arguments)
    if not arguments.get("stream"):
        return answer.model_dump(mode="json")
    events = list(answer)
    return {"types": [str(event.type.value) for event in events], **events[-1].response.model_dump(mode="json")}


def _rest(answer: Any) -> dict[str, Any]:
    return {"finish_reason": answer.choices[0].finish_reason, "usage": answer.usage.model_dump(exclude_none=True)}


def main() -> None:
    calls = {"completion": completion, "responses": responses}
    out, sys.stdout = sys.stdout, sys.stderr  # it prints
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            said = {"answer": calls[asked["call"]](asked["arguments"])}
        except Exception as error:  # noqa: BLE001 - whatever it raises is what the test wants to see
            said = {"error": type(error).__name__, "message": str(error)}
        out.write(json.dumps(said) + "\n")
        out.flush()


if __name__ == "__main__":
    main()

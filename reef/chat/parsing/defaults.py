"""Which formats a model writes, by what its chat template shows, else by its type."""

import re

TOOLS_BY_TYPE = {
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "llama": "llama3-json",
    "mistral": "mistral",
    "mistral3": "mistral",
    "mixtral": "mistral",
    "deepseek_v3": "deepseek",
}
REASONING_BY_TYPE = {"qwen3": "think", "qwen3_moe": "think", "deepseek_v3": "think"}
KNOWS_TOOLS = re.compile(r"\btools\b|\btool_calls\b")


def default_parsers(model_type: str, chat_template: str | None) -> tuple[str | None, str | None]:
    """Names of the tool and the reasoning parser for a model; None: it has no such format, or one not known here.

    `model_type` is config.json's. Without a template there is no chat, so no parser either.
    """
    if chat_template is None:
        return None, None
    return _tools(model_type, chat_template), _reasoning(model_type, chat_template)


def _tools(model_type: str, template: str) -> str | None:
    if "<function=" in template and "<parameter=" in template:
        return "qwen3-coder"
    if "<｜tool▁call▁begin｜>" in template:
        return "deepseek"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # GLM marks its calls so too, but writes <arg_key> within
        return None if "<arg_key>" in template else "hermes"
    if "<|python_tag|>" in template or '{"name": function name, "parameters"' in template:
        return "llama3-json"
    return TOOLS_BY_TYPE.get(model_type) if KNOWS_TOOLS.search(template) else None


def _reasoning(model_type: str, template: str) -> str | None:
    if "[THINK]" in template:
        return "mistral"
    if "</think>" in template or "<think>" in template:
        return "think"
    return REASONING_BY_TYPE.get(model_type)

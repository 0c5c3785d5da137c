"""Which formats a model writes, told from its template and its type."""

from __future__ import annotations

import pytest

from reef.chat.parsing import REASONING_PARSERS, TOOL_PARSERS, default_parsers, markers, starts_in_reasoning

pytestmark = pytest.mark.slow

CHATML = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
WITH_TOOLS = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
QWEN25 = (
    WITH_TOOLS + '{{ \'<tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>\' }}'
)
QWEN3 = QWEN25 + "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
CODER = WITH_TOOLS + "{{ '<tool_call>\\n<function=example_function_name>\\n<parameter=example_parameter_1>' }}"
LLAMA = WITH_TOOLS + '{{ \'Respond in the format {"name": function name, "parameters": dictionary of argument name\' }}'
LLAMA_TAG = WITH_TOOLS + "{{ '<|python_tag|>' }}"
MISTRAL = WITH_TOOLS + "{{ '[TOOL_CALLS] [' }}"
MAGISTRAL = WITH_TOOLS + "{{ '[THINK]' }}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}"
DEEPSEEK = "{{ message['tool_calls'] }}{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' }}{{ '</think>' }}"
GLM = WITH_TOOLS + "{{ '<tool_call>' + name + '\\n<arg_key>' }}{{ '<think>' }}"
KIMI = WITH_TOOLS + "{{ '<|tool_call_begin|>' }}"

CASES = [
    ("qwen2", QWEN25, ("hermes", None)),
    ("qwen3", QWEN3, ("hermes", "think")),
    ("qwen3_moe", CODER, ("qwen3-coder", "think")),
    ("qwen3_next", CODER + "{{ '<think>\\n' }}", ("qwen3-coder", "think")),
    ("llama", LLAMA, ("llama3-json", None)),
    ("llama", LLAMA_TAG, ("llama3-json", None)),
    ("llama", QWEN25, ("hermes", None)),  # Hermes 3 is a Llama
    ("qwen2", DEEPSEEK, ("deepseek", "think")),  # R1 distilled into Qwen
    ("deepseek_v3", DEEPSEEK, ("deepseek", "think")),
    ("mistral", MISTRAL, ("mistral", None)),
    ("mistral3", MAGISTRAL, ("mistral", "mistral")),
    ("glm4_moe", GLM, (None, "think")),
    ("kimi_k2", KIMI, (None, None)),
    ("qwen2", WITH_TOOLS, ("hermes", None)),  # tools, but no marker: by type
    ("llama", WITH_TOOLS, ("llama3-json", None)),
    ("mistral", WITH_TOOLS, ("mistral", None)),
    ("qwen3", CHATML, (None, "think")),  # no tools, whatever the type
    ("llama", CHATML, (None, None)),
    ("", CHATML, (None, None)),
    ("qwen3", None, (None, None)),
]


@pytest.mark.parametrize(("model_type", "template", "expected"), CASES)
def test_formats_follow_the_template_then_the_type(model_type, template, expected) -> None:
    assert default_parsers(model_type, template) == expected


def test_a_prompt_that_ends_with_the_opening_marker_has_begun_the_thinking() -> None:
    assert starts_in_reasoning("think", "<|im_start|>assistant\n<think>\n")
    assert starts_in_reasoning("think", "<｜Assistant｜><think>")
    assert starts_in_reasoning("mistral", "[/INST][THINK]")
    assert not starts_in_reasoning("think", "<|im_start|>assistant\n")
    assert not starts_in_reasoning("think", "<think>\n\n</think>\n\n")
    assert not starts_in_reasoning("think", "What is <think>?<|im_end|>\n<|im_start|>assistant\n")
    assert not starts_in_reasoning("mistral", "<think>\n")
    assert not starts_in_reasoning(None, "<think>\n")


def test_special_tokens_that_a_parser_looks_for_are_named() -> None:
    assert markers(None, None) == frozenset()
    assert markers("llama3-json", None) == {"<|python_tag|>"}
    assert markers("mistral", "mistral") == {"[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]"}
    assert markers("hermes", "think") == {"<tool_call>", "</tool_call>", "<think>", "</think>"}
    for name, form in TOOL_PARSERS.items():
        assert form.starts.strings - {"<function="} <= markers(name, None)
    for name, form in REASONING_PARSERS.items():
        assert {form.open} | form.close.strings == markers(None, name)

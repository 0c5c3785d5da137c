"""Model directories with the chat templates and special tokens of known families, made from the starter's tokenizer."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True)
class Style:
    """How one family writes; `plain` tokens are in the text though they are single ids."""

    model_type: str
    end: str  # what ends the assistant's turn
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


STYLES = {
    "qwen3": Style(
        "qwen3",
        "<|im_end|>",
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    ),
    "llama3": Style(
        "llama",
        "<|eot_id|>",
        special=(
            "<|begin_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
    ),
    "mistral": Style(
        "mistral",
        "</s>",
        special=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
    ),
}


def make_model(starter: Path, directory: Path, name: str) -> Path:
    """A copy of the starter that speaks another family's way. Its weights know nothing of the new ids."""
    style = STYLES[name]
    made = shutil.copytree(starter, directory)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in style.special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in style.plain])
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
    _edit(made / "tokenizer_config.json", eos_token=style.end)
    _edit(made / "config.json", model_type=style.model_type)
    _edit(made / "generation_config.json", eos_token_id=tokenizer.token_to_id(style.end))
    return made


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

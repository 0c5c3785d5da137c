"""Writes docs/configuration.md from the code: `python docs/generate.py`. A test fails when it is not current."""

import types
import typing
from collections.abc import Iterator
from pathlib import Path

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from reef.config import RECIPES, Config, RecipeSection, entries_of
from reef.section import Section, kebab

PAGE = Path(__file__).with_name("configuration.md")
HEAD = """# Configuration

Generated from `reef/config.py` by `python docs/generate.py`; do not edit.

`reef serve -c serve.yaml` reads one complete file. A flag beats the environment, the environment beats the file, the
file beats the default: `--training.options.lr 2e-6`, `REEF__TRAINING__OPTIONS__LR=2e-6`. Keys are kebab-case;
snake_case is accepted. `${NAME}` and `${NAME:-default}` in a value come from the environment. An unknown key is an
error that names the nearest known one. `reef serve --print-config` shows the result (secrets hidden), `reef serve
--dry-run` checks it and starts nothing.
"""


def render() -> str:
    """The whole page."""
    return HEAD + "".join(_section(Config, ()))


def _section(section: type[Section], path: tuple[str, ...]) -> Iterator[str]:
    leaves = {
        name: field for name, field in section.model_fields.items() if not _is_section(field) and name != "recipe"
    }
    if leaves:
        yield f"\n## {'.'.join(path)}\n\n"
        if section.__doc__ and path and not section.__doc__.startswith("A section"):
            yield f"{section.__doc__.strip().splitlines()[0]}\n\n"
        yield "| Key | Type | Default | Meaning |\n|---|---|---|---|\n"
        for name, field in leaves.items():
            yield f"| `{kebab(name)}` | {_type(field.annotation)} | {_default(field)} | {field.description} |\n"
    for name, field in section.model_fields.items():
        if (entry := entries_of(field.annotation)) is not None:
            yield from _section(entry, (*path, f"{kebab(name)}[]"))
        if name == "recipe":
            yield from _recipes()
        elif _is_section(field):
            yield from _section(typing.cast("type[Section]", field.annotation), (*path, kebab(name)))


def _recipes() -> Iterator[str]:
    """`recipe`, and `recipe.config` of each method."""
    yield from _section(RecipeSection, ("recipe",))
    for name, recipe in RECIPES.items():
        config = typing.cast("type[Section]", recipe.model_fields["config"].annotation)
        yield from _section(config, (f"recipe.config (implementation: {name})",))


def _is_section(field: FieldInfo) -> bool:
    return isinstance(field.annotation, type) and issubclass(field.annotation, Section)


def _type(annotation: object) -> str:
    if typing.get_origin(annotation) is typing.Literal:
        return " \\| ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return _type(next(kind for kind in typing.get_args(annotation) if kind is not type(None)))
    if annotation is SecretStr:
        return "secret"
    if annotation is Path:
        return "path"
    if typing.get_origin(annotation) is dict:
        return "mapping"
    if typing.get_origin(annotation) is list:
        return "list"
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true / false"}[annotation.__name__]  # type: ignore[attr-defined]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(needed)"
    default = field.get_default(call_default_factory=True)
    if default is None:
        return "none"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")

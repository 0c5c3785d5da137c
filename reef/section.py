"""What every section of serve.yaml is made of."""

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator


def kebab(name: str) -> str:
    """A field's name as serve.yaml has it."""
    return name.replace("_", "-")


class Section(BaseModel):
    """A section of serve.yaml: kebab-case aliases, unknown keys refused, frozen once read."""

    model_config = ConfigDict(
        alias_generator=kebab, populate_by_name=True, extra="forbid", frozen=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_is_default(cls, values: Any) -> Any:
        return {} if values is None else values  # YAML's reading of a section with every key commented out

"""What kernels are written in. Constants of kernels are made when their module is imported; nothing else is."""

from typing import Any

from reef.engines.sglang.import_only import stub


class constexpr:  # noqa: N801 (Triton's name)
    """A constant of a kernel."""

    def __init__(self, value: Any) -> None:
        self.value = value


stub(__name__)

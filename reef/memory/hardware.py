"""The devices that a configuration is for, and what each of them is asked to hold."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Hardware:
    """The devices of this machine, or, simulated, of another one or of several alike."""

    gpus: tuple[int, ...]  # bytes of each GPU; of the first node, where there are several
    memory: int  # bytes of the machine's own memory
    num_nodes: int = 1
    simulated: bool = False


@dataclass(slots=True)
class Device:
    """A GPU, or the memory of a machine without one."""

    name: str
    capacity: int  # bytes
    used: list[tuple[str, int]] = field(default_factory=list)  # who, and bytes

    @property
    def total(self) -> int:
        """Bytes asked for."""
        return sum(size for _, size in self.used)

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity

    def __str__(self) -> str:
        users = " + ".join(f"{who} {size_text(size)}" for who, size in self.used)
        left = self.capacity - self.total
        rest = f"{size_text(left)} left" if left >= 0 else f"{size_text(-left)} too much"
        return f"{self.name}: {users} of {size_text(self.capacity)}, {rest}"


def size_text(size: int) -> str:
    """Bytes in words: 1.5 GiB, 640 MiB, 12 KiB."""
    if size >= 2**30:
        return f"{size / 2**30:.1f} GiB"
    return f"{size / 2**20:.0f} MiB" if size >= 2**20 else f"{size / 2**10:.0f} KiB"


def ranges(numbers: Sequence[int]) -> str:
    """Numbers in words: [0, 1, 2, 5] is 0-2, 5."""
    return ", ".join(_ranges(numbers))


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield str(found[0]) if len(found) == 1 else f"{found[0]}-{found[-1]}"

"""What one rank finds, all must learn: the others would wait for it for ever in the next call that joins them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from reef.errors import ReefError

T = TypeVar("T")


def from_rank_0(action: Callable[[], T]) -> T:
    """The answer of `action`, which rank 0 alone runs while the others wait. Every rank must call.

    Raises:
        ReefError, OSError: what `action` raised, on every rank. Anything else is a fault: rank 0 alone raises it, and
            whoever watches the ranks ends them all.
    """
    outcome: list[Any] = [None, None]  # the answer, the error
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except (ReefError, OSError) as error:
            outcome[1] = error
    dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    answer: T = outcome[0]
    return answer

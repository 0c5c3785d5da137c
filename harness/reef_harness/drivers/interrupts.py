"""Ctrl-C finishes what is in flight."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@asynccontextmanager
async def finish_on_sigint(stop: Callable[[], None]) -> AsyncIterator[None]:
    """Within the block, the first Ctrl-C (or SIGTERM) calls ``stop``; the second acts at once, as it usually does."""
    loop = asyncio.get_running_loop()
    previous = {number: signal.getsignal(number) for number in SIGNALS}

    def restore() -> None:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

    def first() -> None:
        restore()
        stop()

    for number in SIGNALS:
        loop.add_signal_handler(number, first)
    try:
        yield
    finally:
        restore()

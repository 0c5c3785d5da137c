"""A process that owns an engine, to be killed: it starts one, prints its pid and its URL, and waits.

python tests/engines/owner.py RUN_DIR [--section.key VALUE ...]
"""

import asyncio
import sys

from reef.config import load
from reef.engines.host import EngineHost


async def main(run_dir: str, *settings: str) -> None:
    config = load(None, ["--reef.run-dir", run_dir, *settings], environ={})
    config.logs_dir.mkdir(parents=True, exist_ok=True)
    host = EngineHost(config, "engine-0")
    url = await host.start(str(config.inference.model_path.absolute()), "r0", 250)
    print(host.pid, url, flush=True)
    await asyncio.sleep(600)


asyncio.run(main(*sys.argv[1:]))

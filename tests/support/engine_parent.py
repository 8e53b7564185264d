"""Starts an engine that is busy generating, prints its process id, then waits to be killed or closes the socket.

Usage: engine_parent.py (kill | close_socket) ENGINE_COMMAND…
"""

import asyncio
import sys

from loraserve.engine.config import EngineConfig
from loraserve.engine.request import EngineRequest, SamplingParams
from loraserve.serving.process.local_engine import LocalEngine


async def main(how: str, command: list[str]) -> None:
    engine = await LocalEngine.start(EngineConfig("fake"), lambda *_: None, command)
    stream = engine.generate(EngineRequest("r", [1], SamplingParams(max_tokens=1 << 30)))
    await anext(stream)
    print(engine.pid, flush=True)
    if how == "close_socket":
        assert engine._transport is not None
        engine._transport.abort()
        await engine.wait_dead()
    else:
        await asyncio.sleep(3600)


asyncio.run(main(sys.argv[1], sys.argv[2:]))

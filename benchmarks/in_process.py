"""Our engine in this process, as the benchmarks start it."""

import os
from pathlib import Path

from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed_file import packed_file_name

from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine


def start_engine(model: Path, *, enable_lora: bool) -> Engine:
    """As it is after a moment without requests."""
    threads = len(os.sched_getaffinity(0))
    engine = Engine(EngineConfig(model=str(model), num_threads=threads, enable_lora=enable_lora), lambda *_: None)
    while engine.use_idle_time():
        pass
    return engine


def load_adapters(engine: Engine, paths: list[Path], folder: Path) -> dict[str, str]:
    """Packs into the folder; returns name → digest."""
    layout = engine.describe().layout
    digests = {}
    for path in paths:
        packed = load_and_pack(path, layout, folder)
        engine.load_adapter(packed.digest, str(folder / packed_file_name(packed.digest, layout)))
        digests[path.name] = packed.digest
    return digests

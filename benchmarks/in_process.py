"""Our engine in this process, as the benchmarks start it."""

import os
import sys
from pathlib import Path

from loraserve_adapters.pack import load_and_pack
from loraserve_adapters.packed_file import packed_file_name

from loraserve.engine.config import EngineConfig
from loraserve.engine.engine import Engine
from loraserve.engine.malloc import with_huge_pages
from loraserve.serving.process.garbage_collector import tune_garbage_collector


def start_engine(
    model: Path,
    *,
    enable_lora: bool,
    num_speculative_tokens: int = 0,
    dtype: str = "auto",
    quantization: str = "none",
    load_format: str = "auto",
) -> Engine:
    """The state of a server's engine after a moment without requests, but without drafts by default: the output of
    random weights repeats itself in a way that no real text does.

    Restarts this process unless its large blocks request huge pages, as a server's engine process does from its start.
    """
    environment = with_huge_pages(os.environ)
    if environment != os.environ:
        os.execve(sys.executable, sys.orig_argv, environment)
    threads = len(os.sched_getaffinity(0))
    config = EngineConfig(
        model=str(model),
        num_threads=threads,
        enable_lora=enable_lora,
        num_speculative_tokens=num_speculative_tokens,
        dtype=dtype,
        quantization=quantization,
        load_format=load_format,
    )
    engine = Engine(config, lambda *_: None)
    while engine.use_idle_time():
        pass
    tune_garbage_collector()
    return engine


def load_adapters(engine: Engine, paths: list[Path], folder: Path) -> dict[str, str]:
    """Packs the adapters into the folder and loads them; returns name → digest."""
    layout = engine.describe().layout
    digests = {}
    for path in paths:
        packed = load_and_pack(path, layout, folder)
        engine.load_adapter(packed.digest, str(folder / packed_file_name(packed.digest, layout)))
        digests[path.name] = packed.digest
    return digests

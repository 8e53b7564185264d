"""What every handler gets: the runtime and what is derived from it once."""

import time
from dataclasses import dataclass

from loraserve.api.identity import system_fingerprint
from loraserve.api.sampling import SamplingChecker
from loraserve.serving.runtime import Runtime


@dataclass(frozen=True, slots=True)
class AppContext:
    runtime: Runtime
    sampling: SamplingChecker
    fingerprint: str
    """`system_fingerprint` of responses."""
    started: int
    """Unix time."""

    @classmethod
    def of(cls, runtime: Runtime) -> "AppContext":
        model = runtime.engine.model
        return cls(
            runtime, SamplingChecker(model, runtime.settings.limits), system_fingerprint(model), int(time.time())
        )

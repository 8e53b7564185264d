"""What every handler receives: the runtime, the control plane, and objects that are derived from them once."""

import time
from dataclasses import dataclass

from loraserve.api.http.ui_files import UiFile, read_ui_files
from loraserve.api.inference.call import InferenceCalls
from loraserve.api.inference.identity import system_fingerprint
from loraserve.api.inference.sampling import SamplingChecker
from loraserve.api.management.adapter_items import AdapterItems
from loraserve.control.control_plane import ControlPlane
from loraserve.control.turns import Turns
from loraserve.serving.runtime import Runtime


@dataclass(frozen=True, slots=True)
class AppContext:
    runtime: Runtime
    control: ControlPlane
    calls: InferenceCalls
    adapter_items: AdapterItems
    loads: Turns
    """For vLLM's load endpoint: loads of the same adapter name take turns."""
    sampling: SamplingChecker
    fingerprint: str
    """Returned as `system_fingerprint`."""
    started: int
    """Unix time of the start."""
    ui_files: dict[str, UiFile]
    """By their paths below /ui/."""

    @classmethod
    def of(cls, runtime: Runtime, control: ControlPlane) -> "AppContext":
        model = runtime.engine.model
        return cls(
            runtime,
            control,
            InferenceCalls(control, runtime.generation),
            AdapterItems(
                control.adapters,
                control.residency,
                runtime.tokenizer.decode_few,
                {template.name for template in runtime.settings.adapter_chat_templates},
            ),
            Turns(),
            SamplingChecker(model, runtime.settings.limits),
            system_fingerprint(model),
            int(time.time()),
            read_ui_files(),
        )

"""What the classes of CPU ops have in common: the C library, and adapters as its functions take them."""

from loraserve_kernels.adapter_table import AdapterTable, LoraGroup
from loraserve_kernels.bound_group import BoundGroups
from loraserve_kernels.cpu_library import CpuLibrary
from loraserve_kernels.step_batch import Segments


class CpuOps:
    """Calls C functions on `torch.get_num_threads()` threads."""

    def __init__(self, library: CpuLibrary) -> None:
        self.library = library
        self._c = library.functions
        self._bound_groups = BoundGroups()

    def _adapters(self, group: LoraGroup, table: AdapterTable, segments: Segments) -> tuple[int, int, int, int, int]:
        """For C: addresses of the group, the table, the segments' starts and their slots; the number of segments."""
        bound = self._bound_groups.find(group, table)
        starts, slots = segments.start.data_ptr(), segments.adapter_slot.data_ptr()
        return bound.group_address, bound.table_address, starts, slots, segments.adapter_slot.shape[0]

"""Peak of live tensor memory inside a block, by watching what torch allocates: exact on the CPU, where no allocator keeps statistics.

Called by the loss's memory comparison of `train`. Counts every new storage that an operator returns until it is freed; temporary
buffers inside one operator are not seen.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TrackedAllocations(TorchDispatchMode):
    """`with TrackedAllocations() as seen: ...` then `seen.peak_bytes`, `seen.largest_bytes`. Storages made before the block are free of charge."""

    def __init__(self):
        super().__init__()
        self.live_bytes = self.peak_bytes = self.largest_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), inputs)
        return result

    def _count(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._known or key in inputs:
            return
        num_bytes = storage.nbytes()
        self._known.add(key)
        self.live_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.largest_bytes = max(self.largest_bytes, num_bytes)
        weakref.finalize(storage, self._free, key, num_bytes)

    def _free(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live_bytes -= num_bytes

"""Memory that other processes may write to: the buffers of rings and of send staging.

On a GPU, UCX gives memory to another process by a CUDA IPC handle, which exists for plain cudaMalloc memory only: not for torch's
expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True), nor for cudaMallocAsync. Whether a buffer has one is asked of
CUDA itself, so that it does not matter how the allocator came to its settings. A buffer without a handle is replaced by a cudaMalloc of
our own, outside of torch's allocator and of its statistics. Called by stream/ring.py and stream/sender.py, from any thread.
"""

import ctypes
import functools
import logging

import torch

logger = logging.getLogger(__name__)
IPC_HANDLE_BYTES = 64


def buffer_for_peers(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes], uninitialised, on `device`; on a GPU with a CUDA IPC handle, or with a warning.

    Errors: torch.OutOfMemoryError.
    """
    buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if device.type != "cuda":
        return buffer
    try:
        cuda_runtime()
    except OSError as error:
        logger.warning("the CUDA runtime cannot be asked whether other processes can open the stream's memory (%s)", error)
        return buffer
    if has_ipc_handle(buffer):
        return buffer
    del buffer
    with torch.cuda.device(device):
        memory = CudaMemory(num_bytes, device)
        buffer = torch.as_tensor(memory, device=device)  # holds `memory` for as long as any view of it lives
    if not has_ipc_handle(buffer):
        logger.warning("CUDA exports no memory to other processes here: rows travel between GPUs of this host through its memory, or not at all")
    logger.info("%.1f MiB for the stream come from cudaMalloc: torch's allocator gave memory that no other process can open", num_bytes / 2**20)
    return buffer


def has_ipc_handle(buffer: torch.Tensor) -> bool:
    """Whether another process could open the GPU memory of `buffer`."""
    runtime = cuda_runtime()
    handle = ctypes.create_string_buffer(IPC_HANDLE_BYTES)
    with torch.cuda.device(buffer.device):
        result = runtime.cudaIpcGetMemHandle(handle, ctypes.c_void_p(buffer.data_ptr()))
        if result:
            runtime.cudaGetLastError()  # or torch would report it at its next kernel
    return result == 0


class CudaMemory:
    """One cudaMalloc on the current device, freed with the object; numpy's array interface for GPUs makes a tensor of it without a copy."""

    def __init__(self, num_bytes: int, device: torch.device):
        self._runtime, self._address = cuda_runtime(), ctypes.c_void_p()
        if self._allocate(num_bytes):
            torch.cuda.empty_cache()
            if result := self._allocate(num_bytes):
                raise torch.OutOfMemoryError(f"cudaMalloc of {num_bytes / 2**20:.0f} MiB for the stream on {device} failed with CUDA error {result}")
        self.__cuda_array_interface__ = {"shape": (num_bytes,), "typestr": "|u1", "data": (self._address.value, False), "version": 2}

    def _allocate(self, num_bytes: int) -> int:
        result = self._runtime.cudaMalloc(ctypes.byref(self._address), ctypes.c_size_t(num_bytes))
        if result:
            self._runtime.cudaGetLastError()
        return result

    def __del__(self):
        if self._address.value:
            self._runtime.cudaFree(self._address)


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime that torch has loaded. Errors: OSError where it is not found."""
    return ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}")

"""Stream buffers on a GPU can be opened by other processes, whatever torch's allocator is set to. CUDA is a stand-in; tests/gpu has the real one."""

import ctypes
import gc

import pytest
import torch

from megatron_kd.stream import memory

GPU = torch.device("cuda", 0)


class Runtime:
    """libcudart on host memory. `exported`: addresses that have an IPC handle; `fails`: allocations that fail before one succeeds."""

    def __init__(self, fails=0):
        self.exported, self.live, self.fails, self.errors_cleared = set(), {}, fails, 0

    def cudaIpcGetMemHandle(self, handle, address):
        return 0 if address.value in self.exported else 1

    def cudaGetLastError(self):
        self.errors_cleared += 1

    def cudaMalloc(self, address, num_bytes):
        if self.fails:
            self.fails -= 1
            return 2
        block = ctypes.create_string_buffer(num_bytes.value)
        address._obj.value = ctypes.addressof(block)
        self.live[ctypes.addressof(block)] = block
        self.exported.add(ctypes.addressof(block))
        return 0

    def cudaFree(self, address):
        del self.live[address.value]


@pytest.fixture
def runtime(monkeypatch):
    """Tensors "on the GPU" lie in host memory."""
    fake, empty = Runtime(), torch.empty

    def as_tensor(data, device):
        interface = data.__cuda_array_interface__
        tensor = torch.frombuffer((ctypes.c_uint8 * interface["shape"][0]).from_address(interface["data"][0]), dtype=torch.uint8)
        tensor.owner = data
        return tensor

    monkeypatch.setattr(memory, "cuda_runtime", lambda: fake)
    monkeypatch.setattr(torch, "empty", lambda *shape, device=None, **kw: empty(*shape, **kw))
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return fake


def test_host_memory_asks_no_cuda():
    assert memory.buffer_for_peers(48, torch.device("cpu")).shape == (48,)


def test_memory_without_a_handle_is_replaced_by_an_allocation_of_our_own_and_freed_with_the_last_view(runtime):
    buffer = memory.buffer_for_peers(48, GPU)
    assert buffer.shape == (48,) and buffer.dtype == torch.uint8 and set(runtime.live) == {buffer.data_ptr()}
    assert runtime.errors_cleared == 1, "an error left standing would be torch's next one"
    del buffer
    gc.collect()
    assert not runtime.live


def test_torchs_own_memory_is_taken_where_it_has_a_handle(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "cudaIpcGetMemHandle", lambda handle, address: 0)
    assert memory.buffer_for_peers(48, GPU).shape == (48,) and not runtime.live


@pytest.mark.parametrize("fails", [1, 2])
def test_a_full_gpu_is_asked_again_after_torch_has_let_go_of_its_cache(runtime, fails):
    runtime.fails = fails
    if fails == 1:
        assert memory.buffer_for_peers(48, GPU).shape == (48,)
    else:
        with pytest.raises(torch.OutOfMemoryError, match="for the stream on cuda:0"):
            memory.buffer_for_peers(48, GPU)

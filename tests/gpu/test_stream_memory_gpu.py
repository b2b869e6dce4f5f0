"""Under expandable segments torch's memory has no CUDA IPC handle; the stream's has one, can be written, and goes back to the GPU."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import torch
from megatron_kd.stream.memory import buffer_for_peers, has_ipc_handle

device = torch.device("cuda", 0)
assert has_ipc_handle(torch.empty(1 << 20, dtype=torch.uint8, device=device)) is (not EXPANDABLE)


def use():
    buffer = buffer_for_peers(256 << 20, device)
    assert has_ipc_handle(buffer) and buffer.device == device and buffer.shape == (256 << 20,)
    view = buffer[:1 << 20].view(torch.bfloat16)
    view.fill_(3.0)
    assert view.float().sum().item() == 3.0 * (1 << 19), "torch computes on it, and no error of the handle's is left"
    if EXPANDABLE:
        assert torch.cuda.memory_allocated(device) < 256 << 20


use()  # loads its kernels
torch.cuda.empty_cache()
free = torch.cuda.mem_get_info(device)[0]
for _ in range(3):
    use()
torch.cuda.empty_cache()
assert torch.cuda.mem_get_info(device)[0] >= free - (64 << 20), (free, torch.cuda.mem_get_info(device)[0])
print("passed")
"""


@pytest.mark.parametrize("expandable", [False, True])
def test_a_buffer_for_peers_has_a_handle(expandable):
    script = f"import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:{expandable}'\n" + SCRIPT.replace("EXPANDABLE", str(expandable))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "passed", done.stderr

"""What the loss allocates: bounded by windows whatever the number of rows, and as loss/sizes.py says."""

import subprocess
import sys

import pytest
import torch

from megatron_kd.cli.allocations import TrackedAllocations
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.scratch import HeadGradient
from megatron_kd.loss.signals import HiddenTeacher, TopKTeacher
from megatron_kd.loss.sizes import LossShape, call_bytes, call_items, head_gradient_bytes
from megatron_kd.vocab import VocabSpec


def tracked(shape: LossShape) -> TrackedAllocations:
    """Allocations of one training (or evaluation) call of that shape on the CPU, the dW buffer left out."""
    dtype, rows, columns = {2: torch.bfloat16, 4: torch.float32}[shape.dtype_bytes], shape.num_rows, shape.num_columns
    x = torch.randn(rows, shape.hidden_s).to(dtype).requires_grad_(shape.train)
    head = torch.randn(columns, shape.hidden_s).to(dtype).requires_grad_(shape.train and not shape.freeze_head)
    teacher = None
    if shape.signal == "hidden":
        teacher = HiddenTeacher(rows_NH=torch.randn(rows, shape.hidden_t).to(dtype), head_VH=torch.randn(columns, shape.hidden_t).to(dtype))
    if shape.signal == "top_k":
        ids = torch.arange(shape.top_k).repeat(rows, 1) + torch.arange(rows)[:, None] % 7
        teacher = TopKTeacher(ids_NK=ids, log_probs_NK=torch.full(ids.shape, 0.9 / shape.top_k).log(), tail_N=torch.full((rows,), 0.1))
    objective = Objective(divergence=shape.divergence, kd_weight=float(shape.signal != "labels"), ce_weight=0.3)
    labels, weights, keeper = torch.arange(rows) % columns, torch.ones(rows), HeadGradient(lambda dw_VH, c: None)
    keeper.release(keeper.acquire(head))
    with TrackedAllocations() as seen:
        out = fused_linear_kd(x, head, teacher, vocab=VocabSpec(true_size=columns, student_padded=columns, teacher_padded=columns), objective=objective,
                              labels_N=labels, weights_N=weights, dw=keeper, window_rows=shape.window_rows, group_windows=shape.group_windows)
        if shape.train:
            out.loss_N.sum().backward()
    return seen


BASE = dict(num_rows=128, num_columns=16384, hidden_s=64, hidden_t=96, window_rows=32, group_windows=2, device_type="cpu")


@pytest.mark.parametrize("changes", [
    {}, {"dtype_bytes": 4}, {"divergence": "jsd"}, {"divergence": "skew_reverse_kl", "group_windows": 1}, {"train": False}, {"signal": "top_k", "top_k": 100},
    {"signal": "labels"}, {"num_rows": 1024, "num_columns": 2048, "hidden_s": 512, "window_rows": 256}, {"freeze_head": True},
], ids=str)
def test_tracked_peak_is_what_the_closed_form_says(changes):
    shape = LossShape(**(BASE | changes))
    peak = tracked(shape).peak_bytes
    assert 0.85 * call_bytes(shape) <= peak <= 1.005 * call_bytes(shape), call_items(shape)


@pytest.mark.parametrize("signal", ["hidden", "top_k"])
def test_no_allocation_is_larger_than_the_window_buffers(signal):
    """8 windows of 16 rows: no tensor of [N, V], of either model or of the gradient, and none of [N, V] / 3."""
    shape = LossShape(**(BASE | dict(signal=signal, top_k=50 * (signal == "top_k"), window_rows=16, group_windows=1)))
    seen = tracked(shape)
    row_bytes = shape.num_columns * shape.dtype_bytes
    assert seen.largest_bytes <= 2 * shape.window_rows * row_bytes < shape.num_rows * row_bytes / 3


@pytest.mark.parametrize("train", [True, False])
def test_memory_grows_with_rows_only_by_dx_and_row_values(train):
    small, large = (LossShape(**(BASE | dict(num_rows=num, train=train))) for num in (128, 512))
    grown = tracked(large).peak_bytes - tracked(small).peak_bytes
    named = sum(call_items(large)[name] - call_items(small)[name] for name in ("dX", "row values"))
    assert named == call_bytes(large) - call_bytes(small)
    assert grown <= 1.02 * named + 4096


def test_head_gradient_is_one_fp32_buffer():
    head, keeper = torch.zeros(160, 8, dtype=torch.bfloat16), HeadGradient()
    buffer = keeper.acquire(head)
    assert buffer.untyped_storage().nbytes() == head_gradient_bytes(160, 8)
    keeper.release(buffer)
    assert keeper.acquire(head) is buffer


def test_sizes_import_no_torch():
    code = "import sys; sys.modules['torch'] = None; import megatron_kd.loss.sizes as s; print(s.call_bytes(s.LossShape(num_rows=32768, num_columns=128256, hidden_s=3072, hidden_t=4096)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert int(out.stdout) > 32768 * 3072 * 2

"""Closed forms of what the loss allocates, in bytes, and the default window sizes. Imports no torch; the planner asks here.

The fused loss takes its window sizes from here, and tests hold the sums against tracked allocations. Letters: N rows of the
call, R rows of a window, V columns of this rank's shard, H_s and H_t hidden widths, K kept tokens, t
tensor-parallel ranks.
"""

from dataclasses import dataclass
from typing import Literal

from megatron_kd.kernels.spec import NUM_JOINED, NUM_STATS, ONE_PASS, TWIN_BLOCK_ELEMENTS
from megatron_kd.loss.window import ROW_TILE, WindowPlan, plan_windows

FLOAT_BYTES = 4
"""Statistics, losses, weights and dW are float32."""
TWIN_TEMPORARIES = {"one_pass": 8, "two_pass": 11, "sparse": 4}
"""Blocks of TWIN_BLOCK_ELEMENTS float32 numbers alive at once in the torch backend's costliest kernel."""
CPU_BLOCK_COLUMNS = 4096
"""Columns of a dW GEMM on the CPU that are cast to float32 at once (only for lower dtypes)."""
GPU_LOGITS = 2048 * 128_256
"""Logits of one window on a GPU."""
CPU_LOGITS = 1 << 22
"""Logits of one window on the CPU: what still fits caches."""
KEPT_BYTES = 80
"""Temporaries of the top-K step per kept entry of a window."""
ROW_BYTES = 20 + FLOAT_BYTES * NUM_JOINED
"""Kept per row: loss, KD, CE, weight, label, joined statistics (top-K: one more)."""


def default_windows(num_columns: int, device_type: str, *, teacher_logits: bool = True, tp: int = 1, train: bool = True) -> tuple[int, int]:
    """(rows of a window, windows of a group) where the caller names none.

    `teacher_logits`: a window holds the teacher's projection too. `tp`: vocabulary shards. `train`: gradients are formed.
    On a GPU the logits of one window and one group are those of 4096 rows of 128,256 columns together (1 GiB in bf16), and at least 4096
    rows: with one shard a window of a quarter and groups of three, 1.7 to 3% faster on an H200 than two halves (docs/benchmarks/notes.md);
    with several shards, whose collectives go by window, and in evaluation two halves. Without a teacher's buffer about the same memory
    serves windows of 2816 rows.
    """
    if device_type == "cpu":
        return max(32, min(1024, CPU_LOGITS // max(1, num_columns))), 1
    rows = min(8192, max(2048, GPU_LOGITS // max(1, num_columns) // ROW_TILE * ROW_TILE))
    if not teacher_logits:
        return rows * 11 // 8 // ROW_TILE * ROW_TILE, 1
    return (rows // 2, 3) if train and tp == 1 else (rows, 1)


def chosen_windows(window_rows: int | None, group_windows: int | None, default: tuple[int, int]) -> tuple[int, int]:
    """What the caller names, else the default; windows of a size that the caller names are groups of one unless named too."""
    return window_rows or default[0], group_windows or (1 if window_rows else default[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LossShape:
    """One call of fused_linear_kd, as far as its memory goes."""

    num_rows: int
    """N, over all sequence-parallel ranks."""
    num_columns: int
    """V: columns of this rank's shard, padding included (VocabSpec.shard_size)."""
    hidden_s: int
    """Student width."""
    hidden_t: int = 0
    """Teacher width; 0 where its rows are not hidden states."""
    dtype_bytes: int = 2
    """Of hidden states, heads and logits."""
    signal: Literal["hidden", "logits", "top_k", "labels"] = "hidden"
    """The teacher's signal; "labels" is cross-entropy alone."""
    top_k: int = 0
    """K of signal "top_k"."""
    divergence: str = "forward_kl"
    """Those outside kernels.spec.ONE_PASS keep two more numbers per row."""
    tp: int = 1
    """Vocabulary shards."""
    sequence_parallel: bool = False
    """Each rank passes its own rows (rows_per_rank, taken as even here)."""
    own_teacher_rows: bool = False
    """Each rank passes its own teacher rows as well (HiddenTeacher.own_rows)."""
    window_rows: int | None = None
    """None: the default."""
    group_windows: int | None = None
    """Windows of a group (loss/passes.py); None: the default, or 1 beside window_rows."""
    device_type: Literal["cuda", "cpu"] = "cuda"
    """cuda: Triton kernels, no temporaries; cpu: the torch twin's."""
    train: bool = True
    """False: evaluation, no gradients."""
    freeze_head: bool = False
    """No dW: a group's gradients still need its logits buffers."""

    def windows(self) -> tuple[int, int]:
        """(rows of a window, windows of a group) of this call."""
        return chosen_windows(self.window_rows, self.group_windows, default_windows(
            self.num_columns, self.device_type, teacher_logits=self.signal == "hidden", tp=self.tp, train=self.train))

    def plan(self) -> WindowPlan:
        """The windows of this call."""
        shares = tuple(self.num_rows // self.tp + (rank < self.num_rows % self.tp) for rank in range(self.tp)) if self.sequence_parallel else None
        return plan_windows(self.num_rows, self.windows()[0], shares)


def head_gradient_bytes(num_columns: int, hidden_s: int) -> int:
    """The fp32 scratch dW [V, H_s], one per output layer, kept between calls (loss/scratch.py)."""
    return num_columns * hidden_s * FLOAT_BYTES


def call_items(shape: LossShape) -> dict[str, int]:
    """Bytes of one call by name, beyond its inputs and the head gradient's scratch. All of them are alive together at the peak.

    "dX" and "row values" grow with N; the rest with the window alone.
    """
    plan, width = shape.plan(), shape.dtype_bytes
    rows, chunk = plan.max_rows, plan.chunk_rows if shape.sequence_parallel else 0
    group_windows = min(shape.windows()[1], max(plan.num_windows, 1)) if shape.train else 1
    kept_windows = group_windows * (2 if shape.tp > 1 and shape.train else 1)  # dX and dW of one group wait under the next one's all-gather
    own_rows = max(plan.rows_per_rank) if shape.sequence_parallel else shape.num_rows
    items = {
        "dX": own_rows * shape.hidden_s * width if shape.train else 0,
        "row values": shape.num_rows * ROW_BYTES,
        "student logits": kept_windows * rows * shape.num_columns * width,
        "teacher logits": rows * shape.num_columns * width if shape.signal == "hidden" else 0,
        "statistics": _statistics(shape, rows),
        "kept entries": rows * shape.top_k * KEPT_BYTES,
    }
    if shape.sequence_parallel:
        received = (shape.tp + 1) * chunk * width
        items["rows of other ranks"] = received * shape.hidden_s + kept_windows * rows * shape.hidden_s * width + (shape.hidden_t * rows * width if shape.tp > 1 else 0)
        if shape.own_teacher_rows:
            items["teacher rows of other ranks"] = received * shape.hidden_t
        items["dX on its way"] = (2 * received + rows * width) * shape.hidden_s if shape.train else 0
    if shape.device_type == "cpu":
        items["torch backend"] = _twin_bytes(shape, rows, group_windows)
    return items


def call_bytes(shape: LossShape) -> int:
    """Sum of call_items: peak of one call beyond its inputs and the head gradient's scratch."""
    return sum(call_items(shape).values())


def _statistics(shape: LossShape, rows: int) -> int:
    columns = NUM_STATS if shape.signal in ("hidden", "logits") else 3 + shape.top_k
    gathered = columns * (1 + shape.tp if shape.tp > 1 else 1)
    second_pass = 2 if shape.signal in ("hidden", "logits") and shape.divergence not in ONE_PASS else 0
    return rows * FLOAT_BYTES * (gathered + second_pass)


def _twin_bytes(shape: LossShape, rows: int, group_windows: int) -> int:
    block_rows = min(rows, max(1, TWIN_BLOCK_ELEMENTS // max(1, shape.num_columns)))
    kind = "sparse" if shape.signal in ("top_k", "labels") else "one_pass" if shape.divergence in ONE_PASS else "two_pass"
    kernels = TWIN_TEMPORARIES[kind] * block_rows * shape.num_columns * FLOAT_BYTES
    cast = (min(CPU_BLOCK_COLUMNS, shape.num_columns) + shape.hidden_s) * group_windows * rows * FLOAT_BYTES if shape.dtype_bytes < FLOAT_BYTES else 0
    return max(kernels, cast if shape.train and not shape.freeze_head else 0)

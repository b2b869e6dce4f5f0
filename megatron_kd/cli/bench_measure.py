"""Measuring for `megatron-kd bench loss`: shapes, random inputs, the correctness gate, times, peaks and the rate of the GEMMs alone.

Called by cli/bench.py. Times are medians over device events (host clock on a CPU); a peak is the allocator's maximum over inputs and
heads, so that it counts dX, dW and every buffer. FLOPs are the least that a target needs, whatever the method spends.

Shape letters: N rows, V vocabulary, H hidden width, K kept tokens, R rows of one window.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_kd.cli.bench_methods import Case

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One pair of heads."""

    vocab: int
    """Columns of both heads, all true."""
    student_width: int
    """H_s."""
    teacher_width: int
    """H_t."""


SHAPES = {
    "llama-8b-3b": Shape(vocab=128_256, student_width=3072, teacher_width=4096),
    "qwen3.5-35b-9b": Shape(vocab=248_320, student_width=4096, teacher_width=2048),
    "gpt-oss": Shape(vocab=201_088, student_width=2880, teacher_width=2880),
    "tiny": Shape(vocab=1_000, student_width=48, teacher_width=64),
}


def least_flops(shape: Shape, num_rows: int, target: str) -> int:
    """FLOPs that no method can avoid: 2 per multiply-add of the projections and, with a gradient, of dX and dW."""
    student, teacher = shape.vocab * shape.student_width, shape.vocab * shape.teacher_width
    products = {"online": 3 * student + teacher, "top_k": 3 * student, "evaluation": student + teacher}[target]
    return 2 * num_rows * products


def make_case(shape: Shape, num_rows: int, *, top_k: int, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Case:
    """Random rows and heads with logits of standard deviation about 1.7 (student) and top-K targets of a random teacher.

    The kept tokens are drawn from few patterns (cheap at any size); tail masses are between 0.05 and 0.3.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*size, scale=1.0):
        return torch.randn(*size, generator=generator, device=device, dtype=dtype) * scale

    head_VH = normal(shape.vocab, shape.student_width, scale=1.7 / shape.student_width**0.5)
    teacher_head_VH = normal(shape.vocab, shape.teacher_width, scale=1.7 / shape.teacher_width**0.5)
    top_k = min(top_k, shape.vocab)
    patterns_PK = torch.stack([torch.randperm(shape.vocab, generator=generator, device=device)[:top_k] for _ in range(min(64, num_rows))])
    tail_N = 0.05 + 0.25 * torch.rand(num_rows, generator=generator, device=device)
    scores_NK = torch.randn(num_rows, top_k, generator=generator, device=device)
    return Case(
        student_NH=normal(num_rows, shape.student_width).requires_grad_(),
        head_VH=head_VH.requires_grad_(),
        teacher_NH=normal(num_rows, shape.teacher_width),
        teacher_head_VH=teacher_head_VH,
        labels_N=torch.randint(shape.vocab, (num_rows,), generator=generator, device=device),
        ids_NK=patterns_PK.repeat(-(-num_rows // len(patterns_PK)), 1)[:num_rows],
        log_probs_NK=scores_NK.log_softmax(-1) + torch.log1p(-tail_N)[:, None],
        tail_N=tail_N,
    )


def in_double(case: Case) -> Case:
    """The same numbers in float64: the gate's reference runs on them."""
    values = {name: getattr(case, name) for name in case.__slots__}
    floating = {name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return replace(case, **{name: value.detach().double().requires_grad_(value.requires_grad) for name, value in floating.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What a method computed on one case, in float64."""

    loss: float
    """The scalar."""
    dx_NH: torch.Tensor
    """Gradient of the student rows."""
    dw_VH: torch.Tensor
    """Gradient of the student head, or of a shard of it."""

    def error(self, reference: "Gradients") -> float:
        """Largest of the relative errors (2-norm) of loss, dX and dW; inf where anything is not finite."""
        errors = [abs(self.loss - reference.loss) / max(abs(reference.loss), 1e-12)]
        errors += [((a - b).norm() / b.norm()).item() for a, b in ((self.dx_NH, reference.dx_NH), (self.dw_VH, reference.dw_VH))]
        worst = max(errors)
        return worst if worst == worst else float("inf")


def gradients(loss: Callable[[Case], torch.Tensor], case: Case) -> Gradients:
    """Loss and gradients of one call."""
    case.student_NH.grad = case.head_VH.grad = None
    value = loss(case)
    value.backward()
    result = Gradients(loss=value.item(), dx_NH=case.student_NH.grad.double(), dw_VH=case.head_VH.grad.double())
    case.student_NH.grad = case.head_VH.grad = None
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One measurement."""

    ms: float | None = None
    """Median; None where it did not fit or failed."""
    peak_gib: float | None = None
    """Allocator's maximum over the inputs; None on a CPU, or where it did not fit."""
    clock_mhz: int | None = None
    """The GPU's clock at the end of the measurement."""
    note: str = ""
    """Why there is no time."""


def _seconds(step: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def measure(step: Callable[[], None], *, device: torch.device, budget_s: float, rest_s: float = 0.0, group: dist.ProcessGroup | None = None,
            forget: Callable[[], None] = lambda: None) -> Measured:
    """Median time of `step` and its peak: a call to warm up, one for the peak, then at least 3 (2 of half a second or more), filling `budget_s`.

    The device rests `rest_s` first: a GPU at its power limit lowers its clock within some tenths of a second, so that a method
    measured after another one would look slower. The clock is read while one more step runs. `forget` drops what the last step
    left behind (gradients), so that the peak counts it in full. With `group` every rank repeats equally often, and the slowest
    rank's median counts.
    """
    gc.collect()
    try:
        base = 0
        if device.type == "cuda":
            step()
            forget()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            time.sleep(rest_s)
            base = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        first_s = _seconds(step, device)
        peak_gib = (torch.cuda.max_memory_allocated() - base) / GIB if device.type == "cuda" else None
        least = 3 if first_s < 0.5 else 2
        reps = int(_largest(max(least, min(50, int(budget_s / max(first_s, 1e-6)))), device, group))
        median_s = statistics.median(_seconds(step, device) for _ in range(reps))
        clock_mhz = None
        if device.type == "cuda":
            step()
            clock_mhz = _clock_mhz(device)
            torch.cuda.synchronize()
        return Measured(ms=_largest(median_s, device, group) * 1e3, peak_gib=peak_gib, clock_mhz=clock_mhz)
    except torch.OutOfMemoryError:
        return Measured(note="out of memory")
    except Exception as e:  # noqa: BLE001 -- a peer that fails is a row of the table, not the end of the benchmark
        return Measured(note=f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"[:90])


def _clock_mhz(device: torch.device) -> int | None:
    """Clock of the multiprocessors now; None where the driver does not tell."""
    try:
        return torch.cuda.clock_rate(device)
    except Exception:  # noqa: BLE001 -- needs NVML's Python package; the clock is a remark, not a result
        return None


def _largest(value: float, device: torch.device, group: dist.ProcessGroup | None) -> float:
    if group is None:
        return value
    everywhere = torch.tensor(float(value), device=device, dtype=torch.float64)
    dist.all_reduce(everywhere, op=dist.ReduceOp.MAX, group=group)
    return everywhere.item()


def accumulate_product(dw_VH: torch.Tensor, g_RV: torch.Tensor, x_RH: torch.Tensor) -> None:
    """dw += g^T x in fp32, as the loss does it."""
    if dw_VH.is_cuda and g_RV.dtype != torch.float32:
        torch.ops.aten.addmm.dtype_out(dw_VH, g_RV.t(), x_RH, torch.float32, out=dw_VH)
    else:
        dw_VH.addmm_(g_RV.t().to(dw_VH.dtype), x_RH.to(dw_VH.dtype))


def gemm_rates(case: Case, shape: Shape, *, window_rows: int, group_rows: int, device: torch.device, budget_s: float,
               rest_s: float) -> dict[str, float]:
    """TFLOP/s of the loss's four GEMMs alone, the student's on the rows of a group, the teacher's on those of a window, and of all four weighted by their FLOPs.

    Each is timed in bursts about as long as a sixth of `budget_s`, so that it meets the same power limit as the loss.
    """
    dtype, head_VH = case.head_VH.dtype, case.head_VH.detach()
    x_GH = torch.randn(group_rows, shape.student_width, device=device, dtype=dtype)
    teacher_RH = torch.randn(window_rows, shape.teacher_width, device=device, dtype=dtype)
    g_GV = torch.randn(group_rows, head_VH.shape[0], device=device, dtype=dtype) * 0.01
    t_RV, dx_GH = g_GV[:window_rows], torch.empty_like(x_GH)
    dw_VH = torch.zeros(head_VH.shape, device=device)
    student, teacher = (2 * head_VH.shape[0] * width for width in (shape.student_width, shape.teacher_width))
    steps = {
        "dx": (lambda: torch.mm(g_GV, head_VH, out=dx_GH), student * group_rows),
        "dw": (lambda: accumulate_product(dw_VH, g_GV, x_GH), student * group_rows),
        "student": (lambda: torch.mm(x_GH, head_VH.t(), out=g_GV), student * group_rows),
        "teacher": (lambda: torch.mm(teacher_RH, case.teacher_head_VH.t(), out=t_RV), teacher * window_rows),
    }
    rates, ms_per_row, flops_per_row = {}, 0.0, 0.0
    for name, (step, flops) in steps.items():
        num_calls = max(1, round(budget_s / 6 * 5e14 / flops)) if device.type == "cuda" else 1

        def many(step=step, num_calls=num_calls):
            for _ in range(num_calls):
                step()

        ms = measure(many, device=device, budget_s=budget_s, rest_s=rest_s).ms / num_calls
        rates[name] = flops / ms / 1e9
        rows = window_rows if name == "teacher" else group_rows
        ms_per_row, flops_per_row = ms_per_row + ms / rows, flops_per_row + flops / rows
    rates["all"] = flops_per_row / ms_per_row / 1e9
    rates["projections"] = (student + teacher) / (student / rates["student"] + teacher / rates["teacher"])
    return {name: round(rate, 3) for name, rate in rates.items()}


def square_rate(device: torch.device, dtype: torch.dtype, *, size: int, num_calls: int, rest_s: float) -> float:
    """TFLOP/s of a square GEMM on random data, `num_calls` in a row after a rest."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    if device.type == "cuda":
        torch.cuda.synchronize()
        time.sleep(rest_s)

    def many():
        for _ in range(num_calls):
            torch.mm(a, b, out=out)

    return round(2 * size**3 * num_calls / _seconds(many, device) / 1e12, 3)

"""Check the loss on this machine, in the layout it is started in, against its dense float64 reference.

Alone, or under torchrun for tensor parallelism over all processes (or over groups of --tp): every divergence and teacher signal,
losses and gradients in size and direction, with and without sequence parallelism, finite differences of the whole loss, and the
denominator over unequal micro-batches. Prints a table; exit code 1 on any failure. Run it on a new cluster before a training run.
"""

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_kd.errors import ConfigError, rule
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss import check, denominator
from megatron_kd.loss.hidden_term import HiddenTerm
from megatron_kd.loss.objective import DIVERGENCES, Objective
from megatron_kd.loss.reduce import group_rank, group_size

DIFFERENCE_STEP, DIFFERENCE_TOLERANCE = 1e-5, 1e-6
"""Central differences in float64: their own error is about step^2 and rounding / step, both below 1e-8 here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the result; field names are those of the JSON."""

    check: str
    layout: str
    scale: float
    cosine: float
    max_error: float
    passed: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line flags."""
    parser.add_argument("--json", type=Path, help="write the rows here as JSON")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: a GPU where there is one")
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto", help="row kernels to check")
    parser.add_argument("--tp", type=int, help="tensor-parallel size; default: all processes")


def run(args: argparse.Namespace) -> int:
    """0 where every check passed on every rank, else 1."""
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    started = int(os.environ.get("WORLD_SIZE", 1)) > 1 and not dist.is_initialized()
    if started:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=120))
    try:
        group = _tp_group(args.tp)
        rows = _everywhere(list(_all_rows(device, args.backend, group)), device)
        failed = [row for row in rows if not row.passed]
        if not dist.is_initialized() or dist.get_rank() == 0:
            _report(rows, device, args.json)
        return 1 if failed else 0
    finally:
        if started:
            dist.destroy_process_group()


def _tp_group(tp: int | None) -> dist.ProcessGroup | None:
    world = dist.get_world_size() if dist.is_initialized() else 1
    tp = tp or world
    if tp < 1 or world % tp:
        raise ConfigError(rule("--tp", tp, f"must divide the number of processes, {world}", "Start more processes with torchrun, or lower --tp"))
    if tp == 1:
        return None
    return dist.group.WORLD if tp == world else dist.new_subgroups(group_size=tp)[0]


def _all_rows(device: torch.device, backend: str, group: dist.ProcessGroup | None) -> Iterator[Row]:
    tp = group_size(group)
    dtypes = (torch.float32, torch.bfloat16)
    for case in cases():
        for dtype in dtypes:
            yield from _compare(replace(case, dtype=dtype), device, backend, group, f"tp={tp}", None)
    if tp > 1:
        base = next(iter(cases()))
        even = tuple(base.num_rows // tp + (rank < base.num_rows % tp) for rank in range(tp))
        last = (0,) * (tp - 1) + (base.num_rows,)
        for rows_per_rank, own_teacher_rows, name in ((even, False, "sp even"), (even, True, "sp even, teacher's rows too"), (last, True, "sp all rows on the last rank")):
            for dtype in dtypes:
                yield from _compare(replace(base, dtype=dtype), device, backend, group, f"tp={tp} {name}", rows_per_rank, own_teacher_rows)
    for case in cases():
        yield _finite_difference(replace(case, dtype=torch.float64, weights="ones"), device, group, f"tp={tp}")
    for kind in ("rows", "weights"):
        yield _denominator(kind, device, group, f"tp={tp}")
    for kind in ("cosine", "mse"):
        yield from _hidden_term(kind, device, group, f"tp={tp}" + " sp even" * (tp > 1))


def cases() -> Iterator[check.Case]:
    """Every divergence once, with what is easily lost spread over them: bias, scale, soft-cap, temperature, teacher signals."""
    transforms = dict(student_transform=HeadTransform(scale=0.9, softcap=8.0), teacher_transform=HeadTransform(softcap=6.0))
    for divergence in DIVERGENCES:
        yield check.Case(name=divergence, objective=Objective(divergence=divergence, kd_weight=0.7, ce_weight=0.3))
    yield check.Case(name="forward_kl, temperature 2, bias, soft-caps", objective=Objective(temperature=2.0, ce_weight=0.3), bias=True, **transforms)
    jsd = Objective(divergence="jsd", beta=0.3, temperature=2.0, ce_weight=0.3)
    yield check.Case(name="jsd, temperature 2, bias, soft-caps", objective=jsd, bias=True, **transforms)
    yield check.Case(name="forward_kl, dense logits", objective=Objective(ce_weight=0.3), signal="logits")
    for mode in ("tail_bucket", "renormalise", "none"):
        yield check.Case(name=f"forward_kl, top-K {mode}", objective=Objective(top_k_mode=mode, ce_weight=0.3), signal="top_k")
    yield check.Case(name="cross-entropy alone", objective=Objective(kd_weight=0.0, ce_weight=1.0), signal="labels")


def _compare(case: check.Case, device: torch.device, backend: str, group, layout: str, rows_per_rank, own_teacher_rows: bool = False) -> Iterator[Row]:
    tensors = check.build(case, device)
    got = check.actual(case, tensors, group=group, rows_per_rank=rows_per_rank, own_teacher_rows=own_teacher_rows, backend=backend)
    results = check.compare_all(got, check.expected(case, tensors), check.plain(case, tensors, group_size(group)), case.dtype)
    for part, result in results.items():
        yield Row(check=f"{case.name}: {part}", layout=f"{layout} {str(case.dtype).removeprefix('torch.')}", scale=result.scale, cosine=result.cosine,
                  max_error=result.max_error, passed=result.passed)


def _finite_difference(case: check.Case, device: torch.device, group, layout: str) -> Row:
    """Slope of the weighted loss along one random direction of all inputs, by central differences and by the gradients."""
    tensors = check.build(case, device)
    gen = torch.Generator().manual_seed(5)
    names = [name for name in ("x", "head", "bias") if tensors[name] is not None]
    direction = {name: torch.randn(tensors[name].shape, generator=gen, dtype=torch.float64).to(device) for name in names}

    def moved(step: float) -> check.Result:
        return check.actual(case, {**tensors, **{name: tensors[name] + step * direction[name] for name in names}}, group=group, window_rows=13)

    def value(step: float) -> torch.Tensor:
        return check.UPSTREAM * (tensors["weights"].double() * moved(step).loss_N).sum()

    at = moved(0.0)
    grads = {"x": at.dx_NH, "head": at.dw_VH, "bias": at.dbias_V}
    slope = sum((grads[name] * direction[name]).sum() for name in names)
    difference = (value(DIFFERENCE_STEP) - value(-DIFFERENCE_STEP)) / (2 * DIFFERENCE_STEP)
    error = ((slope - difference).abs() / difference.abs()).item()
    return Row(check=f"{case.name}: finite difference", layout=f"{layout} float64", scale=(slope / difference).item(),
               cosine=1.0 if slope * difference > 0 else -1.0, max_error=error, passed=error <= DIFFERENCE_TOLERANCE)


def _denominator(kind: str, device: torch.device, group, layout: str) -> Row:
    """dX of two unequal micro-batches over one denominator against the dense loss of all their rows."""
    parts = [check.Case(name="short", num_rows=3, weights="quarter", seed=1, dtype=torch.float64),
             check.Case(name="long", num_rows=26, seed=2, dtype=torch.float64)]
    built = [check.build(case, device) for case in parts]
    shares = [denominator.denominator_of(tensors["weights"], kind) for tensors in built]
    scales = denominator.row_factors(shares)
    got = torch.cat([check.actual(case, tensors, group=group).dx_NH * scale for case, tensors, scale in zip(parts, built, scales, strict=True)])
    total = sum((tensors["weights"] != 0).sum() if kind == "rows" else tensors["weights"].double().sum() for tensors in built)
    want = torch.cat([check.expected(case, tensors).dx_NH for case, tensors in zip(parts, built, strict=True)]) / total
    allowed = 1e-3 if kind == "weights" else 1e-10
    scale, error = ((got * want).sum() / (want * want).sum()).item(), ((got - want).abs().max() / want.abs().max()).item()
    cosine = ((got * want).sum() / (got.norm() * want.norm())).item()
    return Row(check=f"denominator {kind}, unequal micro-batches", layout=f"{layout} float64", scale=scale, cosine=cosine,
               max_error=error, passed=error <= allowed)


def _hidden_term(kind: str, device: torch.device, group, layout: str) -> Iterator[Row]:
    """The term on hidden states with a projection, each rank with its own rows, against plain autograd in float64."""
    case, tp, rank = check.Case(name=kind), group_size(group), group_rank(group)
    tensors = check.build(case, device)
    share = tuple(case.num_rows // tp + (r < case.num_rows % tp) for r in range(tp))
    own = slice(sum(share[:rank]), sum(share[:rank + 1]))
    term = HiddenTerm(kind, case.hidden_s, case.hidden_t, sequence_parallel=tp > 1, device=device)
    x = tensors["x"][own].clone().requires_grad_()
    value = term(x, tensors["t"], tp_group=group, rows_per_rank=share if tp > 1 else None)
    (check.UPSTREAM * tensors["weights"] * value).sum().backward()
    if tp > 1:
        dist.all_reduce(term.projection.grad, group=group)
    got = {"value": value.detach(), "dX of this rank": x.grad, "dP": term.projection.grad}
    dense = {}
    for dtype in (torch.float64, torch.float32):
        leaf, projection = tensors["x"].to(dtype).clone().requires_grad_(), term.projection.detach().to(dtype).clone().requires_grad_()
        a, t = leaf @ projection.t(), tensors["t"].to(dtype)
        values = 1 - torch.nn.functional.cosine_similarity(a, t) if kind == "cosine" else (a - t).square().mean(1)
        (check.UPSTREAM * tensors["weights"].to(dtype) * values).sum().backward()
        dense[dtype] = (values.detach(), leaf.grad[own], projection.grad)
    for (name, tensor), want, plain in zip(got.items(), dense[torch.float64], dense[torch.float32], strict=True):
        result = check.compare(tensor, want, plain, torch.float32)
        yield Row(check=f"hidden term {kind}: {name}", layout=f"{layout} float32", scale=result.scale, cosine=result.cosine,
                  max_error=result.max_error, passed=result.passed)


def _everywhere(rows: list[Row], device: torch.device) -> list[Row]:
    """The rows with `passed` only where every rank passed."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return rows
    passed = torch.tensor([row.passed for row in rows], dtype=torch.int32, device=device)
    dist.all_reduce(passed, dist.ReduceOp.MIN)
    return [replace(row, passed=bool(ok)) for row, ok in zip(rows, passed.tolist(), strict=True)]


def _report(rows: list[Row], device: torch.device, path: Path | None) -> None:
    width = max(len(row.check) for row in rows)
    print(f"{'check':<{width}}  {'layout':<42} {'scale':>10} {'cosine':>10} {'max error':>10}")
    for row in rows:
        print(f"{row.check:<{width}}  {row.layout:<42} {row.scale:>10.6f} {row.cosine:>10.7f} {row.max_error:>10.2e}  {'ok' if row.passed else 'FAILED'}")
    failed = sum(not row.passed for row in rows)
    print(f"{len(rows)} checks on {device.type}, {failed} failed")
    if path is not None:
        path.write_text(json.dumps({"passed": not failed, "device": str(device), "torch": torch.__version__, "rows": [asdict(row) for row in rows]}, indent=1))

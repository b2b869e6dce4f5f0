"""`megatron-kd bench loss` (and `bench stream`: cli/bench_stream.py): ours against other ways to compute the KD loss, on this machine.

A method's speed is shown only after its loss, dX and dW on a small case of the same widths and vocabulary passed the gate: relative
error against a float64 reference at most twice that of the plain dense loss in the same dtype (peers: at most 5%, their error is
shown). If ours fails, nothing is timed and the exit code is 1. Under torchrun the heads are sharded over all ranks (tensor
parallel), only ours runs, and its per-GPU efficiency against one GPU is reported.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone
from importlib import import_module, metadata
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_kd.cli import bench_stream
from megatron_kd.cli.bench_measure import (GIB, SHAPES, Gradients, Measured, Shape, gemm_rates, gradients, in_double, least_flops, make_case, measure,
                                           square_rate)
from megatron_kd.cli.bench_methods import METHODS, Case, Method, dense_divergence, dense_top_k
from megatron_kd.errors import ConfigError, rule
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.objective import DIVERGENCES, Objective
from megatron_kd.loss.signals import HiddenTeacher, TopKTeacher
from megatron_kd.loss.sizes import chosen_windows, default_windows
from megatron_kd.vocab import VocabSpec

GATE_ROWS = 200
PEER_GATE = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`megatron-kd bench loss` and `megatron-kd bench stream`."""
    commands = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    bench_stream.add_arguments(commands.add_parser("stream", help="the ring between two processes", description=bench_stream.__doc__,
                                                   formatter_class=argparse.RawDescriptionHelpFormatter))
    add_loss_arguments(commands.add_parser("loss", help="the loss against other implementations", description=__doc__,
                                           formatter_class=argparse.RawDescriptionHelpFormatter))


def add_loss_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `megatron-kd bench loss`."""
    parser.add_argument("--shape", nargs="+", default=["llama-8b-3b"], metavar="NAME|V,Hs,Ht",
                        help=f"{', '.join(SHAPES)}, or V,Hs,Ht (default: %(default)s)")
    parser.add_argument("--tokens", nargs="+", type=int, default=[32_768], help="rows (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=100, help="kept tokens of the offline targets (default: %(default)s)")
    parser.add_argument("--divergence", nargs="+", choices=DIVERGENCES, default=["forward_kl"], help="ours: one row each (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="only the methods whose name contains one of these; `ours` for ours alone")
    parser.add_argument("--peers", action="store_true", help="also installed packages: liger-kernel, ModelOpt")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], help="of rows and heads (default: bfloat16 on cuda, float32 on cpu)")
    parser.add_argument("--window-rows", type=int, help="ours: rows whose teacher logits exist at once (default: chosen from the shape)")
    parser.add_argument("--group-windows", type=int, help="ours: windows that share a student's projection, dX and dW (default: chosen from the shape)")
    parser.add_argument("--budget-s", type=float, default=0.6, help="time spent repeating one measurement (default: %(default)s)")
    parser.add_argument("--rest-s", type=float, default=1.0,
                        help="GPU: rest before each measurement; 0 with a long budget shows the sustained rate (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows with device, versions, commit, date and command")
    parser.add_argument("--commit", help="recorded commit, for a tree without .git")


def parse_shape(text: str) -> tuple[str, Shape]:
    """A name of SHAPES, or `V,Hs,Ht`. Errors: ConfigError."""
    if text in SHAPES:
        return text, SHAPES[text]
    parts = text.split(",")
    if len(parts) != 3 or not all(p.isdigit() and int(p) for p in parts):
        raise ConfigError(rule("--shape", text, f"must be one of {', '.join(SHAPES)} or V,Hs,Ht",
                               "Give three positive integers, e.g. 128256,3072,4096"))
    vocab, student_width, teacher_width = map(int, parts)
    return text, Shape(vocab=vocab, student_width=student_width, teacher_width=teacher_width)


class Bench:
    """One process's part of the benchmark; rank 0 prints."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.rank, self.world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.device = torch.device(args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None)
        self.dtype = getattr(torch, args.dtype or ("bfloat16" if args.device == "cuda" else "float32"))
        self.group = None
        self.rows, self.gemm = [], []
        if args.device == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            dist.init_process_group("nccl" if args.device == "cuda" else "gloo", device_id=self.device if args.device == "cuda" else None)
            self.group = dist.group.WORLD

    def say(self, text: str) -> None:
        """Print on rank 0, at once."""
        if self.rank == 0:
            print(text, flush=True)

    def methods(self) -> list[Method]:
        """Ours, then the others that were asked for and import."""
        wanted = self.args.methods
        kinds = [*self.args.divergence, "top_k", "evaluation"]
        chosen = [self.ours(kind) for kind in kinds]
        if self.world > 1:
            chosen += [self.ours(kind, alone=True) for kind in kinds]
        else:
            chosen += [m for m in METHODS if self.args.peers or not m.peer]
        chosen = [m for m in chosen if wanted is None or any(w in m.name for w in wanted)]
        usable = []
        for method in chosen:
            try:
                for module in method.needs:
                    import_module(module)
                usable.append(method)
            except Exception as e:  # noqa: BLE001 -- a peer that does not import is named and left out
                self.say(f"{method.name}: not measured, {type(e).__name__}: {e}")
        return usable

    def ours(self, kind: str, *, alone: bool = False) -> Method:
        """The fused loss with one divergence, with top-K targets, or without gradient; `alone`: on one GPU even under torchrun."""
        group = None if alone else self.group
        tp = 1 if group is None else self.world
        plan = {name: getattr(self.args, name) for name in ("window_rows", "group_windows") if getattr(self.args, name)}
        objective = {"divergence": kind} if kind in DIVERGENCES else {}

        def loss(case: Case) -> torch.Tensor:
            padded = case.head_VH.shape[0] * tp
            if kind == "top_k":
                teacher = TopKTeacher(ids_NK=case.ids_NK, log_probs_NK=case.log_probs_NK, tail_N=case.tail_N)
            else:
                teacher = HiddenTeacher(rows_NH=case.teacher_NH, head_VH=case.teacher_head_VH)
            out = fused_linear_kd(case.student_NH, case.head_VH, teacher, labels_N=case.labels_N, tp_group=group,
                                  objective=Objective(**objective, kd_weight=case.kd_weight, ce_weight=case.ce_weight),
                                  vocab=VocabSpec(true_size=padded, student_padded=padded, teacher_padded=padded, tp=tp), **plan)
            return out.loss_N.mean()

        name = {"top_k": "ours top-k"}.get(kind, f"ours {kind}") + (" tp=1" if alone else "")
        return Method(name=name, loss=loss, target=kind if kind in ("top_k", "evaluation") else "online", ours=True, alone=alone,
                      kind=kind if kind in DIVERGENCES else "forward_kl", note="no gradient" if kind == "evaluation" else "")

    def shard(self, case: Case) -> Case:
        """This rank's rows of both heads; everything else as it is."""
        if self.group is None:
            return case
        mine = self.columns(case.head_VH.shape[0])
        return replace(case, head_VH=case.head_VH.detach()[mine].clone().requires_grad_(), teacher_head_VH=case.teacher_head_VH[mine].clone())

    def columns(self, vocab: int) -> slice:
        """This rank's vocabulary columns."""
        return slice(self.rank * vocab // self.world, (self.rank + 1) * vocab // self.world)

    def gate(self, shape: Shape, methods: list[Method]) -> dict[str, float]:
        """Error by name of the methods that passed. Errors: SystemExit where ours did not."""
        case = make_case(shape, GATE_ROWS, top_k=self.args.top_k, device=self.device, dtype=self.dtype, seed=1)
        errors, references = {}, {}
        for method in methods:
            mine = replace(case, ce_weight=case.ce_weight if method.has_ce else 0.0, tail_bucket=method.tail_bucket)
            kind = method.target == "top_k", method.kind, method.has_ce, method.tail_bucket
            if kind not in references:
                dense = dense_top_k if method.target == "top_k" else lambda c, divergence=method.kind: dense_divergence(c, divergence)
                exact = gradients(dense, in_double(mine))
                references[kind] = exact, gradients(dense, mine).error(exact)
            exact, plain_error = references[kind]
            error, allowed = self.error(method, mine, exact), PEER_GATE if method.peer else 2.0 * plain_error + 1e-6
            if error <= allowed:
                errors[method.name] = error
                continue
            print(f"rank {self.rank}: {method.name} fails the gate: error {error:.2e}, allowed {allowed:.2e}; not timed", flush=True)
            if method.ours:
                raise SystemExit(1)
        return errors

    def error(self, method: Method, case: Case, exact: Gradients) -> float:
        """Error of loss and gradients against `exact`; of the loss alone for evaluation; inf where the method raises."""
        try:
            columns = slice(None) if method.alone else self.columns(case.head_VH.shape[0])
            case = case if method.alone else self.shard(case)
            if method.target == "evaluation":
                with torch.no_grad():
                    return abs(method.loss(case).item() - exact.loss) / abs(exact.loss)
            return gradients(method.loss, case).error(replace(exact, dw_VH=exact.dw_VH[columns]))
        except Exception as e:  # noqa: BLE001 -- shown as what it is; a peer that cannot run is left out
            if method.ours:
                raise
            print(f"{method.name}: {type(e).__name__}: {str(e)[:200]}", flush=True)
            return float("inf")

    def time(self, method: Method, case: Case) -> Measured:
        """Forward and backward, or forward alone for evaluation."""
        case = replace(case, ce_weight=case.ce_weight if method.has_ce else 0.0, tail_bucket=method.tail_bucket)

        def forget():
            case.student_NH.grad = case.head_VH.grad = None

        def step():
            forget()
            with torch.set_grad_enabled(method.target != "evaluation"):
                loss = method.loss(case)
            if loss.requires_grad:
                loss.backward()

        measured = measure(step, device=self.device, budget_s=self.args.budget_s, rest_s=self.args.rest_s, forget=forget,
                           group=self.group if method.ours and not method.alone else None)
        forget()
        return measured

    def run(self) -> None:
        """All shapes and sizes."""
        for name, shape in map(parse_shape, self.args.shape):
            methods = self.methods()
            errors = self.gate(shape, methods)
            self.say(f"{name}: V={shape.vocab} H_s={shape.student_width} H_t={shape.teacher_width}, {str(self.dtype).removeprefix('torch.')}, "
                     f"gate passed by {len(errors)} of {len(methods)} methods at {GATE_ROWS} rows")
            for num_rows in self.args.tokens:
                case = make_case(shape, num_rows, top_k=self.args.top_k, device=self.device, dtype=self.dtype)
                sharded = self.shard(case)
                for method in methods:
                    if method.name in errors:
                        self.record(method, name, shape, num_rows, self.time(method, case if method.alone else sharded), errors[method.name])
                self.save()
            self.efficiency(name)
            self.gemm.append({"shape": name, **self.gemms(replace(shape, vocab=sharded.head_VH.shape[0]), sharded)})
            self.say("GEMMs alone, TFLOP/s: " + ", ".join(f"{k} {v:g}" for k, v in self.gemm[-1].items() if k != "shape"))
            self.save()

    def record(self, method: Method, name: str, shape: Shape, num_rows: int, measured: Measured, error: float) -> None:
        """One row of the table and of the JSON; TFLOP/s are per GPU."""
        tp = 1 if method.alone else self.world
        tflops = None if measured.ms is None else least_flops(shape, num_rows, method.target) / tp / measured.ms / 1e9
        dx_gib = 0.0 if method.target == "evaluation" else num_rows * shape.student_width * self.dtype.itemsize / GIB
        self.rows.append({"method": method.name, "shape": name, "tokens": num_rows, "tp": tp, "ms": measured.ms, "tflops": tflops,
                          "peak_gib": measured.peak_gib, "clock_mhz": measured.clock_mhz, "dx_gib": dx_gib, "error": error,
                          "note": measured.note or method.note})
        cells = ["-" if value is None else format(value, spec) for value, spec in ((measured.ms, ".2f"), (tflops, ".4g"), (measured.peak_gib, ".2f"))]
        self.say(f"{method.name:26s} {num_rows:8d} {cells[0]:>10s} ms {cells[1]:>7s} TFLOP/s {cells[2]:>7s} GiB  "
                 f"error {error:.1e}  {self.rows[-1]['note']}")

    def efficiency(self, name: str) -> None:
        """Per-GPU rate of the sharded loss over that of the same GPU alone, into the row and the table."""
        rows = {(row["method"], row["tokens"]): row for row in self.rows if row["shape"] == name}
        for (method, num_rows), row in rows.items():
            alone = rows.get((f"{method} tp=1", num_rows))
            if alone and row["tflops"] and alone["tflops"]:
                row["efficiency"] = row["tflops"] / alone["tflops"]
                self.say(f"{method}, {num_rows} rows: per-GPU efficiency at tp={self.world} {row['efficiency']:.1%}")

    def gemms(self, shape: Shape, case: Case) -> dict[str, float]:
        """Rates of the GEMMs alone at the windows in force, and of a square one in a burst and over half a second or more."""
        args, cuda = self.args, self.device.type == "cuda"
        window_rows, group_windows = chosen_windows(args.window_rows, args.group_windows, default_windows(case.head_VH.shape[0], self.device.type, tp=self.world))
        group_rows = window_rows * group_windows
        rates = gemm_rates(case, shape, window_rows=window_rows, group_rows=group_rows, device=self.device, budget_s=args.budget_s, rest_s=args.rest_s)
        square = {name: square_rate(self.device, self.dtype, size=8192 if cuda else 256, num_calls=calls if cuda else 1, rest_s=args.rest_s)
                  for name, calls in (("square_burst", 10), ("square_sustained", 500))}
        return {"window_rows": window_rows, "group_rows": group_rows, **rates, **square}

    def save(self) -> None:
        """Writes the JSON file as far as it is known, so that a run cut short leaves what it measured."""
        if self.args.json and self.rank == 0:
            self.args.json.write_text(json.dumps(self.report(), indent=1) + "\n")

    def report(self) -> dict:
        """What the JSON file holds."""
        device = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
        return {"rows": self.rows, "gemm_tflops": self.gemm, "device": device, "dtype": str(self.dtype).removeprefix("torch."),
                "versions": versions(), "commit": self.args.commit or current_commit(),
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "command": shlex.join(["megatron-kd", *sys.argv[1:]])}


def versions() -> dict[str, str | None]:
    """Versions that decide a measurement."""
    found = {"cuda": torch.version.cuda}
    for package in ("torch", "triton", "liger-kernel", "nvidia-modelopt"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def current_commit() -> str | None:
    """Commit of the tree this file is in; None outside a checkout."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def run(args: argparse.Namespace) -> int:
    """Exit code 0, or 1 where our loss fails its gate."""
    if args.what == "stream":
        return bench_stream.run(args)
    bench = Bench(args)
    try:
        bench.run()
    finally:
        if bench.group is not None:
            dist.destroy_process_group()
    return 0

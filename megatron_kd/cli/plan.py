"""Memory, traffic, balance and cost of a distillation before anything is rented.

  megatron-kd plan recipes/RECIPE.yaml [--gpus N]
  megatron-kd plan --teacher qwen3.5-35b-a3b --student qwen3.5-9b --gpus 16 --gpu h100-80 --seq 8192

Works without torch and without network; a model is a Hugging Face config (file or folder) or a name known offline.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

from megatron_kd.errors import PlanError, rule
from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.balance import Rates, speed
from megatron_kd.plan.dense import DENSE_LOSSES
from megatron_kd.plan.frontier import frontier, largest_sequence, largest_teacher
from megatron_kd.plan.gpus import GPUS, Gpu, cpu, gpu
from megatron_kd.plan.job import PLACEMENTS, Job
from megatron_kd.plan.memory import all_stages, worst
from megatron_kd.plan.models import load_model
from megatron_kd.plan.report import PlacementPlan, Plan, as_dict, job_dict, render
from megatron_kd.plan.search import Candidate, Found, Limits, recommendation, search


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `megatron-kd plan`."""
    parser.add_argument("recipe", nargs="?", help="recipe YAML; its placement is planned as written, the others on as many GPUs")
    parser.add_argument("overrides", nargs="*", help="key=value on top of the recipe")
    parser.add_argument("--teacher", help="Hugging Face config, folder, or known name")
    parser.add_argument("--student", help="the same for the student")
    parser.add_argument("--gpus", type=int, help="GPUs of the whole run, teacher included")
    parser.add_argument("--gpu", help=f"one of {', '.join(GPUS)} (default h100-80; a recipe with device: cpu is planned on this machine's CPU)")
    parser.add_argument("--gpu-memory-gib", type=float, help="another memory size")
    parser.add_argument("--gpus-per-node", type=int, help="GPUs that NVLink joins")
    parser.add_argument("--network-gb-s", type=float, help="network bandwidth per GPU, one direction, GB/s")
    parser.add_argument("--seq", type=int, help="tokens of a sequence (default 4096)")
    parser.add_argument("--global-batch", type=int, help="sequences of a step (default 256)")
    parser.add_argument("--placement", choices=PLACEMENTS, action="append", help="only this one; may be repeated")
    for name in ("tp", "pp", "ep", "cp", "micro-batch", "replicas"):
        parser.add_argument(f"--{name}", type=int, help="pin the number of teacher replicas" if name == "replicas" else "pin it for the student")
    parser.add_argument("--max-cp", type=int, default=1, help="largest context-parallel degree to try (default 1)")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="pin the student's activation recompute")
    parser.add_argument("--payload", choices=("topk", "hidden"), help="what a cache holds (default topk)")
    parser.add_argument("--k", type=int, help="kept tokens of a cached row (default 100)")
    parser.add_argument("--loss", choices=("fused", *DENSE_LOSSES), default="fused",
                        help="plan with a loss over full logits, for comparison: plain PyTorch's, or ModelOpt's (Megatron-LM's for top-K rows)")
    parser.add_argument("--row-share", type=float, default=1.0, help="share of positions whose loss mask is on (default 1)")
    parser.add_argument("--cache-epochs", type=int, default=1, help="passes over the data that one cache build serves (default 1)")
    parser.add_argument("--measured", metavar="RUN.json", help="measured speeds that replace the assumed efficiencies")
    parser.add_argument("--price", type=float, help="price of a GPU-hour; adds cost per billion tokens")
    parser.add_argument("--search", action="store_true", help="print the best few layouts of each placement and why others fail")
    parser.add_argument("--keep", type=int, default=3, help="how many --search prints (default 3)")
    parser.add_argument("--emit", metavar="RECIPE.yaml", help="write a recipe of the recommended placement (or of the one --placement)")
    parser.add_argument("--json", metavar="FILE", nargs="?", const="-", help="write JSON to FILE, or to stdout instead of tables")
    parser.add_argument("--plot", metavar="FILE", help="write a picture: memory per stage, frontier")
    parser.add_argument("--brief", action="store_true", help="summary table and recommendation only")
    parser.add_argument("--predict-runs", nargs=2, metavar=("RUNS.json", "OUT.json"),
                        help="write the predictions of a list of runs, to be held against measurements")
    parser.add_argument("--write-runs", nargs=2, metavar=("RUNS.json", "FOLDER"), help="write recipes and model configs of that list")


def run(args: argparse.Namespace) -> int:
    """Plan and print; 0, or 3 where no placement fits."""
    if args.predict_runs or args.write_runs:
        return _runs(args)
    rates = Rates.measured(args.measured) if args.measured else Rates()
    template, given = _template(args)
    num_gpus = args.gpus or template.num_gpus
    limits = Limits(tp=args.tp, pp=args.pp, ep=args.ep, cp=args.cp, micro_batch=args.micro_batch, recompute=args.recompute, replicas=args.replicas,
                    max_cp=args.max_cp)
    found: dict[str, Found] = {}
    for placement in args.placement or PLACEMENTS:
        if given and placement == template.placement:
            tight = min(all_stages(template), key=lambda stage: stage.headroom)
            candidate = Candidate(job=template, memory=tight, speed=speed(template, rates, cache_epochs=args.cache_epochs))
            found[placement] = Found(best=(candidate,) * tight.fits, reasons={}, nearest=None if tight.fits else tight,
                                     nearest_job=None if tight.fits else template)
        else:
            found[placement] = search(template, placement, num_gpus, rates, limits=limits, keep=args.keep, cache_epochs=args.cache_epochs)
    plan = make_plan(found, rates, price=args.price, cache_epochs=args.cache_epochs)
    if args.emit:
        _emit(args, plan, found)
    if args.plot:
        from megatron_kd.plan.plot import draw

        draw(plan, args.plot)
    if args.json:
        _write_json(args, plan, found)
    if args.json != "-":
        print(render(plan, detail=not (args.brief or args.search)), end="")
        if args.search:
            print(_search_text(found))
    return 0 if any(entry.fits for entry in plan.placements) else 3


def make_plan(found: dict[str, Found], rates: Rates, *, price: float | None = None, cache_epochs: int = 1) -> Plan:
    """The plan of the best job of each placement, or of the nearest where none fits."""
    entries, refused = [], {}
    for placement, result in found.items():
        job = result.best[0].job if result.best else result.nearest_job
        if job is None:
            refused[placement] = result.why_none
            continue
        entries.append(PlacementPlan(job=job, stages=tuple(all_stages(job)), speed=speed(job, rates, cache_epochs=cache_epochs),
                                     largest_seq=largest_sequence(job), largest_teacher=largest_teacher(job),
                                     full_logits=worst(replace(job, loss="modelopt"))))
    jobs = {entry.job.placement: entry.job for entry in entries}
    base = entries[0].job if entries else None
    sharded = "sharded over data parallelism" if base and base.distributed_optimizer else "not sharded"
    assumed = ["routing spreads tokens evenly over experts", "embedding, heads and norms as in the checkpoint; no MTP, no vision tower",
               f"fp32 gradients, fp32 master weights and Adam moments, {sharded}"]
    if rates.student_tokens_s_gpu is None:
        assumed.append(f"compute at {rates.dense:.0%} (dense), {rates.moe:.0%} (MoE) and {rates.loss:.0%} (loss) of peak: replace with --measured")
    edge = tuple(frontier(jobs.get("colocated"), jobs.get("streamed")))
    return Plan(placements=tuple(entries), frontier=edge, recommendation=recommendation(found), price=price, assumptions=tuple(assumed),
                refused=refused)


def _gpu(args: argparse.Namespace) -> Gpu:
    chosen = gpu(args.gpu or "h100-80")
    if args.gpu_memory_gib:
        chosen = replace(chosen, memory_bytes=int(args.gpu_memory_gib * 2**30))
    if args.gpus_per_node:
        chosen = replace(chosen, gpus_per_node=args.gpus_per_node)
    if args.network_gb_s:
        chosen = replace(chosen, network_bytes_s=args.network_gb_s * 1e9)
    return chosen


def _template(args: argparse.Namespace) -> tuple[Job, bool]:
    """(job, whether it is a recipe's own)."""
    for name in ("gpus", "seq", "global_batch", "k", "cache_epochs"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise PlanError(rule(f"--{name.replace('_', '-')}", getattr(args, name), "must be at least 1", "Give a positive number"))
    if not 0 < args.row_share <= 1:
        raise PlanError(rule("--row-share", args.row_share, "must be above 0 and at most 1", "Give the share of positions whose loss mask is on"))
    if args.recipe:
        if args.teacher or args.student:
            raise PlanError(rule("--teacher/--student", (args.teacher, args.student), "a recipe names its models",
                                 "Give either a recipe or two models"))
        from megatron_kd.config.load import load
        from megatron_kd.plan.recipe import job_from_recipe

        for name, key in (("seq", "data.seq_length"), ("global_batch", "train.global_batch"), ("payload", "cache.payload"), ("k", "cache.k")):
            if getattr(args, name) is not None:
                raise PlanError(rule(f"--{name.replace('_', '-')}", getattr(args, name), "a recipe says it itself", f"Add {key}={getattr(args, name)}"))
        recipe = load(args.recipe, args.overrides)
        job = replace(job_from_recipe(recipe, _gpu(args), args.gpus), loss=args.loss, row_share=args.row_share)
        return (replace(job, gpu=cpu(job.num_gpus)) if recipe.device == "cpu" and not args.gpu else job), True
    missing = [name for name in ("teacher", "student", "gpus") if not getattr(args, name)]
    if missing:
        raise PlanError(rule("arguments", missing, "a plan needs a recipe, or --teacher, --student and --gpus",
                             "For example: megatron-kd plan --teacher qwen3.5-35b-a3b --student qwen3.5-9b --gpus 16"))
    return Job(student=load_model(args.student), teacher=load_model(args.teacher), placement="colocated", gpu=_gpu(args), layout=ParallelLayout(),
               seq=args.seq or 4096, global_batch=args.global_batch or 256, payload=args.payload or "topk", top_k=args.k or 100, row_share=args.row_share,
               loss=args.loss), False


def _emit(args: argparse.Namespace, plan: Plan, found: dict[str, Found]) -> None:
    from megatron_kd.plan.recipe import emit

    named = plan.recommendation.split(":")[0].lower()
    placement = named if named in found and found[named].best else next((name for name in found if found[name].best), None)
    if placement is None:
        raise PlanError(rule("--emit", args.emit, "nothing fits, so there is no recipe to write", plan.recommendation))
    job = found[placement].best[0].job
    emit(job, args.emit, student=args.student or job.student.name, teacher=args.teacher or job.teacher.name)


def _write_json(args: argparse.Namespace, plan: Plan, found: dict[str, Found]) -> None:
    content = as_dict(plan)
    if args.search:
        content["search"] = {name: {"best": [{"job": job_dict(c.job), "gpu_hours_per_billion": c.speed.gpu_hours_per_billion,
                                              "total_bytes": c.memory.total} for c in result.best],
                                    "reasons": result.reasons, "why_none": None if result.best else result.why_none} for name,
                             result in found.items()}
    text = json.dumps(content, indent=1)
    if args.json == "-":
        print(text)
    else:
        Path(args.json).parent.mkdir(parents=True, exist_ok=True)
        Path(args.json).write_text(text + "\n", encoding="utf-8")


def _search_text(found: dict[str, Found]) -> str:
    lines = []
    for placement, result in found.items():
        lines.append(f"\n{placement}:" if result.best else f"\n{placement}: {result.why_none}")
        for c in result.best:
            teacher = f", teacher {c.job.teacher_replicas} x ({c.job.teacher_shard.describe()})" if placement == "streamed" else ""
            settings = f"micro-batch {c.job.micro_batch}, recompute {c.job.recompute}, batch {c.job.global_batch}"
            lines.append(f"  {c.job.layout.describe()}{teacher}, {settings}: "
                         f"{c.memory.total / 2**30:.1f} GiB, {c.speed.gpu_hours_per_billion:.0f} GPU-hours per billion tokens")
        lines += [f"  left out, {num}: {reason}" for reason, num in result.reasons.items()]
    return "\n".join(lines)


def _runs(args: argparse.Namespace) -> int:
    """Predictions and recipes of a list of runs."""
    from megatron_kd.plan.predict import predict, table, write_runs

    if args.predict_runs:
        print(table(predict(*args.predict_runs)))
    if args.write_runs:
        for path in write_runs(*args.write_runs):
            print(path)
    return 0

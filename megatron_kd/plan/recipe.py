"""Between a Recipe and a Job: plan what a recipe says, and write the recipe of a job that was found.

Called by the command line. Uses config's own loader, so that what is emitted has been loaded once. No torch.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from megatron_kd.config.load import build
from megatron_kd.config.schema import PruneConfig, Recipe
from megatron_kd.errors import PlanError, rule
from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.gpus import Gpu
from megatron_kd.plan.job import Job
from megatron_kd.plan.models import HUB, ModelShape, load_model


def pruned(model: ModelShape, prune: PruneConfig) -> ModelShape:
    """The shape of a student that is cut from `model`. Errors: PlanError for layers or experts that are not there."""
    if prune.keep_layers is not None:
        if prune.keep_layers[-1] >= model.num_layers:
            raise PlanError(rule("prune.keep_layers", prune.keep_layers[-1], f"{model.name} has layers 0 to {model.num_layers - 1}", "Leave it out"))
        model = replace(model, mixers=tuple(model.mixers[layer] for layer in prune.keep_layers))
    if prune.num_layers is not None:
        if not 1 < prune.num_layers <= model.num_layers:
            raise PlanError(rule("prune.num_layers", prune.num_layers, f"{model.name} has {model.num_layers} layers", "Choose from 2 to that many"))
        kept = [round(i * (model.num_layers - 1) / (prune.num_layers - 1)) for i in range(prune.num_layers)]
        model = replace(model, mixers=tuple(model.mixers[layer] for layer in kept))
    if prune.num_experts is not None:
        if model.moe is None or prune.num_experts > model.moe.experts:
            raise PlanError(rule("prune.num_experts", prune.num_experts, f"{model.name} does not have that many experts", "Choose fewer"))
        model = replace(model, moe=replace(model.moe, experts=prune.num_experts))
    return replace(model, name=f"{model.name} pruned")


def job_from_recipe(recipe: Recipe, gpu: Gpu, num_gpus: int | None) -> Job:
    """The job of `recipe` on `num_gpus` GPUs in all (None: the fewest it takes). Errors: PlanError, UnsupportedLayout."""
    student, teacher = load_model(recipe.student.model), load_model(recipe.teacher.model)
    if recipe.student.prune is not None:
        student = pruned(student, recipe.student.prune)
    return job_of(recipe, student, teacher, gpu, num_gpus)


def job_of(recipe: Recipe, student: ModelShape, teacher: ModelShape, gpu: Gpu, num_gpus: int | None) -> Job:
    """The same with the models given."""
    teacher_layout, teacher_gpus = None, 0
    if recipe.teacher.placement == "streamed":
        degrees = recipe.teacher.layout or recipe.student.layout
        teacher_layout = degrees.for_world(recipe.teacher.world_size or degrees.min_world)
        teacher_gpus = teacher_layout.world_size * recipe.stream.replicas
    elif recipe.teacher.placement == "cached":
        degrees = recipe.teacher.layout or recipe.student.layout
        teacher_layout = degrees.for_world(degrees.min_world)
    world = recipe.student.layout.min_world if num_gpus is None else num_gpus - teacher_gpus
    if world < 1:
        raise PlanError(rule("--gpus", num_gpus, f"the streamed teacher alone takes {teacher_gpus} GPUs", "Give more GPUs or fewer replicas"))
    fp32 = recipe.student.precision == "fp32"
    return Job(
        student=student, teacher=teacher, placement=recipe.teacher.placement, gpu=gpu, layout=recipe.student.layout.for_world(world),
        teacher_layout=teacher_layout, teacher_replicas=recipe.stream.replicas, seq=recipe.data.seq_length, micro_batch=recipe.train.micro_batch,
        global_batch=recipe.train.global_batch, recompute=recipe.train.recompute, recompute_modules=_recompute_modules(recipe),
        distributed_optimizer=recipe.train.distributed_optimizer, dtype_bytes=4 if fp32 else 2, kernels="torch" if recipe.device == "cpu" else "te",
        window_rows=recipe.loss.window_rows, ring_depth=recipe.stream.ring_depth, payload=recipe.cache.payload, top_k=recipe.cache.k,
        freeze_head=recipe.student.freeze_head, lora_rank=recipe.student.lora.rank if recipe.student.lora else None,
        divergence=recipe.loss.divergence, hidden_term=recipe.loss.hidden_term is not None, cross_entropy=bool(recipe.loss.ce_weight or recipe.loss.ce_weight_end),
        fused_activation=recipe.bridge.get("model.bias_activation_fusion"))


def _recompute_modules(recipe: Recipe) -> tuple[str, ...]:
    modules = recipe.bridge.get("model.recompute_modules")
    return tuple(modules) if modules else ("core_attn",)


def _layout_dict(layout: ParallelLayout) -> dict[str, Any]:
    out = {name: getattr(layout, name) for name in ("tp", "pp", "cp", "ep") if getattr(layout, name) > 1}
    if layout.etp is not None:
        out["etp"] = layout.etp
    if layout.vpp:
        out["vpp"] = layout.vpp
    return out | ({"sequence_parallel": True} if layout.sequence_parallel else {})


def recipe_dict(job: Job, *, student: str, teacher: str) -> dict[str, Any]:
    """A recipe of `job` on mock data: what differs from the defaults. `student`, `teacher`: what the user called them."""
    out: dict[str, Any] = {
        "name": f"{job.teacher.name}-to-{job.student.name}-{job.placement}".replace(".", "_"),
        "output_dir": f"out/{job.teacher.name}-to-{job.student.name}",
        "student": {"model": HUB.get(student, student), "layout": _layout_dict(job.layout)},
        "teacher": {"model": HUB.get(teacher, teacher), "placement": job.placement},
        "data": {"kind": "mock", "seq_length": job.seq},
        "train": {"iters": 10, "global_batch": job.global_batch, "micro_batch": job.micro_batch, "recompute": job.recompute,
                  "distributed_optimizer": job.distributed_optimizer},
    }
    if job.window_rows is not None:
        out["loss"] = {"window_rows": job.window_rows}
    if job.placement == "streamed":
        out["teacher"] |= {"layout": _layout_dict(job.teacher_shard), "world_size": job.teacher_shard.world_size}
        out["stream"] = {"replicas": job.teacher_replicas, "ring_depth": job.ring_depth}
    if job.placement == "cached":
        out["cache"] = {"payload": job.payload, "k": job.top_k}
    return out


def emit(job: Job, path: str | Path, *, student: str, teacher: str) -> Recipe:
    """Write `job` as a recipe that config/load reads, and return what it reads. The data is mock ids: put your own in `data`."""
    content = recipe_dict(job, student=student, teacher=teacher)
    recipe = build(content, source=str(path))
    head = (f"# Written by `megatron-kd plan --emit` for {job.num_gpus} x {job.gpu.name}: student {job.layout.describe()}"
            + (f", teacher {job.teacher_replicas} x ({job.teacher_shard.describe()})" if job.placement == "streamed" else "") + ".\n"
            "# Ten steps on mock ids: set data.kind with its paths, and train.iters, before training.\n")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return recipe

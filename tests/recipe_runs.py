"""The proof run of one recipe: shrink it, train two steps, save, resume for a third, export, load with transformers.

Called by tests/e2e/test_recipes.py for one recipe of each kind and by tools/run_recipes.py for all of them, on rank pools whose
processes have imported Megatron once.
"""

import concurrent.futures
import dataclasses
import json
import math
import secrets
import shutil
import time
from pathlib import Path

from megatron_kd.cli.ports import free_port
from megatron_kd.config.load import load
from megatron_kd.convert.shrink import Shrunk, shrink

FIRST_ITERS, ALL_ITERS = 2, 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proof:
    """What one proof run showed."""

    recipe: str
    placement: str
    pair: str
    student_layout: str
    teacher_layout: str | None
    processes: int
    dropped: tuple[str, ...]
    losses: tuple[dict, ...]
    resumed_after_step: int
    exported_tensors: int
    max_logit_error: float
    wall_s: float


def prove(recipe_path: Path, folder: Path, pool, teacher_pool=None) -> Proof:
    """Run it below `folder` (emptied before). Errors: RankFailure, AssertionError."""
    started_s = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    shrunk = shrink(recipe_path, folder, iters=FIRST_ITERS)
    recipe = load(shrunk.path)
    if recipe.teacher.placement == "cached":
        layout = recipe.teacher.layout or recipe.student.layout
        for iters in (FIRST_ITERS, ALL_ITERS):  # Megatron's dataset cuts other sequences for another number of samples
            pool.run(build_cache, layout.min_world, timeout_s=120, path=shrunk.path, iters=iters)
    _train(shrunk, recipe, pool, teacher_pool, FIRST_ITERS)
    _train(shrunk, recipe, pool, teacher_pool, ALL_ITERS)
    exported = pool.run(export, shrunk.student_ranks, timeout_s=120, path=shrunk.path, target=folder / "hf")[0]
    steps = [json.loads(line) for line in (Path(recipe.output_dir) / "history.jsonl").read_text().splitlines()]
    losses = _check_history(steps)
    _check_export(folder / "hf")
    ranks = shrunk.student_ranks
    return Proof(recipe=recipe_path.stem, placement=recipe.teacher.placement, pair=pair_kind(recipe), student_layout=recipe.student.layout.for_world(ranks).describe(),
                 teacher_layout=recipe.teacher.layout.for_world(recipe.teacher.layout.min_world).describe() if recipe.teacher.layout else None,
                 processes=ranks + shrunk.teacher_ranks, dropped=shrunk.notes, losses=tuple(losses), resumed_after_step=FIRST_ITERS,
                 exported_tensors=exported.num_tensors, max_logit_error=exported.max_logit_error, wall_s=round(time.monotonic() - started_s, 1))


def pair_kind(recipe) -> str:
    """Dense or MoE on both sides, as `teacher -> student`, with what is special about the student."""
    from megatron_kd.convert.naming import num_experts
    from megatron_kd.plan.models import config_of

    def kind(model):
        config = config_of(model)
        return f"{config['model_type'].removesuffix('_text')} {'MoE' if num_experts(config) else 'dense'}"

    extra = " (LoRA)" if recipe.student.lora else " (pruned)" if recipe.student.init == "pruned" else ""
    tied = " (tied head)" if config_of(recipe.student.model).get("tie_word_embeddings") else ""
    return f"{kind(recipe.teacher.model)} -> {kind(recipe.student.model)}{extra}{tied}"


def train(rank, world, path, overrides):
    """One rank of a training run, in a pool's process."""
    from megatron_kd.cli.train import train as run

    recipe = load(path, overrides)
    with open(Path(recipe.output_dir).parent / "terminal.txt", "a") as terminal:
        run(recipe, rank=rank, world=world, terminal=terminal if rank == world - 1 else None)


def export(rank, world, path, target):
    """The newest checkpoint as a Hugging Face directory, under the student's layout."""
    from megatron_kd.cli.prepare import prepare_models
    from megatron_kd.convert.export import export_hf
    from megatron_kd.mcore.bridge_config import DTYPES, checkpoint_folder

    recipe = load(path)
    layout = recipe.student.layout.for_world(world)
    return export_hf(checkpoint_folder(recipe), target, reference=prepare_models(recipe).student, layout=layout, dtype=DTYPES[recipe.student.precision])


def build_cache(rank, world, path, iters):
    """One rank of the cache build, under the teacher's layout."""
    from megatron_kd.cli.main import main

    assert main(["cache", "build", str(path), f"train.iters={iters}"]) == 0


def serve(rank, world, path, overrides, stop):
    """One rank of the teacher's world; ends when the file `stop` is there."""
    from megatron_kd.cli.teach import teach

    recipe = load(path, overrides)
    log = Path(recipe.output_dir).parent / f"teacher_{rank}.txt"
    teach(recipe, name="teacher", world=world, stop=stop.exists, say=lambda text: log.open("a").write(text + "\n"))


def _train(shrunk: Shrunk, recipe, pool, teacher_pool, iters: int) -> None:
    overrides = [f"train.iters={iters}"]
    if recipe.teacher.placement != "streamed":
        pool.run(train, shrunk.student_ranks, timeout_s=150, path=shrunk.path, overrides=overrides)
        return
    folder = shrunk.path.parent
    token, stop = folder / "token", folder / f"stop_{iters}"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    overrides += [f"stream.rendezvous=127.0.0.1:{free_port()}", f"stream.token_file={token}"]
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        teacher = thread.submit(teacher_pool.run, serve, shrunk.teacher_ranks, timeout_s=180, path=shrunk.path, overrides=overrides, stop=stop)
        try:
            pool.run(train, shrunk.student_ranks, timeout_s=150, path=shrunk.path, overrides=overrides)
        finally:
            stop.touch()
        teacher.result(60)


def _check_history(rows: list[dict]) -> list[dict]:
    """Losses of steps 0, 1, 2. The last one can only be there if the second run continued."""
    steps = {row["step"]: row for row in rows if row.get("kind", "step") == "step"}
    assert sorted(steps) == [0, 1, 2], f"steps in the history: {sorted(steps)}"
    losses = [{key: round(value, 5) for key, value in steps[i].items() if "loss" in key} for i in range(3)]
    for i, values in enumerate(losses):
        assert values and all(math.isfinite(v) for v in values.values()), f"step {i}: {values}"
    return losses


def _check_export(folder: Path) -> None:
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("The exported student reads text.").input_ids])).logits
    assert torch.isfinite(logits).all()

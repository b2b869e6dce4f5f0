"""What `megatron-kd cache build|coverage|verify --against` need of a recipe: its data, its teacher, its collection.

Called by cli/cache.py. Imports Megatron; works in one process or under torchrun with the teacher's layout.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_kd.cache.spec import Collection
from megatron_kd.cache.storage import Storage
from megatron_kd.cli.prepare import Models, prepare_models, prepare_text_of
from megatron_kd.cli.train import start_runtime
from megatron_kd.config.schema import Recipe
from megatron_kd.rows import TokenBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A recipe opened for its cache."""

    recipe: Recipe
    """As loaded."""
    models: Models
    """Folders of both models."""
    cfg: Any
    """Bridge's ConfigContainer of the student; only its data part is used."""
    collection: Collection
    """What this recipe's training will look up."""
    storage: Storage
    """Where."""


def open_job(recipe: Recipe) -> Job:
    """Prepare models and text, join the process group, compute or remember the teacher's fingerprint. Errors: ConfigError and what preparing raises."""
    models = prepare_models(recipe)
    start_runtime(recipe)
    from megatron_kd.mcore import bridge_config
    from megatron_kd.student.vocabulary import resolve_vocab, text_config
    from megatron_kd.teacher.cache_of import collection_of, storage_of

    if not dist.is_initialized():
        if recipe.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo" if recipe.device == "cpu" else "nccl")
    text = prepare_text_of(recipe, models)
    sources = bridge_config.Sources(student=models.student, tokenizer=None if recipe.data.kind == "mock" else models.student_tokenizer, text=text)
    cfg = bridge_config.config_container(recipe, sources, recipe.student.layout.min_world)
    config = text_config(models.teacher)
    vocab = resolve_vocab(student_padded=max(cfg.model.vocab_size, config.vocab_size), student_vocab=cfg.model.vocab_size, teacher_vocab=config.vocab_size, tp=1,
                          student_tokenizer=sources.tokenizer, teacher_tokenizer=models.teacher_tokenizer if text is not None else recipe.teacher.tokenizer or models.teacher)
    collection = collection_of(recipe.cache, teacher_dir=models.teacher, true_vocab=vocab.true_size)
    return Job(recipe=recipe, models=models, cfg=cfg, collection=collection, storage=storage_of(recipe.cache, recipe.output_dir))


def blocks_of(job: Job, datasets: dict) -> Iterator[tuple[TokenBlock, int]]:
    """(TokenBlock, samples in it) of everything that the recipe trains and evaluates on, up to cache.max_sequences."""
    from megatron_kd.mcore.data_walk import walk
    from megatron_kd.student.lookahead import block_of

    batches = walk(datasets, batch_size=job.recipe.train.micro_batch, max_samples=job.recipe.cache.max_sequences)
    for index, (mode, batch, count) in enumerate(batches):
        yield block_of(batch, step=index, micro_batch=0, mode=mode), count


def build_teacher(job: Job):
    """Answers of the frozen teacher under its own layout in this world. Errors: UnsupportedLayout, ConfigError."""
    from megatron_kd.mcore import model as megatron_models
    from megatron_kd.teacher.dump import Answers

    recipe = job.recipe
    layout = (recipe.teacher.layout or recipe.student.layout).for_world(dist.get_world_size())
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.teacher.precision]
    provider = megatron_models.teacher_provider(job.models.teacher, layout=layout, dtype=dtype, seq_length=recipe.data.seq_length)
    (chunk,) = megatron_models.build_model(provider, seed=recipe.train.seed)
    return Answers(megatron_models.language_model(chunk), job.collection.spec)

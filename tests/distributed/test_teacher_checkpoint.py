"""A teacher given as a Megatron checkpoint is the teacher that its Hugging Face folder is: same fingerprint, same training."""

import pytest

from megatron_kd.errors import ConfigError
from tests.distributed import test_stream_megatron as streams

models = streams.models


def as_megatron(rank, world, source, target):
    """Written under TP=2."""
    import torch

    from megatron_kd.convert.export import import_hf
    from megatron_kd.layout import ParallelLayout

    import_hf(source, target, layout=ParallelLayout.for_world(world, tp=2, sequence_parallel=True), dtype=torch.float32)


def recipe_of(models, out, **teacher) -> dict:
    content = streams.recipe_of(models, out, placement="colocated", port=1, iters=2)
    content["train"] |= {"save": False, "eval_iters": 0, "eval_interval": None}
    content["teacher"] |= teacher
    return content


def test_a_megatron_checkpoint_teaches_as_its_hugging_face_folder_does(megatron_ranks, models, tmp_path, monkeypatch):
    from megatron_kd.cli.prepare import prepare_models
    from megatron_kd.config.load import build
    from megatron_kd.convert.tiny import tiny_config, write_tiny_model
    from megatron_kd.fingerprint import fingerprint_hf

    monkeypatch.setenv("MEGATRON_KD_CACHE", str(tmp_path / "cache"))
    source, megatron, reference = models / "teacher", tmp_path / "megatron", tmp_path / "reference"
    megatron_ranks.run(as_megatron, 2, timeout_s=80, source=str(source), target=str(megatron))
    write_tiny_model(tiny_config(streams.LLAMA, num_layers=4, scale=2), reference, seed=9)

    recipe = build(recipe_of(models, tmp_path / "out", model=str(reference), checkpoint=str(megatron)), [])
    teacher = prepare_models(recipe).teacher
    assert fingerprint_hf(teacher) == fingerprint_hf(source)
    monkeypatch.setattr("subprocess.run", None)
    assert prepare_models(recipe).teacher == teacher, "exported once"

    with pytest.raises(ConfigError, match="teacher.checkpoint.*convert export"):
        prepare_models(build(recipe_of(models, tmp_path / "out", model=str(megatron)), []))

    plain, exported = (recipe_of(models, tmp_path / name, model=str(source)) for name in ("plain", "exported"))
    exported["teacher"] |= {"model": str(reference), "checkpoint": str(megatron)}
    exported["output_dir"] = str(tmp_path / "exported")
    for content in (plain, exported):
        assert megatron_ranks.run(train_in, 2, timeout_s=80, content=content, cache=str(tmp_path / "cache")) == ["", ""]
    numbers = streams.numbers(tmp_path / "plain")
    assert len(numbers) == 2 and streams.numbers(tmp_path / "exported") == numbers


def train_in(rank, world, content, cache):
    """streams.train with the folder of exported models that this process was given."""
    import os

    os.environ["MEGATRON_KD_CACHE"] = cache
    try:
        return streams.train(rank, world, content)
    finally:
        del os.environ["MEGATRON_KD_CACHE"]


def test_attach_names_the_way_to_a_folder():
    from megatron_kd.config.schema import TeacherConfig
    from megatron_kd.student.attach import attach

    with pytest.raises(ConfigError, match="teacher.checkpoint.*convert export"):
        attach(None, teacher=TeacherConfig(model="teacher", checkpoint="checkpoints"))

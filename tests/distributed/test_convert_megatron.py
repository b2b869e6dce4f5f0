"""Hugging Face -> Megatron -> Hugging Face, each side under another layout: tensors equal, logits equal, padding gone."""

import json
import re
from unittest import mock

import pytest
import torch
import transformers

from megatron_kd.convert.tiny import tiny_config, write_tiny_model
from megatron_kd.errors import ConvertError
from megatron_kd.layout import ParallelLayout

CONFIGS = {"gpt_oss": transformers.GptOssConfig, "qwen_moe": transformers.Qwen3_5MoeTextConfig, "qwen": transformers.Qwen3_5TextConfig, "llama": transformers.LlamaConfig}


def roundtrip(rank, world, source, megatron, target, into, outof, **kwargs):
    """Import under one layout and export under another, in one job of the pool."""
    from megatron.core import parallel_state

    from megatron_kd.convert.export import export_hf, import_hf
    from megatron_kd.mcore import model

    with mock.patch.object(model, "experts_stacked", side_effect=AssertionError("weights go to files: stacked ones would stay in memory")):
        import_hf(source, megatron, layout=ParallelLayout.for_world(world, **into), dtype=torch.float32)
        parallel_state.destroy_model_parallel()
        return export_hf(megatron, target, reference=source, layout=ParallelLayout.for_world(world, **outof), dtype=torch.float32, **kwargs)


def tensors(path):
    from megatron_kd.convert.hf_index import Checkpoint

    checkpoint = Checkpoint.open(path)
    return {name: checkpoint.read(name) for name in checkpoint.specs}


MOE = dict(tp=2, ep=2, etp=1, sequence_parallel=True)


@pytest.mark.parametrize(("name", "options", "into", "outof"), [
    ("gpt_oss", {}, MOE, dict(pp=2)),
    ("qwen_moe", {}, dict(pp=2), MOE),
    ("qwen", {"tie_word_embeddings": True, "vocab_size": 321}, dict(tp=2, sequence_parallel=True), dict(pp=2)),
    ("llama", {"vocab_size": 321}, dict(pp=2), dict(tp=2)),
])
def test_a_model_comes_back_as_it_was(megatron_ranks, tmp_path, name, options, into, outof):
    config = tiny_config(CONFIGS[name](**{k: v for k, v in options.items() if k != "vocab_size"}).to_dict()) | options
    source = write_tiny_model(config, tmp_path / "hf")
    results = megatron_ranks.run(roundtrip, 2, timeout_s=120, source=source, megatron=tmp_path / "megatron", target=tmp_path / "back", into=into, outof=outof)
    before, after = tensors(source), tensors(tmp_path / "back")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key
    assert results[0].num_tensors == len(before) and results[0].max_logit_error < 1e-5
    transformers.AutoTokenizer.from_pretrained(tmp_path / "back")


def test_mxfp4_weights_are_read_and_exported_unpacked(megatron_ranks, tmp_path):
    source = write_tiny_model(tiny_config(transformers.GptOssConfig().to_dict()), tmp_path / "hf", packed_mxfp4=True)
    results = megatron_ranks.run(roundtrip, 1, timeout_s=120, source=source, megatron=tmp_path / "megatron", target=tmp_path / "back", into={}, outof={})
    from megatron_kd.convert.hf_index import Checkpoint
    from megatron_kd.convert.mxfp4 import read_plain

    after = tensors(tmp_path / "back")
    name = "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(after[name], read_plain(Checkpoint.open(source), name).float())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert results[0].max_logit_error < 1e-5


def wrong_reference(rank, world, source, other, megatron, target):
    """Export with a reference that the weights do not fit."""
    from megatron.core import parallel_state

    from megatron_kd.convert.export import export_hf, import_hf

    import_hf(source, megatron, layout=ParallelLayout(), dtype=torch.float32)
    parallel_state.destroy_model_parallel()
    try:
        export_hf(megatron, target, reference=other, layout=ParallelLayout(), dtype=torch.float32)
    except ConvertError as e:
        return str(e)


@pytest.mark.parametrize(("change", "message"), [({"rms_norm_eps": 0.5}, None), ({"num_hidden_layers": 6}, "does not fit"), ({"hidden_size": 32}, "does not fit")])
def test_weights_that_do_not_fit_the_reference_are_refused(megatron_ranks, tmp_path, change, message):
    config = tiny_config(transformers.LlamaConfig().to_dict())
    source, other = write_tiny_model(config, tmp_path / "hf"), write_tiny_model(config | change, tmp_path / "other")
    (text,) = megatron_ranks.run(wrong_reference, 1, timeout_s=120, source=source, other=other, megatron=tmp_path / "m", target=tmp_path / "back")
    if message is None:
        assert text is None, "another epsilon is a legal config: both sides use it"
    else:
        assert message in text and not (tmp_path / "back").exists()


def strict_export(rank, world, source, megatron, target):
    from megatron.core import parallel_state
    from megatron_kd.convert.export import export_hf, import_hf

    import_hf(source, megatron, layout=ParallelLayout(), dtype=torch.float32)
    parallel_state.destroy_model_parallel()
    try:
        export_hf(megatron, target, reference=source, layout=ParallelLayout(), dtype=torch.float32, max_logit_error=0.0)
    except ConvertError as e:
        return str(e)


def test_logits_further_off_than_allowed_are_refused_and_nothing_is_written(megatron_ranks, tmp_path):
    source = write_tiny_model(tiny_config(transformers.GptOssConfig().to_dict()), tmp_path / "hf")
    (text,) = megatron_ranks.run(strict_export, 1, timeout_s=120, source=source, megatron=tmp_path / "m", target=tmp_path / "back")
    assert "must agree within 0" in text and "--max-logit-error" in text and not (tmp_path / "back").exists()


def damaged_import(rank, world, source, target):
    from megatron_kd.convert.export import import_hf

    try:
        import_hf(source, target, layout=ParallelLayout.for_world(world, tp=2, sequence_parallel=True))
    except ConvertError as e:
        return str(e)


@pytest.mark.parametrize(("change", "message"), [({"num_hidden_layers": 6}, r"decoder\.layers\.4.*have no weight"), ({"hidden_size": 32}, "must be|[Ss]hape")])
def test_weights_that_do_not_fit_their_config_are_refused_and_nothing_is_written(megatron_ranks, tmp_path, change, message):
    """Bridge alone leaves layers without weights at random."""
    config = tiny_config(transformers.LlamaConfig().to_dict())
    source = write_tiny_model(config, tmp_path / "hf")
    (source / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | change))
    for text in megatron_ranks.run(damaged_import, 2, timeout_s=120, source=source, target=tmp_path / "megatron"):
        assert re.search(message, text or "")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_full_disk_is_named_and_an_import_leaves_nothing(megatron_ranks, tmp_path, small_disk):
    """Room that was there when the import began is gone when it writes."""
    source = write_tiny_model(tiny_config(transformers.LlamaConfig().to_dict(), scale=4), tmp_path / "hf")
    with small_disk(tmp_path / "disk", "2m") as disk:
        refused, (late,) = (megatron_ranks.run(import_to, 1, timeout_s=120, source=source, target=disk / "megatron", scratch=tmp_path / "scratch", looks=looks) for looks in (True, False))
        assert "disk space" in refused[0] and "the disk is full" in late
        assert list(disk.iterdir()) == [] and list((tmp_path / "scratch").iterdir()) == []


def import_to(rank, world, source, target, scratch, looks):
    """Without a look at the room where `looks` is false."""
    from megatron_kd.convert import export

    upstream = export.check_room
    export.check_room = upstream if looks else lambda *_: None
    try:
        export.import_hf(source, target, layout=ParallelLayout(), dtype=torch.float32, scratch=scratch)
    except ConvertError as e:
        return str(e)
    finally:
        export.check_room = upstream

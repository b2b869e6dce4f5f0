"""The teacher fingerprint: same teacher, same string; anything that changes an answer changes it."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from megatron_kd.errors import ConfigError
from megatron_kd.fingerprint import EXPANDED_ROWS, cached_fingerprint, expand_mxfp4, fingerprint_hf, hf_tensors, read_config, teacher_fingerprint

CONFIG = {"model_type": "toy", "hidden_size": 4, "transformers_version": "5.0", "tie_word_embeddings": False}


def weights():
    generator = torch.Generator().manual_seed(7)
    return {"model.embed_tokens.weight": torch.randn(11, 4, generator=generator), "model.norm.weight": torch.ones(4),
            "lm_head.weight": torch.randn(11, 4, generator=generator)}


@pytest.fixture
def teacher(tmp_path):
    def make(tensors=None, config=None, tokenizer=None, name="teacher", shards=1):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        (directory / "tokenizer.json").write_text(json.dumps(tokenizer or {"model": {"vocab": {"a": 0, "b": 1}}, "padding": None}))
        items = sorted((tensors or weights()).items())
        for i in range(shards):
            save_file(dict(items[i::shards]), directory / f"part{i}.safetensors")
        return directory
    return make


def test_shards_order_and_higher_precision_do_not_matter(teacher):
    rounded = {k: v.bfloat16() for k, v in weights().items()}
    plain = teacher(rounded, name="a")
    want = fingerprint_hf(plain)
    assert fingerprint_hf(teacher(rounded, name="b", shards=3)) == want
    upcast = reversed([(k, v.float()) for k, v in rounded.items()])
    assert teacher_fingerprint(upcast, config=read_config(plain), tokenizer_dir=plain) == want
    assert len(want) == 32 and int(want, 16)


def test_library_version_and_padding_rule_do_not_matter(teacher):
    saved_again = teacher(config={"transformers_version": "6.1", "dtype": "bfloat16"}, tokenizer={"padding": {"length": 8}, "model": {"vocab": {"b": 1, "a": 0}}}, name="b")
    assert fingerprint_hf(saved_again) == fingerprint_hf(teacher(name="a"))


@pytest.mark.parametrize("change", ["tensor", "head", "config", "tokenizer", "missing", "renamed"])
def test_any_real_change_changes_it(teacher, change):
    tensors, config, tokenizer = weights(), None, None
    if change == "tensor":
        tensors["model.norm.weight"][2] = 1.01
    elif change == "head":
        tensors["lm_head.weight"][10, 3] += 0.5
    elif change == "config":
        config = {"rope_theta": 5e5}
    elif change == "tokenizer":
        tokenizer = {"model": {"vocab": {"a": 1, "b": 0}}, "padding": None}
    elif change == "missing":
        del tensors["lm_head.weight"]
    elif change == "renamed":
        tensors["model.final.weight"] = tensors.pop("model.norm.weight")
    assert fingerprint_hf(teacher(tensors, config, tokenizer, name="b")) != fingerprint_hf(teacher(name="a"))


def test_text_part_of_a_vision_model_and_tied_head(teacher):
    tied = {"tie_word_embeddings": True}
    base = {k: v for k, v in weights().items() if k != "lm_head.weight"}
    want = fingerprint_hf(teacher(base, tied, name="a"))
    vision = {k.replace("model.", "model.language_model."): v for k, v in base.items()}
    vision |= {"model.visual.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2), "lm_head.weight": base["model.embed_tokens.weight"].clone()}
    assert fingerprint_hf(teacher(vision, tied, name="b")) == want


@pytest.mark.parametrize("out, groups", [(6, 1), (EXPANDED_ROWS + 72, 2)])
def test_mxfp4_pair_equals_its_bfloat16_form(teacher, out, groups):
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (2, out, groups, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(120, 134, (2, out, groups), generator=generator, dtype=torch.uint8)
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    want = mxfp4.convert_moe_packed_tensors(blocks.clone(), scales.clone())
    assert torch.equal(expand_mxfp4(blocks, scales), want)
    packed = teacher({"model.e.down_proj_blocks": blocks, "model.e.down_proj_scales": scales}, name="a")
    assert [name for name, _ in hf_tensors(packed)] == ["model.e.down_proj"]
    assert fingerprint_hf(packed) == fingerprint_hf(teacher({"model.e.down_proj": want.contiguous()}, name="b"))


def test_a_remembered_fingerprint_is_forgotten_when_a_file_changes(teacher, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_KD_CACHE", str(tmp_path / "cache"))
    directory = teacher()
    assert cached_fingerprint(directory, compute=False) is None
    want = cached_fingerprint(directory)
    assert want == fingerprint_hf(directory) == cached_fingerprint(directory, compute=False)
    changed = weights()
    changed["model.norm.weight"][0] = 2
    save_file(changed, directory / "part0.safetensors")
    os.utime(directory / "part0.safetensors", ns=(1, 1))
    assert cached_fingerprint(directory, compute=False) is None and cached_fingerprint(directory) != want


def test_contradictory_or_empty_sources_are_refused(teacher):
    directory = teacher()
    pairs = [("model.norm.weight", torch.ones(4)), ("model.norm.weight", torch.zeros(4))]
    with pytest.raises(ConfigError, match="model.norm.weight"):
        teacher_fingerprint(pairs, config=CONFIG, tokenizer_dir=directory)
    with pytest.raises(ConfigError, match="at least one tensor"):
        teacher_fingerprint([], config=CONFIG, tokenizer_dir=directory)
    (directory / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer"):
        fingerprint_hf(directory)

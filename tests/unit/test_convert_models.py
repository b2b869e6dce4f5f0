"""Heads, pruning and MXFP4 against transformers: what the tools write is what the model computes."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_kd.config.schema import PruneConfig
from megatron_kd.convert import mxfp4
from megatron_kd.convert.head import extract_head, find_head
from megatron_kd.convert.hf_index import Checkpoint
from megatron_kd.convert.prune import even_layers, prune
from megatron_kd.convert.tiny import tiny_config, write_tiny_model
from megatron_kd.convert.writer import CheckpointWriter
from megatron_kd.errors import ConvertError

CONFIGS = {"gpt_oss": transformers.GptOssConfig, "qwen_moe": transformers.Qwen3_5MoeTextConfig, "qwen": transformers.Qwen3_5TextConfig, "llama": transformers.LlamaConfig}
IDS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """name -> directory of a tiny random model; `gpt_oss_mxfp4` has its experts packed, `qwen_tied` shares its head."""
    root = tmp_path_factory.mktemp("models")
    paths = {name: write_tiny_model(tiny_config(cls().to_dict(), num_layers=8), root / name) for name, cls in CONFIGS.items()}
    paths["gpt_oss_mxfp4"] = write_tiny_model(tiny_config(CONFIGS["gpt_oss"]().to_dict(), num_layers=8), root / "gpt_oss_mxfp4", packed_mxfp4=True)
    paths["qwen_tied"] = write_tiny_model(tiny_config(CONFIGS["qwen"](tie_word_embeddings=True).to_dict()), root / "qwen_tied")
    return paths


def load(path, **kwargs):
    return transformers.AutoModelForCausalLM.from_pretrained(path, **({"dtype": torch.float32} | kwargs)).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_mxfp4", "qwen_tied", "qwen_moe"])
def test_the_extracted_head_projects_as_the_model_does_and_only_it_is_read(models, tmp_path, name):
    head = extract_head(models[name], tmp_path / "head")
    weight = load_file(tmp_path / "head" / "head.safetensors")["weight"]
    model = load(models[name], **({"quantization_config": transformers.Mxfp4Config(dequantize=True), "dtype": torch.bfloat16} if "mxfp4" in name else {}))
    assert head.tied == (name == "qwen_tied")
    assert torch.equal(weight.to(model.dtype), model.get_output_embeddings().weight)
    assert json.loads((tmp_path / "head" / "head.json").read_text())["vocab_rows"] == 320


def test_extracting_a_head_reads_no_other_tensor(models, tmp_path, monkeypatch):
    read = []
    original = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, rows=None: read.append(name) or original(self, name, rows))
    extract_head(models["gpt_oss"], tmp_path / "head")
    assert read == ["lm_head.weight"]


def test_a_config_that_promises_another_head_than_the_weights_have_is_refused(models, tmp_path):
    checkpoint = Checkpoint.open(models["qwen_tied"])
    checkpoint.config = checkpoint.config | {"tie_word_embeddings": False}
    with pytest.raises(ConvertError, match="output head"):
        find_head(checkpoint)


def test_soft_cap_and_scale_are_never_lost(models, tmp_path):
    checkpoint = Checkpoint.open(models["llama"])
    checkpoint.config |= {"final_logit_softcapping": 30.0, "logits_scaling": 8.0}
    head = find_head(checkpoint)
    assert (head.soft_cap, head.logit_scale) == (30.0, 0.125)


@pytest.mark.parametrize("name", ["gpt_oss", "qwen_moe", "qwen", "llama"])
def test_a_depth_pruned_model_computes_what_the_teacher_without_those_layers_does(models, tmp_path, name):
    keep = [0, 1, 4, 5] if name == "gpt_oss" else [0, 3, 4, 7]
    pruned = load(prune(models[name], tmp_path / "out", PruneConfig(keep_layers=keep)))
    teacher = load(models[name])
    teacher.model.layers = torch.nn.ModuleList(teacher.model.layers[i] for i in keep)
    for i, layer in enumerate(teacher.model.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = i
    teacher.config.num_hidden_layers = teacher.model.config.num_hidden_layers = len(keep)
    teacher.config.layer_types = [teacher.config.layer_types[i] for i in keep] if getattr(teacher.config, "layer_types", None) else None
    assert torch.equal(logits(pruned), logits(teacher))
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")


def test_an_expert_pruned_model_computes_what_the_teacher_does_when_its_router_avoids_the_others(models, tmp_path):
    kept = {str(layer): [layer % 4, (layer + 1) % 4, (layer + 3) % 4] for layer in range(8)}
    (tmp_path / "experts.json").write_text(json.dumps(kept))
    pruned = load(prune(models["gpt_oss"], tmp_path / "out", PruneConfig(keep_experts=str(tmp_path / "experts.json"), num_experts=3)))
    teacher = load(models["gpt_oss"])
    with torch.no_grad():
        for layer, block in enumerate(teacher.model.layers):
            removed = [e for e in range(4) if e not in kept[str(layer)]]
            block.mlp.router.bias[removed] = -1e9
    assert pruned.config.num_local_experts == 3
    torch.testing.assert_close(logits(pruned), logits(teacher), rtol=0, atol=1e-6)


def test_the_heaviest_experts_by_router_statistics_stay(models, tmp_path):
    statistics = {str(layer): {"mass": [1.0, 9.0, 3.0, 9.0]} for layer in range(8)}
    (tmp_path / "stats.json").write_text(json.dumps(statistics))
    prune(models["qwen_moe"], tmp_path / "out", PruneConfig(num_layers=4, num_experts=2, router_statistics=str(tmp_path / "stats.json")))
    teacher, student = Checkpoint.open(models["qwen_moe"]), Checkpoint.open(tmp_path / "out")
    assert student.config["num_experts"] == 2
    gate = "model.layers.{}.mlp.gate.weight"
    assert torch.equal(student.read(gate.format(3)), teacher.read(gate.format(7))[[1, 3]])
    packed = "model.layers.{}.mlp.experts.gate_up_proj"
    assert torch.equal(student.read(packed.format(0)), teacher.read(packed.format(0))[[1, 3]])
    load(tmp_path / "out")


def test_unpacked_experts_are_renumbered(models, tmp_path):
    packed = load(models["qwen_moe"])
    fresh = type(packed)(packed.config)
    fresh.load_state_dict(packed.state_dict())
    fresh.save_pretrained(tmp_path / "unpacked")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in Checkpoint.open(tmp_path / "unpacked").specs, "transformers stores experts one by one"
    (tmp_path / "experts.json").write_text(json.dumps({str(layer): [1, 3] for layer in range(8)}))
    spec = PruneConfig(keep_experts=str(tmp_path / "experts.json"))
    from_packed, from_unpacked = load(prune(models["qwen_moe"], tmp_path / "a", spec)), load(prune(tmp_path / "unpacked", tmp_path / "b", spec))
    assert torch.equal(logits(from_packed), logits(from_unpacked))


def test_mxfp4_checkpoints_are_pruned_without_unpacking_them(models, tmp_path):
    (tmp_path / "experts.json").write_text(json.dumps({str(layer): [0, 2] for layer in range(8)}))
    prune(models["gpt_oss_mxfp4"], tmp_path / "out", PruneConfig(num_layers=4, keep_experts=str(tmp_path / "experts.json")))
    teacher, student = Checkpoint.open(models["gpt_oss_mxfp4"]), Checkpoint.open(tmp_path / "out")
    name = "model.layers.{}.mlp.experts.down_proj"
    assert student.spec(name.format(3) + "_blocks").dtype == torch.uint8
    assert torch.equal(mxfp4.read_plain(student, name.format(3)), mxfp4.read_plain(teacher, name.format(7))[[0, 2]])
    load(tmp_path / "out", quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16)


def test_mxfp4_unpacks_as_transformers_does_and_rounds_to_the_nearest_value(models):
    checkpoint = Checkpoint.open(models["gpt_oss_mxfp4"])
    model = load(models["gpt_oss_mxfp4"], quantization_config=transformers.Mxfp4Config(dequantize=True), dtype=torch.bfloat16)
    for name in ("gate_up_proj", "down_proj"):
        full = f"model.layers.2.mlp.experts.{name}"
        assert torch.equal(mxfp4.read_plain(checkpoint, full), model.state_dict()[full])
        assert torch.equal(mxfp4.read_plain(checkpoint, full, (1, 3)), model.state_dict()[full][1:3])
    values = torch.cat([torch.randn(16, 32), torch.zeros(1, 32), torch.full((1, 32), -1e-30), torch.linspace(-6, 6, 32)[None]])
    blocks, scales = mxfp4.pack(values)
    step = torch.ldexp(torch.ones(len(values), 1), scales.int() - 127)
    table = torch.tensor(mxfp4.E2M1 + tuple(-v for v in mxfp4.E2M1))
    nearest = (values[..., None] - table * step[..., None]).abs().amin(-1)
    assert torch.equal((mxfp4.unpack(blocks, scales, torch.float32) - values).abs(), nearest)


def test_a_multimodal_wrapper_becomes_its_text_model_and_keeps_mtp_until_it_is_pruned(models, tmp_path):
    text = Checkpoint.open(models["qwen_moe"])
    wrapper = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe", "tie_word_embeddings": False,
               "text_config": text.config | {"mtp_num_hidden_layers": 1}, "vision_config": {"depth": 1}}
    with CheckpointWriter(tmp_path / "vl") as writer:
        for name in text.specs:
            writer.add(name.replace("model.", "model.language_model.", 1), text.read(name))
        writer.add("model.visual.blocks.0.norm1.weight", torch.ones(3))
        writer.add("mtp.layers.0.input_layernorm.weight", torch.ones(3))
        writer.add_json("config.json", wrapper)
    prune(tmp_path / "vl", tmp_path / "out", PruneConfig())
    assert torch.equal(logits(load(tmp_path / "out")), logits(load(models["qwen_moe"])))
    text_only = Checkpoint.open(tmp_path / "out")
    assert text_only.config["mtp_num_hidden_layers"] == 1 and "mtp.layers.0.input_layernorm.weight" in text_only.specs
    assert "vision_config" not in text_only.config and not any("visual" in name for name in text_only.specs)
    pruned = Checkpoint.open(prune(tmp_path / "vl", tmp_path / "fewer", PruneConfig(num_layers=4)))
    assert pruned.config["mtp_num_hidden_layers"] == 0 and not any("mtp" in name for name in pruned.specs)


@pytest.mark.parametrize(("spec", "message"), [
    ({"keep_layers": [0, 2, 3]}, "layer 2 .* would become layer 1"), ({"keep_layers": [0, 9]}, "layers 0 to 7"), ({"num_layers": 9}, "between 1 and"),
    ({"num_experts": 2}, "router_statistics"), ({"num_experts": 1, "router_statistics": "STATS"}, "num_experts_per_tok = 2"),
    ({"num_experts": 9, "router_statistics": "STATS"}, "has 4 experts"), ({"keep_experts": "SHORT"}, "no experts for layers"),
    ({"keep_experts": "TWICE"}, "distinct"), ({"keep_experts": "MISSING"}, "is missing"),
])
def test_what_cannot_be_pruned_is_refused_and_nothing_is_written(models, tmp_path, spec, message):
    files = {"STATS": {str(i): {"mass": [1, 2, 3, 4]} for i in range(8)}, "SHORT": {"0": [0, 1]}, "TWICE": {str(i): [1, 1] for i in range(8)}}
    for name, value in files.items():
        (tmp_path / name).write_text(json.dumps(value))
    spec = {key: str(tmp_path / value) if isinstance(value, str) else value for key, value in spec.items()}
    with pytest.raises(ConvertError, match=message):
        prune(models["gpt_oss"], tmp_path / "out", PruneConfig(**spec))
    assert not (tmp_path / "out").exists()


def test_experts_of_a_dense_model_are_refused(models, tmp_path):
    with pytest.raises(ConvertError, match="llama has no experts"):
        prune(models["llama"], tmp_path / "out", PruneConfig(num_experts=2))


def test_even_layers_keep_the_ends_and_whole_groups():
    assert even_layers(30, 11) == (0, 3, 6, 9, 12, 14, 17, 20, 23, 26, 29)
    assert even_layers(24, 12, period=2) == (0, 1, 4, 5, 8, 9, 14, 15, 18, 19, 22, 23)
    assert even_layers(40, 8, period=4) == (0, 1, 2, 3, 36, 37, 38, 39)
    assert even_layers(5, 1) == (0,)

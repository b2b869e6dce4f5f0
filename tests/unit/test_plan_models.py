"""Shapes and weight counts: every known model equals transformers' own count; unknown or incomplete configs are refused with the rule."""

import json

import pytest

from megatron_kd.errors import PlanError
from megatron_kd.plan.models import KNOWN_DIR, from_config, known_names, load_model
from megatron_kd.plan.params import total_params

LLAMA = dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=64, intermediate_size=160, num_hidden_layers=4,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=320,
             tie_word_embeddings=True, max_position_embeddings=512)
GPT_OSS = dict(model_type="gpt_oss", architectures=["GptOssForCausalLM"], hidden_size=64, intermediate_size=48, num_hidden_layers=4,
               num_local_experts=4, num_experts_per_tok=2, num_attention_heads=4,
               num_key_value_heads=2, head_dim=16, attention_bias=True, sliding_window=8, vocab_size=320, tie_word_embeddings=False,
               max_position_embeddings=4096,
               layer_types=["sliding_attention", "full_attention"] * 2)
QWEN35 = dict(model_type="qwen3_5_text", architectures=["Qwen3_5ForCausalLM"], hidden_size=64, intermediate_size=160, num_hidden_layers=4,
              num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=320,
              linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16, linear_conv_kernel_dim=4,
              tie_word_embeddings=False,
              max_position_embeddings=512)
QWEN35_MOE = {**{k: v for k, v in QWEN35.items() if k != "intermediate_size"}, "model_type": "qwen3_5_moe_text",
              "architectures": ["Qwen3_5MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2,
              "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48}


def hugging_face_count(config: dict) -> int:
    """Parameters of the transformers model, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.tie_weights()
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", known_names())
def test_known_model_has_as_many_weights_as_transformers_counts(name):
    assert total_params(load_model(name)) == hugging_face_count(json.loads((KNOWN_DIR / f"{name}.json").read_text()))


@pytest.mark.parametrize("config", [LLAMA, GPT_OSS, QWEN35, QWEN35_MOE], ids=lambda c: c["model_type"])
def test_config_of_any_size_is_counted_like_transformers_counts(config):
    assert total_params(from_config(config, "tiny")) == hugging_face_count(config)


def test_known_configs_agree_with_transformers_defaults_where_those_are_the_published_model():
    from transformers import GptOssConfig
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    for name, default in (("qwen3.5-9b", Qwen3_5TextConfig()), ("qwen3.5-35b-a3b", Qwen3_5MoeTextConfig()), ("gpt-oss-120b", GptOssConfig())):
        known, default = json.loads((KNOWN_DIR / f"{name}.json").read_text()), default.to_dict()
        same = [key for key in known if key in default and not key.startswith(("rope", "max_position", "architectures", "dtype"))]
        assert len(same) >= 10
        assert {key: known[key] for key in same} == {key: default[key] for key in same}


def test_model_is_found_by_name_hub_name_folder_and_file(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", "text_config": QWEN35}))
    assert load_model(str(tmp_path)).name == tmp_path.name
    assert load_model(str(tmp_path / "config.json")).hidden == 64
    assert load_model("Qwen/Qwen3.5-9B").hidden == 4096
    assert load_model("meta-llama/Llama-3.1-8B-Instruct").num_layers == 32


def test_tying_of_a_vision_language_config_is_read_from_its_top():
    model = from_config({"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": QWEN35}, "vl")
    assert model.tied


def test_unknown_model_is_refused_with_what_is_known():
    with pytest.raises(PlanError, match="gpt-oss-20b.*llama-3.1-8b"):
        load_model("nobody/nothing-7b")


def test_unknown_family_and_missing_field_are_refused_by_name(tmp_path):
    with pytest.raises(PlanError, match="model_type = 'bert'"):
        from_config({"model_type": "bert"}, "x")
    with pytest.raises(PlanError, match="vocab_size"):
        from_config({key: value for key, value in LLAMA.items() if key != "vocab_size"}, "x")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(PlanError, match="not JSON"):
        load_model(str(tmp_path))

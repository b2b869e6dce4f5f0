"""What Hugging Face calls things: decoder layers, routed experts, routers, output head; text part of multimodal checkpoints.

Owns every pattern over tensor names and every config key that the tools change. Called by head, prune and shrink; reads no
weights. Left out: encoder-decoder models, and models whose layers are not numbered under `...layers.N.`.
"""

import re
from dataclasses import dataclass

from megatron_kd.errors import ConvertError, rule

LAYER = re.compile(r"^(?P<prefix>(?:model\.|language_model\.|model\.language_model\.|language_model\.model\.|transformer\.)layers\.)(?P<layer>\d+)\.(?P<rest>.+)$")
EXPERT = re.compile(r"^(?P<prefix>(?:mlp|block_sparse_moe|feed_forward)\.experts\.)(?P<expert>\d+)(?P<rest>\..+)$")
PACKED_EXPERTS = re.compile(r"^(?:mlp|block_sparse_moe|feed_forward)\.experts\.(?:gate_up_proj|down_proj|gate_proj|up_proj)(?:_bias|_blocks|_scales)?$")
ROUTER = re.compile(r"^(?:mlp|block_sparse_moe|feed_forward)\.(?:router|gate)\.(?:weight|bias|e_score_correction_bias)$")
NOT_TEXT = re.compile(r"^(?:model\.)?(?:visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\.|\.rotary_emb\.inv_freq$")
MTP = re.compile(r"^(?:model\.)?mtp\.")

TEXT_ARCHITECTURES = {"Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM", "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM"}
"""Multimodal wrappers whose language model is a causal model of its own, with that model's architecture."""
NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
FIXED_PATTERN = {"gpt_oss": ("sliding_attention", "full_attention")}
"""Families whose attention pattern Megatron-Bridge fixes by layer number, whatever `layer_types` says."""


@dataclass(frozen=True, slots=True)
class LayerName:
    """A tensor of a decoder layer: `prefix` ends in `layers.`, `rest` is the name within the layer."""

    prefix: str
    layer: int
    rest: str


def layer_of(name: str) -> LayerName | None:
    """The decoder layer that a tensor belongs to; None for embeddings, norms, heads, MTP and vision."""
    found = LAYER.match(name)
    return LayerName(found["prefix"], int(found["layer"]), found["rest"]) if found else None


def num_experts(text_config: dict) -> int | None:
    """Routed experts of a MoE config, None for a dense one."""
    return next((text_config[key] for key in NUM_EXPERTS_KEYS if text_config.get(key)), None)


def is_text_wrapper(config: dict) -> bool:
    """Whether a config is a multimodal wrapper around a causal language model."""
    return "text_config" in config


def text_name(name: str) -> str | None:
    """The name that a wrapper's tensor has in the text-only model; None for what that lacks."""
    if NOT_TEXT.match(name) or NOT_TEXT.search(name):
        return None
    return name.replace("model.language_model.", "model.", 1).replace("language_model.model.", "model.", 1).replace("language_model.lm_head.", "lm_head.", 1)


def text_only_config(config: dict) -> dict:
    """The config of a wrapper's language model. Errors: ConvertError for a wrapper that has no text-only class."""
    if not is_text_wrapper(config):
        return config
    wrapper = (config.get("architectures") or ["?"])[0]
    if wrapper not in TEXT_ARCHITECTURES:
        raise ConvertError(rule("architectures", wrapper, f"has no known text-only class; known are {sorted(TEXT_ARCHITECTURES)}",
                                "Save the language model by itself with transformers first"))
    inherited = {key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version", "quantization_config") if key in config}
    return {**config["text_config"], **inherited, "architectures": [TEXT_ARCHITECTURES[wrapper]]}


def without_mtp(text_config: dict) -> dict:
    """The config of the same model without multi-token prediction layers."""
    return {key: 0 if key in ("mtp_num_hidden_layers", "num_nextn_predict_layers") else value for key, value in text_config.items()}

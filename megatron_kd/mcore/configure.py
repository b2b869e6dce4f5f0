"""What attach demands of a Megatron-Bridge ConfigContainer: settings it makes, and layouts it refuses by name.

Owns the list of what upstream does wrong or what would break the loss's contract. Called by attach, at attach time and again when
the model is built (Bridge settles some fields only then). Does not build anything.
"""

import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path

from megatron_kd.errors import ConfigError, UnsupportedLayout, rule
from megatron_kd.mcore.model import has_fused_weight_gradient
from megatron_kd.mcore.optimizer_state import count_for_checkpoints


def configure(cfg, *, per_token_loss: bool | None = True) -> None:
    """Make the settings that distillation needs on `cfg`, in place.

    `per_token_loss`: True divides by one token count of the whole global batch (KD and CE share it), None leaves the setting as it is.
    """
    model = cfg.model  # a provider, or a ModelConfig that passes attributes on to its TransformerConfig
    if per_token_loss is not None:
        model.calculate_per_token_loss = per_token_loss
    if getattr(model, "calculate_per_token_loss", False):
        cfg.ddp.average_in_collective = False
    if getattr(model, "gradient_accumulation_fusion", False) and not has_fused_weight_gradient():
        model.gradient_accumulation_fusion = False  # Bridge asks for Transformer Engine alone, and the output layer would refuse to be built
    register_hook(cfg, "post_wrap_hook", functools.partial(_count_for_checkpoints, cfg))
    tolerate_missing_makefile()


def tolerate_missing_makefile() -> None:
    """megatron-core's wheel holds the compiled data helpers but no Makefile, and Bridge's start-up ends the process over that."""
    spec = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if spec is None or (Path(spec.origin).parent / "Makefile").exists():
        return
    import megatron.bridge.training.initialize as initialize

    initialize.compile_helpers = lambda: None


def register_pre_wrap_hook(cfg, hook: Callable) -> None:
    """Have `hook(chunks) -> chunks` called on the unwrapped model, before DDP."""
    register_hook(cfg, "pre_wrap_hook", hook)


def register_hook(cfg, kind: str, hook: Callable) -> None:
    """A pre_wrap_hook or post_wrap_hook, for providers and for ModelConfig."""
    if hasattr(cfg.model, f"register_{kind}"):
        getattr(cfg.model, f"register_{kind}")(hook)
    else:
        getattr(cfg.model, f"{kind}s").append(hook)


def _count_for_checkpoints(cfg, chunks: list) -> list:
    return count_for_checkpoints(chunks, by_parameter=cfg.checkpoint.dist_ckpt_optim_fully_reshardable)


def precision_of(cfg) -> str:
    """`fp16`, `bf16` or `fp32`: the model's, or what cfg.mixed_precision (a recipe's name, or the settings that Bridge makes of it) will make it."""
    for owner in (cfg.model, cfg.mixed_precision):
        for name in ("fp16", "bf16"):
            if getattr(owner, name, False) or (isinstance(owner, str) and name in owner):
                return name
    return "fp32"


def check_config(cfg) -> None:
    """ConfigError or UnsupportedLayout, by name, for what Megatron or this package cannot do right."""
    model = cfg.model
    _check_layout(cfg, model)
    _check_numerics(cfg, model)
    _check_loop(cfg, model)


def _refuse(name: str, got: object, why: str, way_out: str) -> None:
    raise UnsupportedLayout(rule(name, got, why, way_out))


def _check_layout(cfg, model) -> None:
    tp, pp = model.tensor_model_parallel_size, model.pipeline_model_parallel_size
    vpp = getattr(model, "virtual_pipeline_model_parallel_size", None) or 1
    sequence_parallel = bool(model.sequence_parallel) and tp > 1
    experts = getattr(model, "num_moe_experts", None)
    expert_tp = getattr(model, "expert_tensor_parallel_size", None) or tp
    vocab_size = getattr(model, "vocab_size", None)
    if vocab_size and vocab_size % tp:
        _refuse("vocab_size", vocab_size, f"must divide by tp = {tp}: Bridge pads only a vocabulary whose size it takes from the tokenizer",
                f"Choose another tp, or enlarge the student's embedding and head to {-(-vocab_size // tp) * tp}")
    if pp == 2 and vpp > 1 and not cfg.comm_overlap and not (model.overlap_p2p_comm and not model.batch_p2p_comm):
        _refuse("virtual_pipeline_model_parallel_size", vpp, "with two pipeline stages Megatron's batched p2p mixes up activations and gradients, silently",
                "Set model.overlap_p2p_comm=True and model.batch_p2p_comm=False")
    if getattr(model, "experimental_attention_variant", None) == "gated_delta_net" and tp > 1 and not sequence_parallel:
        _refuse("sequence_parallel", False, f"Gated DeltaNet (Qwen3.5) at tp = {tp} without it gets a wrong out_norm gradient upstream", "Set model.sequence_parallel=True")
    if experts and tp > 1 and not sequence_parallel:
        _refuse("sequence_parallel", False, f"Megatron trains experts at tp = {tp} only with it", "Set model.sequence_parallel=True")
    if experts and expert_tp > 1 and getattr(model, "add_bias_linear", False):
        _refuse("expert_tensor_parallel_size", expert_tp, "experts with a bias (GPT-OSS) cannot be split over tensor ranks", "Set model.expert_tensor_parallel_size=1")
    if getattr(model, "mtp_num_layers", None) and getattr(model, "overlap_moe_expert_parallel_comm", False):
        _refuse("mtp_num_layers", model.mtp_num_layers, "the combined 1F1B schedule forms the MTP logits outside of the model's forward",
                "Set model.mtp_num_layers=None or model.overlap_moe_expert_parallel_comm=False")
    if getattr(model, "hybrid_context_parallel", False):
        _refuse("hybrid_context_parallel", True, "row ids are not defined for it", "Turn it off")
    if (eval_cp := getattr(cfg.dist, "eval_context_parallel_size", None)) not in (None, getattr(model, "context_parallel_size", 1) or 1):
        _refuse("dist.eval_context_parallel_size", eval_cp, "rows are dealt to the training's context-parallel ranks", "Leave it out")
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if getattr(cfg.dist, name, False) or getattr(cfg.ddp, name, False):
            _refuse(name, True, "the weight gradient of a sharded head has not been proven with the fused loss", "Use DDP with the distributed optimizer")


def _check_numerics(cfg, model) -> None:
    if precision_of(cfg) == "fp16":
        _refuse("fp16", True, "gradients are formed in forward, before the loss scale is known, and would underflow", "Use bf16")
    from megatron.bridge.utils.cuda_graph import is_full_iteration_cuda_graph

    if is_full_iteration_cuda_graph(model):
        _refuse("cuda_graph_impl", "full_iteration", "a captured iteration cannot wait for a teacher", "Use per-layer graphs, or none")


def _check_loop(cfg, model) -> None:
    machine = getattr(cfg, "rerun_state_machine", None)
    if machine is not None and machine.rerun_mode != "disabled":
        _refuse("rerun_state_machine.rerun_mode", machine.rerun_mode, "replayed micro-batches would ask the teacher again for rows that are gone", "Set it to 'disabled'")
    if type(cfg.model).__name__ == "DistillationProvider" or any(base.__name__ == "DistillationProvider" for base in type(cfg.model).__mro__):
        raise ConfigError(rule("cfg.model", type(cfg.model).__name__, "holds ModelOpt's own distillation", "Give attach the plain student provider"))
    if getattr(cfg, "inprocess_restart", None) and cfg.inprocess_restart.enabled:
        _refuse("inprocess_restart", True, "the teacher's connections do not survive it", "Turn it off")

"""Patches inside megatron-core and Megatron-Bridge for the CPU runtime; applied by `cpu.install()` only.

Owns replacements for code that assumes CUDA tensors, Transformer Engine, FLA or a C++ tool chain. Module and parameter names stay those of the
Transformer Engine specs (linear_qkv.layer_norm_weight, ...), so Bridge's checkpoint mappings apply unchanged.
"""

import functools

import torch


class TorchNorm(torch.nn.Module):
    """RMSNorm or LayerNorm [..., H] -> [..., H], computed in fp32, with sequence parallelism and zero-centred gamma.

    megatron-core's own torch norm asserts on both; its other norms need CUDA.
    """

    def __init__(self, config, hidden_size: int, eps: float = 1e-5):
        super().__init__()
        self.rms = config.normalization == "RMSNorm"
        self.zero_centered = config.layernorm_zero_centered_gamma
        self.eps = eps
        init = torch.zeros if self.zero_centered else torch.ones
        self.weight = torch.nn.Parameter(init(hidden_size, dtype=config.params_dtype))
        self.bias = None if self.rms else torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # finalize_model_grads all-reduces these over TP

    def forward(self, x):
        weight = self.weight.float() + 1.0 if self.zero_centered else self.weight.float()
        h = x.float()
        if self.rms:
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * weight
        else:
            h = torch.nn.functional.layer_norm(h, h.shape[-1:], weight, self.bias.float(), self.eps)
        return h.to(x.dtype)


def patch_core() -> None:
    """megatron.core: RNG accessors, MoE split sizes, biased experts, norms."""
    import megatron.core.tensor_parallel.layers as layers
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    import megatron.core.transformer.torch_norm as torch_norm

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)

    def to_cpu(tensor, as_numpy=False, record_stream=False):  # upstream keeps a torch tensor unless tensor.is_cuda; gloo wants ints
        return tensor.numpy() if torch.is_tensor(tensor) and as_numpy else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu

    def skip_one_rank(reduce):  # mlp.py adds the expert bias in place to the output of an identity autograd function otherwise
        def wrapped(x, *args, group=None, **kwargs):
            return x if group is not None and group.size() == 1 else reduce(x, *args, group=group, **kwargs)

        return wrapped

    layers.reduce_from_tensor_model_parallel_region = skip_one_rank(layers.reduce_from_tensor_model_parallel_region)
    layers.reduce_scatter_to_sequence_parallel_region = skip_one_rank(layers.reduce_scatter_to_sequence_parallel_region)
    row_init = layers.RowParallelLinear.__init__

    @functools.wraps(row_init)
    def init(self, *args, is_expert=False, **kwargs):  # an expert's bias is not sequence parallel: its gradient would be reduced twice
        row_init(self, *args, is_expert=is_expert, **kwargs)
        if is_expert and self.bias is not None:
            self.bias.sequence_parallel = False

    layers.RowParallelLinear.__init__ = init
    torch_norm.WrappedTorchNorm.__new__ = staticmethod(lambda cls, config, hidden_size, eps=1e-5, *_, **__: TorchNorm(config, hidden_size, eps))

    _patch_distributed_optimizer()


def _patch_distributed_optimizer() -> None:
    """Resuming with torch's Adam, which keeps a step count among its tensors: upstream looks for it before the first step, and in the saved tensors, and
    gives one tensor to all parameters, each of which then counts it up."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    upstream, upstream_load = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict
    upstream_set = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict(self):
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.optimizer.state or not parameters:
            return upstream(self)
        self.optimizer.state[parameters[0]] = {"step": torch.zeros(())}
        try:
            return upstream(self)
        finally:
            self.optimizer.state.clear()

    def set_states(self, model_param, tensors):
        upstream_set(self, model_param, tensors | {"step": None})  # None: the count came with the parameter groups; by bucket this one is the unloaded one

    def load_state_dict(self, state):
        upstream_load(self, state)
        for tensors in self.optimizer.state.values():
            tensors["step"] = tensors["step"].clone()

    DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict = state_dict, load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states


def patch_specs() -> None:
    """Makes the Transformer Engine layer specs, Qwen3.5's Gated DeltaNet included, buildable from megatron-core's local modules."""
    import megatron.core.models.gpt.experimental_attention_variant_module_specs as variants
    import megatron.core.models.gpt.gpt_layer_specs as gpt_specs
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    class TELayerNormColumnParallelLinear(ColumnParallelLinear):
        """Norm followed by a column-parallel linear; Bridge's mapping goes by this class name."""

        def __init__(self, input_size, output_size, *, config, **kwargs):
            super().__init__(input_size, output_size, config=config, **kwargs)
            norm = TorchNorm(config, input_size, config.layernorm_epsilon)
            self._norm = [norm]  # a list hides it from nn.Module: its parameters are registered under TE's names
            self.layer_norm_weight = norm.weight
            if norm.bias is not None:
                self.layer_norm_bias = norm.bias

        def normalised(self, x):
            """What the linear part sees."""
            norm = self._norm[0]
            norm.weight = self.layer_norm_weight
            if norm.bias is not None:
                norm.bias = self.layer_norm_bias
            return norm(x)

        def forward(self, x, *args, **kwargs):
            return super().forward(self.normalised(x), *args, **kwargs)

        def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
            from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

            return make_sharded_tensors_for_checkpoint(self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0, "bias": 0}, sharded_offsets,
                                                       tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])

    class CPUSpecProvider(LocalSpecProvider):
        def fuse_layernorm_and_linear(self):
            return True

        def column_parallel_layer_norm_linear(self):
            return TELayerNormColumnParallelLinear

        def layer_norm(self, rms_norm=False, for_qk=False, has_residual=False):
            return WrappedTorchNorm

        def linear(self):
            raise NotImplementedError("no replicated linear on the CPU runtime")

    gpt_specs.TESpecProvider = variants.TESpecProvider = CPUSpecProvider
    gpt_specs.TENorm = WrappedTorchNorm
    variants._get_backend_spec_provider = lambda config: CPUSpecProvider()
    _patch_gated_delta_net()


def _patch_gated_delta_net() -> None:
    """Torch in place of FLA's kernels; sequences are not packed here."""
    import megatron.core.ssm.gated_delta_net.common as common
    import megatron.core.ssm.gated_delta_net.gdn as gdn

    def causal_conv1d(x, weight, bias=None, activation=None, initial_state=None, output_final_state=False, cu_seqlens=None):
        if cu_seqlens is not None:
            raise NotImplementedError("packed sequences need FLA's kernels, which need a GPU")
        y = torch.nn.functional.conv1d(x.transpose(1, 2), weight.unsqueeze(1), bias, padding=weight.shape[-1] - 1, groups=weight.shape[0])
        return torch.nn.functional.silu(y[..., : x.shape[1]]).transpose(1, 2), None

    def l2norm(x, dim=-1, eps=1e-6):
        return x * torch.rsqrt((x.float() * x.float()).sum(dim, keepdim=True) + eps).to(x.dtype)

    common.HAVE_FLA = True
    common.l2norm = l2norm
    gdn.chunk_gated_delta_rule = gdn.torch_chunk_gated_delta_rule
    gdn.causal_conv1d = causal_conv1d


def patch_bridge() -> None:
    """megatron.bridge.training: initialisation without CUDA and without a C++ tool chain."""
    import megatron.bridge.peft.utils as peft
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper
    import megatron.bridge.training.initialize as initialize
    import megatron.bridge.training.setup as setup

    peft.HAVE_TE = False  # megatron-core has the names without Transformer Engine, and no classes behind them
    setup.initialize_megatron = functools.partial(setup.initialize_megatron, allow_no_cuda=True)
    setup.set_jit_fusion_options = lambda *_, **__: None
    initialize.compile_helpers = lambda: None  # the wheel ships the compiled helpers but no Makefile

    upstream = AdapterWrapper.base_linear_forward

    def base_linear_forward(self, x, *args, **kwargs):  # an adapter reads what its linear reads; Transformer Engine returns that beside the output
        output, bias, adapter_input = upstream(self, x, *args, **kwargs)
        return output, bias, self.to_wrap.normalised(x) if hasattr(self.to_wrap, "normalised") else adapter_input

    AdapterWrapper.base_linear_forward = base_linear_forward

"""The CPU runtime: what lets megatron-core and Megatron-Bridge run over gloo on a machine without a GPU.

Owns the stand-ins for `torch.cuda` and the rewriting of "cuda" devices; the patches inside Megatron live in `cpu_patches.py`.
`install()` is called once per process, before Megatron is imported, by commands whose recipe says `device: cpu` and by the tests' rank pools.
It changes process-wide state, so it refuses to run where a GPU is present, and nothing else in the package imports it.

What it does, each needed by code that was seen to fail without it:
  1. a TorchFunctionMode maps cuda devices in torch calls to the CPU, makes `.cuda()` the identity, and lets `tensor.type()` say
     `torch.cuda.*` (Megatron's optimizers compare these strings);
  2. `torch.cuda.*`: current device, streams, events, NVTX and memory queries become inert; CUDA RNG state is the CPU's RNG state;
  3. torch.compile is off (Megatron's jit fuser would ask for a C++ tool chain);
  4. Megatron-Bridge imports transformer_engine and nvidia_resiliency_ext unconditionally: stubs are shown while it is imported; after that, GPU
     packages look as if they were not installed;
  5. the patches of cpu_patches.py.
"""

import collections
import contextlib
import logging
import os
import sys
import types

import torch
from torch.overrides import TorchFunctionMode

from megatron_kd.errors import ConfigError, rule

# What every Bridge provider needs on this runtime: no fused CUDA kernels, weights initialised on the CPU.
CPU_OVERRIDES = {
    "use_cpu_initialization": True,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
}

_installed = False


def install(num_threads: int | None = None) -> None:
    """Make Megatron-Core and Bridge importable and runnable on this CPU; costs 6 to 12 s of imports. Calling twice is harmless.

    `num_threads`: torch intra-op threads; None keeps OMP_NUM_THREADS, or 1 where that is unset (several ranks share the cores).
    Errors: ConfigError on a machine with a GPU, and where Megatron was imported before.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_available():
        raise ConfigError(rule("device", "cpu", "the CPU runtime replaces torch.cuda and is for machines without a GPU",
                               "Use device: cuda, or hide the GPUs with CUDA_VISIBLE_DEVICES="))
    if "megatron.core" in sys.modules:
        raise ConfigError(rule("cpu.install()", "after megatron.core", "the CPU runtime must be installed before Megatron is imported",
                               "Call it first in the process"))
    _installed = True
    torch.set_num_threads(num_threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    _disable_compile()
    _replace_torch_cuda()
    CudaToCpu().__enter__()
    _stub_resiliency()
    sys.modules.update(dict.fromkeys(_GPU_PACKAGES))
    import megatron.core  # noqa: F401 -- patched next

    from megatron_kd.mcore import cpu_patches

    cpu_patches.patch_core()
    with _stub_transformer_engine(), _quiet_imports():
        import megatron.bridge  # noqa: F401
    cpu_patches.patch_specs()
    cpu_patches.patch_bridge()


@contextlib.contextmanager
def _quiet_imports():
    """Bridge logs a traceback for every CUDA package that it does not find; on this runtime none is expected."""
    before = logging.root.manager.disable
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(before)


def _disable_compile() -> None:
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    import torch._dynamo.config as dynamo_config

    dynamo_config.disable = True


def _cpu_device(device):
    """The CPU for anything that names a CUDA device; everything else unchanged."""
    if isinstance(device, bool):
        return device
    is_cuda = isinstance(device, int) or (isinstance(device, str) and device.split(":")[0] == "cuda")
    if is_cuda or (isinstance(device, torch.device) and device.type == "cuda"):
        return torch.device("cpu")
    return device


class CudaToCpu(TorchFunctionMode):
    """Rewrites cuda devices to the CPU in every torch call of the thread that entered it."""

    def __torch_function__(self, func, types_, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("device") is not None:
            kwargs = dict(kwargs, device=_cpu_device(kwargs["device"]))
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (str, torch.device, int)):
            args = (args[0], _cpu_device(args[1]), *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


class _Stream:
    """A CUDA stream with nothing to wait for: CPU work is done when the call returns."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, *_):
        pass

    def wait_event(self, *_):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def query(self):
        return True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False

    @staticmethod
    def priority_range():
        return 0, -1


class _Event:
    """A CUDA event that has always happened."""

    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    def wait(self, *_):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, *_):
        return 0.0


class _Properties:
    name, total_memory, major, minor, multi_processor_count = "cpu", 1 << 34, 0, 0, 1


def _constant(value):
    return lambda *_, **__: value


def _replace_torch_cuda() -> None:
    cuda, stream = torch.cuda, _Stream()
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream", "manual_seed_all", "reset_peak_memory_stats"):
        setattr(cuda, name, _constant(None))
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, _constant(0))
    cuda.current_device = _constant("cpu")
    cuda.device_count = _constant(1)
    cuda.current_stream = cuda.default_stream = _constant(stream)
    cuda.stream = lambda *_, **__: contextlib.nullcontext()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.is_current_stream_capturing = _constant(False)
    cuda.get_device_capability = _constant((0, 0))
    cuda.get_device_name = _constant("cpu")
    cuda.get_device_properties = _constant(_Properties())
    cuda.mem_get_info = _constant((1 << 34, 1 << 34))
    cuda.memory_stats = lambda *_, **__: collections.defaultdict(int)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))  # torch.manual_seed would call back into this
    cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    for name, value in (("range_push", 0), ("range_pop", 0), ("mark", None), ("range_start", 0), ("range_end", None)):
        setattr(cuda.nvtx, name, _constant(value))
    torch.Tensor.record_stream = lambda self, stream: None  # its C++ parser rejects our stream before the mode sees the call


def _stub_resiliency() -> None:
    """megatron.bridge.training imports nvidia_resiliency_ext.inprocess.CallWrapper unconditionally; only in-process restart uses it."""
    try:
        import nvidia_resiliency_ext.inprocess  # noqa: F401

        return
    except ImportError:
        pass
    package, inprocess = types.ModuleType("nvidia_resiliency_ext"), types.ModuleType("nvidia_resiliency_ext.inprocess")
    package.__version__, package.__path__, package.inprocess = "0.0.0", [], inprocess
    inprocess.CallWrapper = type("CallWrapper", (), {})
    sys.modules[package.__name__], sys.modules[inprocess.__name__] = package, inprocess


class _NoTransformerEngine(torch.nn.Module):
    def __init__(self, *_, **__):
        raise RuntimeError("transformer_engine is not installed: the CPU runtime shows a stub to Megatron-Bridge's import only")


# Hidden (an import of them fails) where they are installed: they need a GPU, and megatron-core would take their kernels.
_GPU_PACKAGES = ("transformer_engine", "fla", "causal_conv1d")

# Modules of megatron-core that probe for transformer_engine while they are imported: they must see it absent first.
_PROBES = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.fp8_utils",
    "megatron.core.fp4_utils",
    "megatron.core.optimizer",
    "megatron.core.pipeline_parallel.schedules",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.experimental_attention_variant_module_specs",
    "megatron.core.tensor_parallel",
    "megatron.core.inference.text_generation_controllers.text_generation_controller",
)


@contextlib.contextmanager
def _stub_transformer_engine():
    """Shows a stub to Bridge's one unconditional import (peft/lora_layers.py), after megatron-core has probed, and hides it again."""
    import importlib

    for name in _PROBES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.ops")
    root, pytorch, ops = (types.ModuleType(name) for name in names)
    for name in ("Linear", "LayerNormLinear", "TransformerLayer", "LayerNorm", "RMSNorm"):
        setattr(pytorch, name, type(name, (_NoTransformerEngine,), {}))
    ops.Sequential = type("Sequential", (_NoTransformerEngine,), {})
    root.pytorch, pytorch.ops, root.__version__ = pytorch, ops, "0.0.0"
    sys.modules.update(zip(names, (root, pytorch, ops)))
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules[names[0]] = None

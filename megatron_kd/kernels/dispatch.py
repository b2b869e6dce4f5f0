"""Which backend's row kernels a call uses: `kernels_for(device, backend)` returns a module with the functions of torch_twin.py.

"triton" is the GPU backend, "torch" the twin that runs anywhere, "auto" takes Triton on CUDA devices where it imports and
supports the call. Called by the loss; decided once per call.
"""

import importlib.util
import os
from types import ModuleType
from typing import Literal

import torch

from megatron_kd.errors import ConfigError, MissingDependency, rule

Backend = Literal["auto", "torch", "triton"]


def kernels_for(device: torch.device, dtype: torch.dtype, backend: Backend = "auto") -> ModuleType:
    """The module of row kernels for tensors of `dtype` on `device`. Errors: ConfigError, MissingDependency (triton asked for, not installed)."""
    if backend not in ("auto", "torch", "triton"):
        raise ConfigError(rule("backend", backend, "must be 'auto', 'torch' or 'triton'", "Use 'auto'"))
    has_triton = importlib.util.find_spec("triton") is not None
    if backend == "triton" and not has_triton:
        raise MissingDependency("backend = 'triton': Triton is not installed. pip install triton")
    if backend == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(rule("backend", backend, "needs a GPU; the tensors are on the CPU",
                               "Use 'torch' or 'auto', or set TRITON_INTERPRET=1 to try the kernels slowly"))
    if backend == "triton" and dtype == torch.float64:
        raise ConfigError(rule("backend", backend, "computes in float32; the tensors are float64", "Use 'torch' or 'auto'"))
    if backend == "triton" or (backend == "auto" and has_triton and device.type == "cuda" and dtype != torch.float64):
        from megatron_kd.kernels import triton_rows

        return triton_rows
    from megatron_kd.kernels import torch_twin

    return torch_twin


def top_k_kernels_for(kernels: ModuleType) -> ModuleType:
    """The module of top-K kernels (the functions of topk_twin.py) that goes with a module from `kernels_for`."""
    name = {"torch_twin": "topk_twin", "triton_rows": "triton_topk"}[kernels.__name__.rpartition(".")[2]]
    return importlib.import_module(f"megatron_kd.kernels.{name}")

"""c * x into another dtype, read once and written once. Called by the loss's backward, for the gradients formed in forward."""

import importlib.util

import torch


def scaled(x: torch.Tensor, c: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out = c * x rounded to out's dtype; c a 0-dim tensor on x's device; `out` may be x. Returns out. No host sync."""
    dense = x.is_contiguous() and out.is_contiguous()
    if x.is_cuda and dense and x.dtype != torch.float64 and importlib.util.find_spec("triton") is not None:
        from megatron_kd.kernels.triton_scale import scale

        return scale(x, c, out)
    return x.mul_(c) if out is x else out.copy_(x * c)

"""Where the head's weight gradient goes: Megatron's `main_grad` contract for the fused loss.

Owns the delivery that `loss/scratch.py` calls in backward. Megatron's DDP keeps an fp32 `main_grad` per parameter; whoever writes into it
directly sets `grad_added_to_main_grad` and hands autograd a dummy, so that DDP's hook still fires and does not add it.
"""

import torch

from megatron_kd.loss.scratch import HeadGradient


def takes_main_grad(weight: torch.nn.Parameter, also_embeds: bool) -> bool:
    """Whether dW may be written into `weight.main_grad`.

    Not under Megatron-FSDP (another protocol), and not for a weight that also embeds unless Megatron announced zeros for the dummy
    (`zero_out_wgrad`): there the embedding's own gradient arrives through autograd together with the dummy.
    """
    if getattr(weight, "main_grad", None) is None or hasattr(weight, "__fsdp_param__"):
        return False
    return not also_embeds or bool(getattr(weight, "zero_out_wgrad", False))


def head_gradient(weight: torch.nn.Parameter, also_embeds: bool) -> HeadGradient:
    """A HeadGradient that writes into `weight.main_grad` where Megatron's contract allows it, and returns dW to autograd otherwise.

    The decision is made at delivery, since DDP attaches main_grad after the model is built.
    """

    def deliver(dw_VH: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        if not takes_main_grad(weight, also_embeds):
            return (dw_VH * c).to(weight.dtype)
        if weight.main_grad.dtype == dw_VH.dtype:
            weight.main_grad.addcmul_(dw_VH, c)
        else:
            weight.main_grad.add_(dw_VH.mul_(c))
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return torch.zeros_like(weight)
        return torch.empty_like(weight)

    return HeadGradient(deliver)

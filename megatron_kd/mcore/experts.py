"""Experts of a frozen model: one weight tensor and one product for all experts of a layer.

Transformer Engine's GroupedLinear holds a matrix and launches a product for each expert. With hundreds of experts the host needs longer for
that than the GPU for the products, and PyTorch's allocator cannot fill its segments with such matrices (256 of 6 MiB lose a tenth). Without
a backward neither is needed: torch.nn.functional.grouped_mm reads [experts, out, in] and takes a layer in one launch, as Megatron's own
InferenceGroupedMLP does. It has such a kernel for bf16 on Hopper (torch 2.11; it loops over experts elsewhere, and on Blackwell it was not
measured), so other layers are left to Transformer Engine. Called by mcore/model.py while a frozen model is built. Measured: docs/benchmarks.md.
Shape letters: E experts of this rank, N rows sorted by expert, I input width, O output width.
"""

import contextlib
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_module_registration_hook

from megatron_kd.mcore.transfer import to_device

ALIGNMENT_BYTES = 16
"""Of a row's stride, for grouped_mm."""
HOPPER = 9
"""Major compute capability."""


@contextlib.contextmanager
def experts_stacked() -> Iterator[None]:
    """Grouped linear layers that are built inside get their weights stacked as soon as they are there, so that no second copy of a whole model ever is."""
    handle = register_module_module_registration_hook(lambda _module, _name, layer: stack(layer) if can_stack(layer) else None)
    try:
        yield
    finally:
        handle.remove()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # the last layer's single matrices


def can_stack(layer: torch.nn.Module | None) -> bool:
    """Whether `layer` is a grouped linear layer in bf16, without bias or quantised weights, whose rows grouped_mm can read, on Hopper (or the CPU,
    where it loops)."""
    if not getattr(layer, "num_gemms", 0) or getattr(layer, "use_bias", False) or not hasattr(layer, "weight0"):
        return False
    config, first = getattr(layer, "config", None), layer.weight0
    if type(first) is not torch.nn.Parameter or first.dtype != torch.bfloat16 or any(getattr(config, name, None) for name in ("fp8", "fp4", "quant_recipe")):
        return False
    aligned = all(width * first.element_size() % ALIGNMENT_BYTES == 0 for width in first.shape)
    return aligned and (not first.is_cuda or torch.cuda.get_device_capability(first.device)[0] == HOPPER)


def names_of(layer: torch.nn.Module) -> list[str]:
    """Of its weights, one [O, I] an expert."""
    return [f"weight{i}" for i in range(layer.num_gemms)]


def stack(layer: torch.nn.Module) -> None:
    """Moves the weights of `layer` into one [E, O, I] tensor, of which its parameters become views, and makes its forward read that.

    Names, shapes and values of the parameters stay, for checkpoints. Costs one layer's weights while it runs.
    """
    names = names_of(layer)
    stacked_EOI = torch.stack([getattr(layer, name).detach() for name in names])
    for name, weight_OI in zip(names, stacked_EOI):
        getattr(layer, name).data = weight_OI
    layer.forward = Stacked(layer, names, stacked_EOI)


class Stacked:
    """The forward of a layer whose weights are stacked, in place of TEGroupedLinear's without a bias."""

    def __init__(self, layer: torch.nn.Module, names: list[str], stacked_EOI: torch.Tensor):
        self._layer, self._names, self._stacked_EOI = layer, names, stacked_EOI
        self._addresses = [weight_OI.data_ptr() for weight_OI in stacked_EOI]

    @torch.no_grad()
    def __call__(self, rows_NI: torch.Tensor, rows_per_expert: Sequence[int]) -> tuple[torch.Tensor, None]:
        """([N, O], no bias). Where a parameter was given other memory since, all are stacked again."""
        parameters = self._layer._parameters
        if [parameters[name].data_ptr() for name in self._names] != self._addresses:
            stack(self._layer)
            return self._layer.forward(rows_NI, rows_per_expert)
        if not rows_NI.shape[0]:
            return rows_NI.new_empty(0, self._stacked_EOI.shape[1]), None
        ends_E = to_device(torch.as_tensor(rows_per_expert).cumsum(0), rows_NI.device, torch.int32)
        return F.grouped_mm(rows_NI, self._stacked_EOI.transpose(1, 2), offs=ends_E), None

"""to_device: small host tensors onto the GPU without waiting for it. Called by the student's step and the teacher's forward, per micro-batch."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` on `device`, in `dtype` where given. Ordered on the current stream.

    A copy from pageable memory would make the host wait for everything that it has launched so far; so the values go through pinned memory, whose
    blocks PyTorch reuses, and not before their copies are done.
    """
    tensor = tensor if dtype is None else tensor.to(dtype)
    if device.type != "cuda" or tensor.is_cuda or tensor.numel() == 0:
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)  # pinning keeps strides, and cannot fill an expanded tensor

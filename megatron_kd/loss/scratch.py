"""HeadGradient: who owns the head's weight gradient between forward and backward, and where it goes.

The loss forms dW while the window's logits exist, in forward, into one fp32 buffer [V, H] of this rank's shard; backward
learns the constant c and delivers c * dW. One HeadGradient serves all micro-batches of a head (and MTP depths): its buffer is
handed out, returned by backward, and handed out again. A second buffer is made only while the first is still on its way to
its backward. Called by the fused loss; built by users and by mcore, which delivers into main_grad.
"""

from collections.abc import Callable

import torch

from megatron_kd.kernels.scale import scaled

Deliver = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]


class HeadGradient:
    """Reusable fp32 buffers for one head shard.

    `deliver(dw_VH, c)` gets the fp32 sum [V, H] and the 0-dim constant c on the same device, puts c * dw_VH where it belongs
    and returns what autograd should see as the head's gradient (a dummy, or None). It must not keep dw_VH. Without `deliver`
    autograd gets c * dw_VH in the head's dtype.
    """

    def __init__(self, deliver: Deliver | None = None):
        self._deliver, self._free, self._num_buffers = deliver, [], 0

    @property
    def num_buffers(self) -> int:
        """Buffers made so far: 1 where every forward is followed by its backward."""
        return self._num_buffers

    def acquire(self, head_VH: torch.Tensor) -> torch.Tensor:
        """A buffer for head_VH's gradient with undefined contents: float32, or float64 for a float64 head."""
        dtype = torch.promote_types(head_VH.dtype, torch.float32)
        for index, buffer in enumerate(self._free):
            if buffer.shape == head_VH.shape and buffer.dtype == dtype and buffer.device == head_VH.device:
                return self._free.pop(index)
        self._num_buffers += 1
        return torch.empty(head_VH.shape, dtype=dtype, device=head_VH.device)

    def release(self, dw_VH: torch.Tensor) -> None:
        """Return a buffer that acquire gave, after delivery or because no backward will come."""
        self._free.append(dw_VH)

    def deliver(self, dw_VH: torch.Tensor, c: torch.Tensor, head_dtype: torch.dtype) -> torch.Tensor | None:
        """Hand c * dw_VH over; returns what autograd gets. The buffer is free again afterwards."""
        if self._deliver is not None:
            grad = self._deliver(dw_VH, c)
        else:
            grad = scaled(dw_VH, c, dw_VH if dw_VH.dtype == head_dtype else torch.empty_like(dw_VH, dtype=head_dtype))
            if grad is dw_VH:  # given away to autograd: it must not be handed out again
                self._num_buffers -= 1
                return grad
        self.release(dw_VH)
        return grad

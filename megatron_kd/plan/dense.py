"""Losses over full logits, as others compute them: the buffers alive at their peak, for comparison with the fused loss.

Every buffer is [rows, vocabulary columns of this rank]; which are alive together was counted in the implementations' source, and tests hold the
sums against tracked allocations of the real ones. Called by memory (`Job.loss`), report and predict. No torch.

  dense     plain PyTorch: log_softmax of fp32 casts, kl_div, nll_loss; the least of such implementations (cli/bench_methods.py).
  modelopt  NVIDIA's Megatron paths: ModelOpt's LogitsKLLoss for a running teacher, Megatron-LM's cached-logits loss for top-K rows. ModelOpt
            computes no cross-entropy unless told to, Megatron-LM always does.
"""

from typing import Literal

DenseLoss = Literal["dense", "modelopt"]
DENSE_LOSSES: tuple[DenseLoss, ...] = ("dense", "modelopt")
Signal = Literal["hidden", "top_k"]
FLOAT = 4
KL_DIV = {"exp(log p)": FLOAT, "log p - log q": FLOAT, "their product": FLOAT}
"""What F.kl_div(log_target=True) forms before it sums."""
KEPT_SOFTMAX = {"softmax kept for the cross-entropy": FLOAT}
"""Megatron's vocabulary-parallel cross-entropy keeps it from the model's forward on."""


def dense_buffers(loss: DenseLoss, signal: Signal, *, tp: int = 1, dtype_bytes: int = 2, cross_entropy: bool = False) -> dict[str, int]:
    """Bytes of one element of each buffer at the peak, by name. `signal`: logits of both models, or the student's against kept tokens."""
    logits = {"student logits": dtype_bytes, "teacher logits": dtype_bytes}
    if (loss, signal) == ("dense", "hidden"):
        return {**logits, "log q": FLOAT, "log p": FLOAT, **KL_DIV}
    if (loss, signal) == ("dense", "top_k"):  # in backward, when the logits are gone
        labels = {"gradient of the cross-entropy": FLOAT} if cross_entropy else {}
        return {"log q": FLOAT, "log q outside the kept tokens": FLOAT, **labels, "log q - log of the tail": FLOAT, "softmax of the tail": FLOAT,
                "gradient of the tail": FLOAT}
    if (loss, signal) == ("modelopt", "hidden"):
        labels = KEPT_SOFTMAX if cross_entropy else {}
        sharded = {"exp of student logits, kept for the sum over shards": FLOAT} if tp > 1 else {}
        return {**labels, **logits, "student logits fp32": FLOAT, "teacher logits fp32": FLOAT, **sharded, "log q": FLOAT, "log p": FLOAT, **KL_DIV}
    assert (loss, signal) == ("modelopt", "top_k"), (loss, signal)  # in backward, when the logits are gone
    return {**KEPT_SOFTMAX, "exp of student logits": FLOAT, "log q": FLOAT, "gradient of log q": FLOAT, "gradient of student logits": FLOAT}


def dense_bytes(loss: DenseLoss, signal: Signal, *, num_rows: int, num_columns: int, **options) -> int:
    """Sum over the buffers. Bytes of an element in bf16, without cross-entropy: `dense` 24, top-K 20; `modelopt` 32 (36 with tp > 1), top-K 20."""
    return num_rows * num_columns * sum(dense_buffers(loss, signal, **options).values())

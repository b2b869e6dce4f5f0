"""DeviceFlags: what went wrong on the device, counted there and read when the caller chooses to wait.

Made by the fused loss (one per call, or the caller's own over many calls); read by student/step and by users. On CPU devices
the loss raises at once, so nothing is left to read.
"""

import torch

from megatron_kd.errors import GradientContractError, NonFiniteTeacher, VocabMismatch, rule

NONFINITE_ROWS, BAD_IDS, BAD_GRADIENTS = 0, 1, 2


class DeviceFlags:
    """Three counters on the device: teacher rows that are not finite, labels or ids outside the vocabulary, backwards that broke the contract."""

    def __init__(self, device: torch.device):
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)

    def add(self, which: int, count: torch.Tensor) -> None:
        """Add a device-side count, without a sync."""
        self.counts[which] += count

    def check(self, *, source: str = "the teacher", where: str = "this call", allow_nonfinite: bool = False) -> None:
        """Waits for the device; raises what the counters say, naming `source` and `where`, and clears them.

        Errors: NonFiniteTeacher (unless allow_nonfinite), VocabMismatch, GradientContractError.
        """
        nonfinite, bad_ids, bad_gradients = self.counts.tolist()
        self.counts.zero_()
        if bad_ids:
            raise VocabMismatch(rule("labels and ids outside the true vocabulary", bad_ids, f"must be 0 ({where})",
                                     "Check the tokenizer and VocabSpec.true_size"))
        if nonfinite and not allow_nonfinite:
            raise NonFiniteTeacher(rule(f"rows of {source} with NaN or infinity", nonfinite, f"must be 0 ({where})",
                                        "Check the teacher's checkpoint and dtype, or set on_nonfinite='drop_rows'"))
        if bad_gradients:
            raise GradientContractError(contract_message(bad_gradients, where))


def contract_message(got: object, where: str = "this call") -> str:
    """The text of GradientContractError."""
    return rule("backward's gradient", got, f"must be one constant times the weights given to fused_linear_kd ({where})",
                "Pass weights_N as your loss function applies them, or gradients='in_backward' for any gradient at two more projections")

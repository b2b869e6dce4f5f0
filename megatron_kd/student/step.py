"""ForwardStep: any Bridge forward step, with the fused distillation loss at its end.

Owns the wrapping of one forward step and of the loss function that it returns. Called by Bridge's schedules.
"""

from collections.abc import Callable

import torch

from megatron_kd.errors import ConfigError, rule
from megatron_kd.mcore.callbacks import bind_state
from megatron_kd.student.engine import Engine, MicroBatch


class _Tap:
    """A data iterator that remembers the last batch."""

    def __init__(self, inner, micro: MicroBatch):
        self._inner, self._micro = inner, micro

    def __iter__(self):
        return self

    def __next__(self):
        self._micro.batch = next(self._inner)
        return self._micro.batch

    def __getattr__(self, name: str):
        return getattr(self._inner, name)


class ForwardStep:
    """Bridge calls it as `(state, data_iterator, model, return_schedule_plan)`; stages without the output layer run `base` untouched."""

    def __init__(self, base: Callable, engine: Engine):
        self._base, self._engine, self._bound = base, engine, None

    def __call__(self, state, data_iterator, model, return_schedule_plan: bool = False):
        arguments = (return_schedule_plan,) if return_schedule_plan else ()
        base = self._bind(state)
        is_evaluation = not model.training
        if not self._engine.owns_head(model) or (is_evaluation and not self._engine.evaluates):
            return base(data_iterator, model, *arguments)
        micro = self._engine.begin_microbatch()
        with self._engine.bind(micro):
            output, loss_function = base(_Tap(data_iterator, micro), model, *arguments)
        return output, LossFunction(loss_function, micro, self._engine, waits=_waits_for_device(state))

    def _bind(self, state) -> Callable:
        if self._bound is None or self._bound[0] is not state:
            self._bound = state, bind_state(self._base, state)
        return self._bound[1]


class LossFunction:
    """The base step's loss function, whose report also holds KD, cross-entropy and the tokens that both are means over."""

    def __init__(self, base: Callable, micro: MicroBatch, engine: Engine, *, waits: bool):
        self._base, self._micro, self._engine, self._waits = base, micro, engine, waits

    def __call__(self, output: torch.Tensor):
        """Megatron's 3-tuple (weighted sum, number of tokens, report). Errors: NonFiniteTeacher, VocabMismatch, ConfigError."""
        if self._waits:
            self._engine.check_flags(self._micro.where)
        result = self._base(output)
        if len(result) != 3:
            raise ConfigError(rule("loss function's result", f"{len(result)} values", "must be (sum, number of tokens, report): the fused loss is per token",
                                   "Return Megatron's three values from your forward step's loss function"))
        loss, num_tokens, report = result
        loss, num_tokens = self._denominator(loss, num_tokens)
        return loss, num_tokens, {**report, **self._report(num_tokens)}

    def _denominator(self, loss: torch.Tensor, num_tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Megatron's count is an int: rows for loss.denominator rows, the rounded sum of weights (the loss scaled to match) for weights."""
        weights_N, micro = self._micro.weights, self._micro
        fractional = bool((weights_N != 1).any())
        if fractional and self._engine.denominator == "rows":
            num_tokens = torch.full_like(num_tokens, weights_N.numel())
        elif fractional:
            total = float(weights_N.sum())
            rounded = max(1, round(total))
            loss, num_tokens = loss * (rounded / total), torch.full_like(num_tokens, rounded)
            micro.kd_sum, micro.ce_sum = micro.kd_sum * (rounded / total), micro.ce_sum * (rounded / total)
        if micro.dropped is not None:
            num_tokens = num_tokens - micro.dropped.to(num_tokens.dtype)
        return loss, num_tokens

    def _report(self, num_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pairs that Bridge sums over micro-batches and data-parallel ranks, then divides."""
        micro, count = self._micro, num_tokens.detach().reshape(()).float()
        share = count.new_full((), 1.0 / self._engine.num_reports)
        return {"kd loss": torch.stack([micro.kd_sum.float(), count]), "ce loss": torch.stack([micro.ce_sum.float(), count]), "kd tokens": torch.stack([count, share])}


def _waits_for_device(state) -> bool:
    """Whether Bridge's NaN check waits for the device after each forward anyway, so that reading our flags there costs nothing."""
    machine = getattr(state.cfg, "rerun_state_machine", None)
    return bool(machine is not None and machine.check_for_nan_in_loss)

"""ForwardStep: any Bridge forward step, with the fused distillation loss at its end.

Owns the wrapping of one forward step and of the loss function that it returns. Called by Bridge's schedules.
"""

from collections.abc import Callable

import torch

from megatron_kd.errors import ConfigError, DataEnded, rule
from megatron_kd.mcore.callbacks import bind_state
from megatron_kd.student.engine import Engine, MicroBatch

TOTAL = "total loss"
"""Name in Megatron's log of kd_weight x KD + ce_weight x CE, which Bridge's own loss function calls `lm loss`."""

TINY = 1e-6
"""Count of KD rows that stands for none."""


class _Tap:
    """A data iterator that remembers the last batch."""

    def __init__(self, inner, micro: MicroBatch):
        self._inner, self._micro = inner, micro

    def __iter__(self):
        return self

    def __next__(self):
        try:
            self._micro.batch = next(self._inner)
        except StopIteration as e:
            raise DataEnded(rule("data iterator", self._micro.where, "ended early", "Provide more data, or train fewer steps")) from e
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
        share = self._micro.denominator
        num_tokens = share.count.to(num_tokens.device, num_tokens.dtype)
        report = dict(report)
        if "lm loss" in report:  # it is no language-model loss any more
            report[TOTAL] = torch.stack([report.pop("lm loss")[0] * share.factor, num_tokens.float()])
        return loss * share.factor, num_tokens, {**report, **self._report(num_tokens)}

    def _report(self, num_tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Pairs that Bridge sums over micro-batches and data-parallel ranks, then divides."""
        factor, count = self._micro.denominator.factor, num_tokens.detach().reshape(()).float()
        pairs = {name: torch.stack([value.float() * factor, count]) for name, value in self._micro.sums.items()}
        if not self._micro.has_teacher:  # no row of KD: not 0 rows, or a step without any teacher would divide by zero
            pairs |= {name: torch.stack([count.new_zeros(()), count.new_full((), TINY)]) for name in pairs if name != "ce loss"}
        tokens = torch.stack([count / factor, count.new_full((), 1.0 / self._engine.num_reports)])
        return {**pairs, "kd tokens": tokens}


def _waits_for_device(state) -> bool:
    """Whether Bridge's NaN check waits for the device after each forward anyway, so that reading our flags there costs nothing."""
    machine = getattr(state.cfg, "rerun_state_machine", None)
    return bool(machine is not None and machine.check_for_nan_in_loss)

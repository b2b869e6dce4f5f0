"""The fused loss on one micro-batch of a Megatron model: rows selected, teacher's rows paired, per-token losses put back in place.

Owns what lies between a HeadCall (mcore/output_layer.py) and `fused_linear_kd`. Called by the engine.
Shape letters: b sequences, t positions of this context-parallel rank, p positions of this rank, N rows, V shard columns, H width.
"""

import dataclasses

import torch

from megatron_kd.config.schema import LossConfig
from megatron_kd.errors import NonFiniteTeacher, rule
from megatron_kd.loss.flags import DeviceFlags
from megatron_kd.loss.fused import KDOutput, fused_linear_kd
from megatron_kd.loss.hidden_term import HiddenTerm
from megatron_kd.loss.objective import Objective
from megatron_kd.loss.reduce import gather_row_values
from megatron_kd.loss.signals import HiddenTeacher, Teacher, TopKTeacher
from megatron_kd.mcore.output_layer import HeadCall
from megatron_kd.mcore.transfer import to_device
from megatron_kd.objective import LossTerms
from megatron_kd.rows import RowBlock, TopKBlock
from megatron_kd.student.selection import RowSelection, align
from megatron_kd.student.targets import TeacherHead
from megatron_kd.vocab import VocabSpec


def objective_of(loss: LossConfig, step: int, train_iters: int) -> Objective:
    """The objective in force at `step`, its weights taken from the schedule."""
    kd_weight, ce_weight = loss.weights_at(step, train_iters)
    terms = {term.name: getattr(loss, term.name) for term in dataclasses.fields(LossTerms)}
    return Objective(**terms | {"kd_weight": kd_weight, "ce_weight": ce_weight})


def teacher_of(rows: RowBlock | TopKBlock, head: TeacherHead | None, selection: RowSelection, call: HeadCall) -> Teacher:
    """A source's rows as the loss's teacher, in the selection's order, on the call's device."""
    device, own_rows = call.hidden_pbH.device, isinstance(rows, RowBlock) and rows.is_share
    assert call.is_sequence_parallel or not own_rows, "a share of the rows belongs to sequence parallelism"
    index_N = align(rows, selection.row_ids_of_rank(call.tp_group.rank(), call.tp_group.size()) if own_rows else selection.row_ids_N)

    def pick(tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor if index_N is None else tensor.index_select(0, to_device(index_N, tensor.device)), device)

    if isinstance(rows, TopKBlock):
        return TopKTeacher(ids_NK=pick(rows.ids_NK), log_probs_NK=pick(rows.log_probs_NK), tail_N=pick(rows.tail_N))
    assert head is not None, "hidden rows without the teacher's head"
    return HiddenTeacher(rows_NH=pick(rows.hidden_NH).to(head.weight_VH.dtype), head_VH=head.weight_VH, bias_V=head.bias_V, transform=head.transform, own_rows=own_rows)


def check_finite(finite: torch.Tensor, source: str, where: str) -> None:
    """NonFiniteTeacher naming `source`, `where` and the number of rows. Waits for the device: for CPU tensors, where that is free."""
    num_bad = int((~finite).sum())
    if num_bad:
        raise NonFiniteTeacher(rule(f"rows of {source} with NaN or infinity", num_bad, f"must be 0 of {finite.numel()} ({where})",
                                    "Check the teacher's checkpoint and dtype, or set loss.on_nonfinite=drop_rows"))


def finite_rows(teacher: Teacher, selection: RowSelection, call: HeadCall) -> torch.Tensor:
    """bool [N]: rows of the teacher without NaN or infinity, the same on every tensor-parallel rank; a collective where each holds its own rows."""
    finite = torch.isfinite(teacher.rows_NH if isinstance(teacher, HiddenTeacher) else teacher.tail_N[:, None]).all(dim=-1)
    if not (isinstance(teacher, HiddenTeacher) and teacher.own_rows and selection.row_ids_N.numel()):
        return finite
    return gather_row_values(finite.float(), call.tp_group, selection.rows_per_rank(call.tp_group.size())) > 0


def fused_loss(call: HeadCall, selection: RowSelection, teacher: Teacher | None, objective: Objective, vocab: VocabSpec, loss: LossConfig, flags: DeviceFlags,
               hidden_term: HiddenTerm | None = None, finite_N: torch.Tensor | None = None) -> tuple[KDOutput, dict[str, torch.Tensor]]:
    """Losses of the selected rows, [N], with gradients formed for weights `selection.weights_N`; and extra terms by name, differentiable [N].

    `finite_N`: finite_rows where on_nonfinite is drop_rows: the hidden term leaves out the others.
    """
    flat = call.hidden_pbH.reshape(-1, call.hidden_pbH.shape[-1])
    device, tp = flat.device, call.tp_group.size()
    group, rows_per_rank = call.tp_group if tp > 1 else None, selection.rows_per_rank(tp) if call.is_sequence_parallel else None
    if not selection.is_all:
        index = selection.of_rank(call.tp_group.rank(), tp) if call.is_sequence_parallel else selection.hidden_index_N
        flat = flat.index_select(0, to_device(index, device))
    labels_N = call.labels_bt.reshape(-1).index_select(0, to_device(selection.output_index_N, device))
    out = fused_linear_kd(flat, call.weight_VH, teacher, vocab=vocab, objective=objective, labels_N=labels_N, weights_N=to_device(selection.weights_N, device),
                          tp_group=group, rows_per_rank=rows_per_rank, head_bias_V=call.bias_V, student_transform=call.transform, dw=call.dw,
                          on_nonfinite=loss.on_nonfinite, flags=flags, window_rows=loss.window_rows, backend=loss.backend)
    if hidden_term is None:
        return out, {}
    rows_NH = teacher.rows_NH.clone()  # its backward reads them when the source has long taken its memory back
    if finite_N is not None:
        rows_NH = torch.where(torch.isfinite(rows_NH).all(dim=1, keepdim=True), rows_NH, 0.0)
    value_N = hidden_term(flat, rows_NH, tp_group=group, rows_per_rank=rows_per_rank, own_teacher_rows=teacher.own_rows)
    return out, {"hidden loss": value_N if finite_N is None else torch.where(finite_N, value_N, 0.0)}


def scatter(loss_N: torch.Tensor, selection: RowSelection, shape_bt: torch.Size) -> torch.Tensor:
    """[b, t] with the rows' losses in place and 0 elsewhere, as compute_language_model_loss returns it."""
    if selection.is_all and shape_bt[0] == 1:
        return loss_N.view(shape_bt)
    flat = loss_N.new_zeros(shape_bt.numel()).index_put((to_device(selection.output_index_N, loss_N.device),), loss_N)
    return flat.view(shape_bt)

"""The fused loss over vocabulary shards: every rank gets the single-process reference, in loss and in every gradient.

One job per world size, so that each start of a group pays for many cases; failures name the case, the part and the rank.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from megatron_kd.cli.allocations import TrackedAllocations
from megatron_kd.kernels.spec import HeadTransform
from megatron_kd.loss import check
from megatron_kd.loss.fused import fused_linear_kd
from megatron_kd.loss.hidden_term import HiddenTerm
from megatron_kd.loss.objective import DIVERGENCES, Objective
from megatron_kd.loss.scratch import HeadGradient
from megatron_kd.loss.signals import HiddenTeacher
from megatron_kd.loss.sizes import LossShape, call_bytes
from megatron_kd.vocab import VocabSpec

CAPPED = dict(bias=True, student_transform=HeadTransform(scale=0.9, softcap=8.0), teacher_transform=HeadTransform(softcap=6.0))
EMPTY_SHARD = dict(true_size=61, student_padded=120, teacher_padded=64)
"""With 3 or 4 ranks the last shards hold padding alone; with 2 the second holds one true column."""


def divergence_cases() -> list[check.Case]:
    """Every divergence, dense and top-K, with everything that is easily lost, on shards of which some are all padding."""
    cases = [check.Case(name=name, objective=Objective(divergence=name, kd_weight=0.7, ce_weight=0.3, temperature=1.5), **CAPPED, **EMPTY_SHARD) for name in DIVERGENCES]
    cases += [check.Case(name=f"top-K {mode}", signal="top_k", objective=Objective(top_k_mode=mode, ce_weight=0.3), **CAPPED, **EMPTY_SHARD)
              for mode in ("tail_bucket", "renormalise", "none")]
    cases += [check.Case(name="labels", signal="labels", objective=Objective(kd_weight=0.0, ce_weight=1.0)), check.Case(name="logits", signal="logits"),
              check.Case(name="all masked", weights="zero"), check.Case(name="quarter", weights="quarter", objective=Objective(ce_weight=1.0)),
              check.Case(name="bf16", dtype=torch.bfloat16, objective=Objective(ce_weight=0.3)), check.Case(name="no rows", num_rows=0)]
    return cases


def failures(case: check.Case, world: int, **options) -> list:
    """Parts that are not within their limits on this rank."""
    tensors = check.build(case)
    got = check.actual(case, tensors, group=dist.group.WORLD, **options)
    results = check.compare_all(got, check.expected(case, tensors), check.plain(case, tensors, world), case.dtype)
    return [(case.name, options, name, result) for name, result in results.items() if not result.passed]


def all_cases(rank, world):
    return [failure for case in divergence_cases() for failure in failures(case, world, group_windows=1 + case.name.startswith("f"))]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_case_equals_the_reference_on_every_rank(ranks, world):
    assert ranks.run(all_cases, world, timeout_s=120) == [[]] * world


def sequence_parallel_cases(rank, world):
    base = check.Case(name="sp", objective=Objective(ce_weight=0.3), **CAPPED)
    even = tuple(29 // world + (r < 29 % world) for r in range(world))
    shares = [even, (29,) + (0,) * (world - 1), (0,) * (world - 1) + (29,), (1,) * (world - 1) + (30 - world,)]
    found = [f for share in shares for group_windows in (1, 3) for f in failures(base, world, rows_per_rank=share, group_windows=group_windows, own_teacher_rows=group_windows == 3)]
    found += failures(replace(base, objective=Objective(divergence="jsd")), world, rows_per_rank=even)
    found += failures(replace(base, objective=Objective(divergence="jsd"), dtype=torch.bfloat16), world, rows_per_rank=even, own_teacher_rows=True)
    found += failures(replace(base, num_rows=0), world, rows_per_rank=(0,) * world, own_teacher_rows=True)
    found += failures(base, world, rows_per_rank=even, own_teacher_rows=True, gradients="in_backward")
    found += failures(replace(base, signal="top_k"), world, rows_per_rank=even, window_rows=29)
    found += failures(replace(base, signal="logits", dtype=torch.bfloat16), world, rows_per_rank=even)
    found += failures(replace(base, num_rows=0), world, rows_per_rank=(0,) * world)
    found += failures(base, world, rows_per_rank=even, gradients="in_backward")
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_sequence_parallel_rows_however_unevenly_the_mask_leaves_them(ranks, world):
    assert ranks.run(sequence_parallel_cases, world, timeout_s=120) == [[]] * world


def random_masks(rank, world):
    gen, found = torch.Generator().manual_seed(11), []
    for _ in range(8):
        share = tuple(torch.randint(0, 12, (world,), generator=gen).tolist())
        case = check.Case(name="random", num_rows=sum(share), weights="ones", objective=Objective(ce_weight=0.3))
        found += failures(case, world, rows_per_rank=share, window_rows=int(torch.randint(1, 9, (1,), generator=gen)), own_teacher_rows=True)
    return found


def own_and_all_teacher_rows(rank, world):
    """Whether a rank's results are the same bits whether it was given all teacher rows or its own."""
    case = check.Case(name="bits", dtype=torch.bfloat16, objective=Objective(ce_weight=0.3), **CAPPED)
    tensors, shares = check.build(case), (20,) + (9,) + (0,) * (world - 2)
    results = [check.actual(case, tensors, group=dist.group.WORLD, rows_per_rank=shares, own_teacher_rows=own).parts() for own in (False, True)]
    return [name for name, tensor in results[0].items() if not torch.equal(tensor, results[1][name])]


@pytest.mark.parametrize("world", [2, 4])
def test_teacher_rows_gathered_by_window_give_the_same_bits_as_whole_ones(ranks, world):
    assert ranks.run(own_and_all_teacher_rows, world, timeout_s=60) == [[]] * world


def test_random_masks_under_sequence_parallelism(ranks):
    assert ranks.run(random_masks, 3, timeout_s=120) == [[]] * 3


def partial_dx(rank, world):
    case = check.Case(name="partial", objective=Objective(ce_weight=0.3))
    tensors = check.build(case)
    part = check.actual(case, tensors, group=dist.group.WORLD, dx_reduce="none").dx_NH
    alone = part.clone()
    dist.all_reduce(part)
    want = check.expected(case, tensors).dx_NH
    return (part.double() - want).norm().item() / want.norm().item(), (alone.double() - want).norm().item() / want.norm().item()


def test_unreduced_dx_is_this_shards_part(ranks):
    for summed, alone in ranks.run(partial_dx, 2):
        assert summed < 1e-5 < 0.1 < alone


@contextlib.contextmanager
def listed_collectives():
    """Yields the list of (name, elements of the first argument) of this rank's collectives, as they are called."""
    calls, originals = [], {}
    for name in ("all_gather_into_tensor", "all_reduce", "reduce_scatter_tensor"):
        originals[name] = getattr(dist, name)
        setattr(dist, name, lambda *a, _name=name, **k: (calls.append((_name, a[0].numel())), originals[_name](*a, **k))[1])
    try:
        yield calls
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def collectives(rank, world):
    """Names of the collectives that each rank issues, with unequal rows under sequence parallelism and with none at all."""
    with listed_collectives() as calls:
        counts = []
        for share, own_rows in (((13, 0), False), ((13, 0), True), ((0, 0), True)):
            case = check.Case(name="count", num_rows=sum(share), weights="ones", objective=Objective(divergence="jsd"))
            tensors, vocab = check.build(case), VocabSpec(true_size=203, student_padded=240, teacher_padded=216, tp=world)
            own = slice(0, 13) if rank == 0 else slice(13, 13)
            x, head = tensors["x"][own].clone().requires_grad_(), tensors["head"][slice(*vocab.shard_range(rank))].clone().requires_grad_()
            teacher = check.teacher_for(case, tensors, vocab, rank)
            teacher = replace(teacher, rows_NH=teacher.rows_NH[own], own_rows=True) if own_rows else teacher
            out = fused_linear_kd(x, head, teacher, vocab=vocab, objective=case.objective, tp_group=dist.group.WORLD,
                                  rows_per_rank=share, window_rows=5)
            out.loss_N.sum().backward()
            counts.append((list(calls), head.grad is not None, tuple(x.grad.shape)))
            calls.clear()
        return counts


def collectives_of(rank, world, cases):
    """The collectives of each case in one window."""
    found = []
    for case in cases:
        tensors = check.build(case)
        vocab = VocabSpec(true_size=case.true_size, student_padded=case.student_padded, teacher_padded=case.teacher_padded, tp=world)
        x, head = tensors["x"].clone().requires_grad_(), tensors["head"][slice(*vocab.shard_range(rank))].clone().requires_grad_()
        with listed_collectives() as calls:
            fused_linear_kd(x, head, check.teacher_for(case, tensors, vocab, rank), vocab=vocab, objective=case.objective, labels_N=tensors["labels"],
                            tp_group=dist.group.WORLD, window_rows=64).loss_N.sum().backward()
        found.append(list(calls))
    return found


def test_one_small_collective_a_window_where_statistics_are_additive_and_two_where_not(ranks):
    """Beside the sum of dX. Sizes: 7 statistics a row and shard (top-K: 3 and the K logits), and 2 sums a row of the second pass."""
    one_pass = [check.Case(name=name, objective=Objective(divergence=name, ce_weight=0.3)) for name in ("forward_kl", "reverse_kl")]
    sparse = [check.Case(name="top_k", signal="top_k", objective=Objective(ce_weight=0.3)),
              check.Case(name="labels", signal="labels", objective=Objective(kd_weight=0.0, ce_weight=1.0))]
    two_pass = [check.Case(name=name, objective=Objective(divergence=name)) for name in DIVERGENCES if name not in ("forward_kl", "reverse_kl")]
    dx = ("all_reduce", 29 * 24)
    for calls in ranks.run(collectives_of, 2, cases=one_pass + sparse + two_pass):
        assert calls[:2] == [[("all_gather_into_tensor", 2 * 29 * 7), dx]] * 2
        assert calls[2:4] == [[("all_gather_into_tensor", 2 * 29 * (3 + kept)), dx] for kept in (12, 0)]
        assert calls[4:] == [[("all_gather_into_tensor", 2 * 29 * 7), ("all_reduce", 29 * 2), dx]] * 4


def test_ranks_without_a_row_run_the_same_collectives(ranks):
    first, second = ranks.run(collectives, 2)
    assert [calls for calls, _, _ in first] == [calls for calls, _, _ in second]
    assert [len(calls) for calls, _, _ in first] == [3 * 4, 3 * 5, 0]
    assert [(has, shape) for _, has, shape in second] == [(True, (0, 24))] * 3


def peaks(rank, world):
    """(tracked peak, closed form) of one call under tensor parallelism, plain and sequence-parallel, the latter with the teacher's rows whole and spread."""
    found = []
    for sp, own in ((False, False), (True, False), (True, True)):
        hidden_t = 1024 if own else 96
        shape = LossShape(num_rows=256, num_columns=4096, hidden_s=128, hidden_t=hidden_t, dtype_bytes=4, tp=world, sequence_parallel=sp, own_teacher_rows=own,
                          window_rows=64, device_type="cpu")
        vocab = VocabSpec(true_size=4096 * world, student_padded=4096 * world, teacher_padded=4096 * world, tp=world)
        x = torch.randn(256 // world if sp else 256, 128).requires_grad_()
        head, keeper = torch.randn(4096, 128).requires_grad_(), HeadGradient(lambda dw_VH, c: None)
        teacher = HiddenTeacher(rows_NH=torch.randn(256 // world if own else 256, hidden_t), head_VH=torch.randn(4096, hidden_t), own_rows=own)
        keeper.release(keeper.acquire(head))
        weights, labels = torch.ones(256), torch.arange(256)
        with TrackedAllocations() as seen:
            out = fused_linear_kd(x, head, teacher, vocab=vocab, objective=Objective(ce_weight=0.3), labels_N=labels, weights_N=weights, tp_group=dist.group.WORLD,
                                  rows_per_rank=(256 // world,) * world if sp else None, dw=keeper, window_rows=64)
            out.loss_N.sum().backward()
        found.append((seen.peak_bytes, call_bytes(shape)))
    return found


def test_tracked_peak_under_tensor_and_sequence_parallelism_is_what_the_closed_form_says(ranks):
    for found in ranks.run(peaks, 2):
        for peak, form in found:
            assert 0.85 * form <= peak <= 1.01 * form


def hidden_term_sp(rank, world):
    gen = torch.Generator().manual_seed(3)
    x, t, weights = torch.randn(9, 6, generator=gen), torch.randn(9, 8, generator=gen), torch.rand(9, generator=gen)
    share = (7, 2)
    own = slice(sum(share[:rank]), sum(share[:rank + 1]))
    whole, part = HiddenTerm("cosine", 6, 8), HiddenTerm("cosine", 6, 8, sequence_parallel=True)
    x_whole, x_own = x.clone().requires_grad_(), x[own].clone().requires_grad_()
    want = whole(x_whole, t)
    got = part(x_own, t, tp_group=dist.group.WORLD, rows_per_rank=share)
    torch.testing.assert_close(part(x_own, t[own], tp_group=dist.group.WORLD, rows_per_rank=share, own_teacher_rows=True), got, rtol=0, atol=0)
    (weights * want).sum().backward()
    (weights * got).sum().backward()
    dist.all_reduce(part.projection.grad)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(x_own.grad, x_whole.grad[own])
    torch.testing.assert_close(part.projection.grad, whole.projection.grad)
    return True


def test_hidden_term_under_sequence_parallelism(ranks):
    assert ranks.run(hidden_term_sp, 2) == [True, True]

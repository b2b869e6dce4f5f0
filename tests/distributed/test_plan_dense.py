"""What the planner says of losses over full logits is what the real ones hold: ModelOpt's, Megatron-LM's, and plain PyTorch's, by tracked allocations."""

import pytest

from megatron_kd.plan.dense import dense_bytes

ROWS, COLUMNS, WIDTH, KEPT = 128, 4096, 8, 4


def modelopt(rank, world, dtype, with_ce):
    """Peak of ModelOpt's LogitsKLLoss on both models' logits, forward and backward."""
    from types import SimpleNamespace

    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from modelopt.torch.distill.plugins.megatron import LogitsKLLoss

    from megatron_kd.cli.allocations import TrackedAllocations

    group = torch.distributed.group.WORLD
    rows, head, teacher_rows, teacher_head = (torch.randn(n, WIDTH).to(getattr(torch, dtype)) for n in (ROWS, COLUMNS, ROWS, COLUMNS))
    rows.requires_grad_(), head.requires_grad_()
    loss, labels = LogitsKLLoss(SimpleNamespace(tensor_model_parallel_size=world, sequence_parallel=False)), torch.zeros(ROWS, 1).long()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_tensor_model_parallel_group", lambda *args, **kwargs: group)
        with TrackedAllocations() as seen:
            logits = (rows @ head.t())[:, None]
            ce = vocab_parallel_cross_entropy(logits, labels, tp_group=group).mean() if with_ce else 0.0
            with torch.no_grad():
                teacher_logits = (teacher_rows @ teacher_head.t())[:, None]
            (loss(logits, teacher_logits)[0].mean() + ce).backward()
    assert head.grad.any()
    return seen.peak_bytes


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("dtype, dtype_bytes, with_ce", [("bfloat16", 2, False), ("bfloat16", 2, True), ("float32", 4, False)])
def test_modelopts_loss_holds_what_the_planner_says(ranks, world, dtype, dtype_bytes, with_ce):
    form = dense_bytes("modelopt", "hidden", num_rows=ROWS, num_columns=COLUMNS, tp=world, dtype_bytes=dtype_bytes, cross_entropy=with_ce)
    for peak in ranks.run(modelopt, world, timeout_s=120, dtype=dtype, with_ce=with_ce):
        assert form <= peak <= 1.005 * form, (peak / ROWS / COLUMNS, form / ROWS / COLUMNS)


def megatron_lm(rank, world):
    """Peak of Megatron-LM's cached-logits loss beside its cross-entropy, forward and backward."""
    import torch
    from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from megatron.training.distillation.cached_logits_loss import topk_kl_div

    from megatron_kd.cli.allocations import TrackedAllocations

    group = torch.distributed.group.WORLD
    rows, head = torch.randn(ROWS, WIDTH).bfloat16().requires_grad_(), torch.randn(COLUMNS, WIDTH).bfloat16().requires_grad_()
    ids, log_probs = torch.arange(KEPT).repeat(ROWS, 1)[:, None], torch.full((ROWS, 1, KEPT), 0.05).log()
    with TrackedAllocations() as seen:
        logits = (rows @ head.t())[:, None]
        ce = vocab_parallel_cross_entropy(logits, torch.zeros(ROWS, 1).long(), tp_group=group).mean()
        kd = topk_kl_div(logits, log_probs, ids, world, rank, group, True).mean()
        del logits
        (kd + ce).backward()
    assert head.grad.any()
    return seen.peak_bytes


@pytest.mark.parametrize("world", [1, 2])
def test_megatron_lms_cached_loss_holds_what_the_planner_says(ranks, world):
    form = dense_bytes("modelopt", "top_k", num_rows=ROWS, num_columns=COLUMNS, tp=world)
    for peak in ranks.run(megatron_lm, world, timeout_s=120):
        assert form <= peak <= 1.005 * form, (peak / ROWS / COLUMNS, form / ROWS / COLUMNS)


@pytest.mark.parametrize("name, signal", [("dense", "hidden"), ("dense top-k", "top_k")])
@pytest.mark.parametrize("dtype, dtype_bytes", [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize("ce_weight", [0.0, 0.3])
def test_the_benchmarks_dense_loss_holds_what_the_planner_says(name, signal, dtype, dtype_bytes, ce_weight):
    from dataclasses import replace

    import torch

    from megatron_kd.cli.allocations import TrackedAllocations
    from megatron_kd.cli.bench_measure import Shape, make_case
    from megatron_kd.cli.bench_methods import METHODS

    case = make_case(Shape(vocab=COLUMNS, student_width=WIDTH, teacher_width=WIDTH), ROWS, top_k=KEPT, device=torch.device("cpu"), dtype=getattr(torch, dtype))
    method = next(method for method in METHODS if method.name == name)
    with TrackedAllocations() as seen:
        method.loss(replace(case, ce_weight=ce_weight)).backward()
    form = dense_bytes("dense", signal, num_rows=ROWS, num_columns=COLUMNS, dtype_bytes=dtype_bytes, cross_entropy=ce_weight > 0)
    assert form <= seen.peak_bytes <= 1.005 * form, (seen.peak_bytes / ROWS / COLUMNS, form / ROWS / COLUMNS)

"""Traffic, FLOPs, balance: against hand counts and measured bounds."""

import json
from dataclasses import replace

import pytest

from megatron_kd.errors import PlanError
from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.balance import (Rates, replicas_needed, ring_depth_needed, speed, streamed_over_colocated, student_seconds, teacher_seconds,
                                      teacher_share)
from megatron_kd.plan.flops import decoder_flops, loss_flops, student_flops
from megatron_kd.plan.gpus import gpu
from megatron_kd.plan.job import Job
from megatron_kd.plan.memory import worst
from megatron_kd.plan.models import load_model
from megatron_kd.plan.params import active_matmul_params, local_numel, stage_weights
from megatron_kd.plan.search import Candidate, Found, recommendation
from megatron_kd.plan.traffic import group_in_node, student_flows, target_traffic, teacher_flows


def job(**changes) -> Job:
    """Qwen3.5 35B-A3B into 9B, streamed: 8 student GPUs (tp 2), 2 replicas of one GPU."""
    base = Job(student=load_model("qwen3.5-9b"), teacher=load_model("qwen3.5-35b-a3b"), placement="streamed", gpu=gpu("h200-141"), seq=8192,
               global_batch=64, micro_batch=1,
               layout=ParallelLayout(tp=2, dp=4, sequence_parallel=True), teacher_layout=ParallelLayout(), teacher_replicas=2)
    return replace(base, **changes)


def flow(flows, name):
    """The flow of that name."""
    return next(entry for entry in flows if entry.name == name)


@pytest.mark.parametrize("teacher, student, hidden, logits", [("qwen3.5-35b-a3b", "qwen3.5-9b", 4096, 496_640),
                                                              ("qwen3.5-122b-a10b", "qwen3.5-9b", 6144, 496_640),
                                                              ("gpt-oss-120b", "gpt-oss-20b", 5760, 402_176)])
def test_hidden_states_cost_two_bytes_times_width_a_token_and_logits_two_times_vocabulary(teacher, student, hidden, logits):
    targets = target_traffic(job(teacher=load_model(teacher), student=load_model(student),
                                 layout=ParallelLayout(dp=8, ep=8, etp=1) if "oss" in student else job().layout,
                                 teacher_layout=ParallelLayout()))
    tokens = 64 * 8192
    assert (targets.hidden_bytes, targets.logits_bytes, targets.top_k_bytes) == (tokens * hidden, tokens * logits, tokens * 600)


def test_masked_positions_cost_nothing_on_the_wire():
    assert target_traffic(job(row_share=0.25)).hidden_bytes == target_traffic(job()).hidden_bytes / 4


def test_teacher_replicas_share_the_rows_and_send_them_over_the_network():
    one, two = (flow(teacher_flows(job(teacher_replicas=n)), "hidden states") for n in (1, 2))
    assert one.network_bytes == 2 * two.network_bytes == target_traffic(job()).hidden_bytes
    assert one.nvlink_bytes == 0


def test_tensor_parallel_bytes_equal_a_hand_count():
    # 16 micro-batches; 32 layers x 2 regions x (all-gather + reduce-scatter forward and backward, input gathered again) x half of 8192 x 4096 x 2
    got = flow(student_flows(job()), "tp")
    assert got.total_bytes == 16 * 32 * 2 * 5 * 0.5 * 8192 * 4096 * 2
    assert got.network_bytes == 0


def test_data_parallel_bytes_are_a_reduce_scatter_in_fp32_and_a_gather_in_bf16():
    here = job()
    local = local_numel(stage_weights(here.student, here.layout, 0), here.layout)
    assert flow(student_flows(here), "dp").total_bytes == local * 6 * 3 / 4
    assert flow(student_flows(replace(here, distributed_optimizer=False)), "dp").total_bytes == local * 8 * 3 / 4


def test_expert_all_to_all_leaves_the_node_only_when_the_group_does():
    model = load_model("gpt-oss-20b")
    inside = Job(student=model, teacher=model, placement="colocated", gpu=gpu("h100-80"), layout=ParallelLayout(ep=8, etp=1, dp=8), seq=4096,
                 global_batch=64)
    across = replace(inside, layout=ParallelLayout(ep=16, etp=1, dp=16))
    assert flow(student_flows(inside), "ep").network_bytes == 0
    wide = flow(student_flows(across), "ep")
    assert wide.network_bytes / wide.total_bytes == pytest.approx(8 / 15)
    assert flow(student_flows(inside), "ep").total_bytes == 8 * 24 * 4 * 4096 * 4 * 2880 * 2 * 7 / 8


def test_groups_are_cut_at_nodes_by_megatrons_rank_order():
    assert [group_in_node(8, 1, 8), group_in_node(8, 2, 8), group_in_node(4, 8, 8), group_in_node(2, 4, 8)] == [8, 4, 1, 2]


def test_decoder_flops_are_two_per_active_weight_and_attention():
    model = load_model("llama-3.1-8b")
    assert active_matmul_params(model) == 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 14336 * 4096)
    assert decoder_flops(model, 8192) == 2 * active_matmul_params(model) + 32 * 4 * 4096 * (8193 / 2)
    moe = load_model("qwen3.5-35b-a3b")
    assert 2.2e9 < active_matmul_params(moe) < 2.6e9  # A3B counts embedding and head (1.0 B) as well


def test_recompute_and_frozen_parts_change_the_flops_by_their_share():
    here = job(placement="cached")
    forward = decoder_flops(here.student, here.seq)
    assert student_flops(here) == 3 * forward and student_flops(replace(here, recompute="full")) == 4 * forward
    head = 2 * 248320
    assert loss_flops(job()) == head * (2048 + 3 * 4096)
    assert loss_flops(here) == head * 3 * 4096
    assert loss_flops(replace(here, freeze_head=True)) == head * 2 * 4096


def test_streamed_never_beats_colocated_by_flops_and_ties_when_gpus_follow_flops():
    for f in (0.05, 0.2, 0.5):
        for r in (0.01, 0.1, 0.2, 0.4, 0.7):
            ratio = streamed_over_colocated(r, f)
            assert ratio <= 1 and ratio <= (1 - r) / (1 - f) + 1e-12
        assert streamed_over_colocated(f, f) == pytest.approx(1)
    with pytest.raises(PlanError, match="shares between 0 and 1"):
        streamed_over_colocated(1.0, 0.5)


def test_time_model_gives_the_same_bound_when_nothing_else_differs():
    # no traffic, no pipeline, equal efficiency: colocated on 10 GPUs against 8 + 2
    same = Rates(dense=0.5, moe=0.5, loss=0.5)
    streamed = job(layout=ParallelLayout(dp=8), global_batch=80)
    colocated = replace(streamed, placement="colocated", layout=ParallelLayout(dp=10))
    fast = replace(streamed.gpu, nvlink_bytes_s=1e30, network_bytes_s=1e30)
    streamed, colocated = replace(streamed, gpu=fast), replace(colocated, gpu=fast)
    student = student_flops(streamed) + loss_flops(streamed)
    f = decoder_flops(streamed.teacher, streamed.seq) / (student + decoder_flops(streamed.teacher, streamed.seq))
    assert speed(streamed, same).tokens_s / speed(colocated, same).tokens_s == pytest.approx(streamed_over_colocated(0.2, f), rel=1e-6)


def test_enough_replicas_keep_the_student_from_waiting_and_one_fewer_does_not():
    rates = Rates()
    here = job(teacher=load_model("qwen3.5-122b-a10b"), teacher_layout=ParallelLayout(tp=4, ep=4, etp=1, sequence_parallel=True))
    need = replicas_needed(here, rates)
    student = student_seconds(here, rates)[0]
    assert teacher_seconds(replace(here, teacher_replicas=need), rates) <= student * (1 + 1e-9)
    assert need == 1 or teacher_seconds(replace(here, teacher_replicas=need - 1), rates) > student


def test_ring_depth_is_two_when_answers_are_fast_and_grows_with_the_queue():
    quick = Rates(student_tokens_s_gpu=1000, teacher_tokens_s_gpu=100_000)
    slow = Rates(student_tokens_s_gpu=1000, teacher_tokens_s_gpu=2100)
    assert ring_depth_needed(job(), quick) == 2
    assert ring_depth_needed(job(teacher_replicas=1), slow) > ring_depth_needed(job(teacher_replicas=4), slow) >= 2


def test_measured_run_replaces_the_assumed_efficiency(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"student_tokens_per_s_per_gpu": 5000.0, "teacher_tokens_per_s_per_gpu": 40_000.0}))
    rates = Rates.measured(str(path))
    assert student_seconds(job(), rates)[0] == pytest.approx(64 * 8192 / (5000 * 8))
    assert teacher_seconds(job(), rates) == pytest.approx(64 * 8192 / (40_000 * 2))
    path.write_text(json.dumps({"placement": "cached", "layout": "tp=2 pp=2 ep=2 etp=1 dp=3 sp", "tokens_per_s": 2400.0}))
    assert Rates.measured(str(path)).student_tokens_s_gpu == 200.0
    path.write_text(json.dumps({"placement": "colocated", "layout": "tp=1 dp=1", "tokens_per_s": 2400.0}))
    with pytest.raises(PlanError, match="tokens_per_s_per_gpu"):
        Rates.measured(str(path))


def test_gpu_hours_count_teacher_gpus_and_a_share_of_the_cache_build():
    rates = Rates(student_tokens_s_gpu=1000, teacher_tokens_s_gpu=1e9)
    streamed = speed(job(), rates)
    assert streamed.gpu_hours_per_billion == pytest.approx(1e9 / (1000 * 8) * 10 / 3600)
    slow = Rates(student_tokens_s_gpu=1000, teacher_tokens_s_gpu=1000)
    once, twice = (speed(job(placement="cached", payload="hidden"), slow, cache_epochs=n).gpu_hours_per_billion for n in (1, 2))
    alone = 1e9 / 1000 / 3600
    assert once == pytest.approx(2 * alone) and twice == pytest.approx(1.5 * alone)


def test_network_is_named_when_it_is_the_limit():
    thin = replace(gpu("h100-80"), network_bytes_s=1e6)
    assert "hidden states" in speed(job(gpu=thin), Rates(student_tokens_s_gpu=10_000, teacher_tokens_s_gpu=10_000)).network_limit
    assert speed(job(), Rates()).network_limit is None


def found(job: Job | None, hours: float = 0.0, nearest: Job | None = None) -> Found:
    """A search's result: one job that fits at `hours` per billion tokens, or none, with the one that came nearest."""
    best = () if job is None else (Candidate(job=job, memory=worst(job), speed=replace(speed(job, Rates()), gpu_hours_per_billion=hours)),)
    return Found(best=best, reasons={}, nearest=None if nearest is None else worst(nearest), nearest_job=nearest)


def test_recommendation_gives_the_bound_by_flops_or_what_the_freed_memory_buys():
    colocated, streamed = job(placement="colocated", recompute="full"), job(layout=ParallelLayout(dp=8), micro_batch=2)
    r, f = teacher_share(streamed)
    for hours in (11.0, 9.9):  # 1% is nothing that assumed efficiencies could tell
        text = recommendation({"colocated": found(colocated, 10.0), "streamed": found(streamed, hours)})
        assert text.startswith("Colocated: it fits, and by FLOPs alone streamed cannot beat it on the same number of GPUs")
        assert f"at most {streamed_over_colocated(r, f):.2f}x with {r:.0%} of the GPUs for {f:.0%} of the FLOPs" in text
    text = recommendation({"colocated": found(colocated, 20.0), "streamed": found(streamed, 10.0)})
    assert text.startswith("Streamed: 2.00x the tokens per GPU-hour of colocated, through what the freed memory buys")
    assert "(micro-batch 1 -> 2, tp 2 -> 1, recompute full -> none)" in text


def test_recommendation_where_not_everything_fits():
    none, big = found(None), job(placement="colocated", gpu=gpu("a100-40"))
    assert recommendation({"colocated": found(None, nearest=big), "streamed": found(job(), 9.0)}).startswith("Streamed: colocated does not fit (needs ")
    assert recommendation({"colocated": none, "streamed": none, "cached": found(job(placement="cached"), 9.0)}) == "Cached: it fits, and neither colocated nor streamed does."
    assert recommendation({"colocated": none, "streamed": none, "cached": none}).startswith("Nothing fits: take more GPUs")


def test_pipeline_bytes_are_the_boundary_there_and_back_for_every_chunk():
    here = job(layout=ParallelLayout(tp=2, pp=2, dp=2, sequence_parallel=True))
    boundary = 8192 * 4096 * 2 / 2
    assert flow(student_flows(here), "pp").total_bytes == here.num_micro_batches * boundary * 2
    chunked = replace(here, layout=ParallelLayout(tp=2, pp=2, dp=2, vpp=4, sequence_parallel=True))
    assert flow(student_flows(chunked), "pp").total_bytes == 4 * flow(student_flows(here), "pp").total_bytes
    assert flow(student_flows(here), "pp").network_bytes == 0 and flow(student_flows(replace(here, gpu=replace(here.gpu, gpus_per_node=4))), "pp").nvlink_bytes == 0


def test_context_parallel_bytes_are_keys_and_values_round_the_ring():
    model = load_model("llama-3.1-8b")
    here = Job(student=model, teacher=model, placement="cached", gpu=gpu("h200-141"), layout=ParallelLayout(cp=4, dp=2), seq=32768, global_batch=8)
    # 4 micro-batches x 32 layers x 3 hops x (k and v of 8 heads x 128, forward; they and their gradients backward) of 8,192 tokens
    assert flow(student_flows(here), "cp").total_bytes == 4 * 32 * 3 * 3 * 8192 * 2 * 1024 * 2

"""Memory forms: identities that a wrong formula breaks, and bytes shared with the code that allocates."""

from dataclasses import replace

import pytest

from megatron_kd.errors import PlanError, UnsupportedLayout
from megatron_kd.layout import ParallelLayout
from megatron_kd.loss.sizes import call_bytes, head_gradient_bytes
from megatron_kd.plan.activations import ActivationSpec, layer_forward_peak, layer_saved, routing_maps
from megatron_kd.plan.frontier import frontier, largest_sequence, largest_teacher
from megatron_kd.plan.gpus import MIB, gpu
from megatron_kd.plan.job import Job
from megatron_kd.plan.memory import all_stages, fits, in_flight, loss_shape, segment_loss, state_items, student_stage, teacher_stage
from megatron_kd.plan.models import from_config, known_names, load_model
from megatron_kd.plan.params import stage_kinds, stage_layers, stage_weights, total_params
from megatron_kd.plan.predict import model_config
from megatron_kd.stream.sizes import ring_bytes, staging_bytes
from tests.unit.test_plan_models import GPT_OSS, LLAMA

GIB = 2**30


def job(**changes) -> Job:
    """Llama-3.1-8B into 3.2-3B, colocated on one H200, 8K."""
    base = Job(student=load_model("llama-3.2-3b"), teacher=load_model("llama-3.1-8b"), placement="colocated", gpu=gpu("h200-141"),
               layout=ParallelLayout(), seq=8192, global_batch=8)
    return replace(base, **changes)


def item(stage, name: str) -> int:
    """Bytes of one line of a stage."""
    return sum(entry.bytes for entry in stage.items if entry.name == name)


def test_weights_of_all_ranks_add_up_to_the_model_but_for_copies():
    model = load_model("gpt-oss-20b")
    for layout in (ParallelLayout(), ParallelLayout(pp=4), ParallelLayout(dp=8, ep=8, etp=1), ParallelLayout(dp=4, ep=4, etp=1, pp=2)):
        weights = sum(state_items(stage_weights(model, layout, stage), layout, dtype_bytes=2,
                                  distributed_optimizer=False)[0].bytes for stage in range(layout.pp))
        experts = sum(w.total for w in stage_weights(model, ParallelLayout(), 0) if w.is_expert)
        assert weights == 2 * (total_params(model) - experts + experts // layout.ep)


def test_optimizer_state_shrinks_with_data_parallelism_and_experts_with_their_own():
    model = load_model("gpt-oss-20b")
    experts = sum(w.total for w in stage_weights(model, ParallelLayout(), 0) if w.is_expert)
    dense = total_params(model) - experts
    layout = ParallelLayout(dp=16, ep=8, etp=1)
    state = state_items(stage_weights(model, layout, 0), layout, dtype_bytes=2, distributed_optimizer=True)[2].bytes
    assert state == pytest.approx(12 * (dense / 16 + experts / 8 / 2), rel=1e-4)
    unsharded = state_items(stage_weights(model, layout, 0), layout, dtype_bytes=2, distributed_optimizer=False)[2].bytes
    assert unsharded == 12 * (dense + experts // 8)


def test_tied_head_is_one_tensor_on_one_stage_and_a_copy_on_the_last_of_several():
    model = load_model("llama-3.2-3b")
    assert total_params(model) == sum(w.total for w in stage_weights(model, ParallelLayout(), 0))
    both = sum(w.total for stage in range(2) for w in stage_weights(model, ParallelLayout(pp=2), stage))
    assert both == total_params(model) + model.vocab * model.hidden


def test_fused_dense_layer_keeps_34_bytes_times_hidden_like_the_published_formula():
    # Llama-3.1-8B: q = h, kv = h/4, f = 3.5 h: 4 h (norms) + q + 2 kv (RoPE outputs, v) + q (attention output) + 3 f elements of 2 bytes
    model, spec = load_model("llama-3.1-8b"), ActivationSpec(seq=8192)
    elements = 4 + 1 + 2 * 0.25 + 1 + 3 * 3.5
    assert layer_saved(model, 0, spec) == pytest.approx(2 * elements * model.hidden, rel=0.02)


def test_sequence_parallelism_divides_every_kept_tensor_and_tensor_parallelism_alone_does_not():
    model = load_model("llama-3.1-8b")
    whole = layer_saved(model, 0, ActivationSpec(seq=8192))
    split = layer_saved(model, 0, ActivationSpec(seq=8192, tp=4, sequence_parallel=True))
    partly = layer_saved(model, 0, ActivationSpec(seq=8192, tp=4))
    assert split == pytest.approx(whole / 4, rel=0.03)
    assert split + 4 * model.hidden * 2 * 0.74 < partly < whole


def test_recompute_keeps_less_in_the_order_none_selective_full():
    for name in known_names():
        model = load_model(name)
        kept = [layer_saved(model, 0, ActivationSpec(seq=4096, recompute=recompute, recompute_modules=("core_attn", "mlp", "moe")))
                for recompute in ("none", "selective", "full")]
        assert kept[0] > kept[1] > kept[2] == 2 * model.hidden, name


def test_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    layout = ParallelLayout(pp=4)
    assert [in_flight(layout, stage, 16) for stage in range(4)] == [4, 3, 2, 1]
    assert [in_flight(layout, stage, 2) for stage in range(4)] == [2, 2, 2, 1]
    assert in_flight(ParallelLayout(pp=4, vpp=2), 0, 16) == (2 * 3 + 4 + 1) / 2


def test_every_layer_is_on_one_stage_whatever_the_interleaving():
    model = load_model("qwen3.5-27b")
    for layout in (ParallelLayout(pp=4), ParallelLayout(pp=4, vpp=4), ParallelLayout()):
        layers = [layer for stage in range(layout.pp) for layer in stage_layers(model, layout, stage)]
        assert sorted(layers) == list(range(64))
        assert sum(num for stage in range(layout.pp) for _, num in stage_kinds(model, layout, stage)) == 64


def test_loss_and_ring_bytes_are_those_of_the_allocating_code():
    two = ParallelLayout(tp=2, sequence_parallel=True)
    streamed = job(placement="streamed", layout=two, teacher_layout=two, ring_depth=3)
    stage = student_stage(streamed, 0)
    assert stage.moment == "loss"
    assert sum(entry.bytes for entry in stage.items if entry.name.startswith("loss: ")) == call_bytes(loss_shape(streamed))
    assert item(stage, "head gradient scratch fp32") == head_gradient_bytes(64128, 3072) == 64128 * 3072 * 4
    assert item(stage, "ring of 3 slots") == ring_bytes(3, b=1, s=8192, hidden_size=4096, tp=2) == 3 * 4096 * 4096 * 2
    assert item(stage, "loss: teacher rows of other ranks") == (1 + 2) * 2048 * 4096 * 2, "of a window of 4096 rows, one half sent and two received"
    assert not any(entry.name == "teacher rows of the micro-batch" for entry in stage.items)
    replicated = student_stage(job(placement="streamed", layout=ParallelLayout(tp=2), teacher_layout=two), 0)
    assert item(replicated, "teacher rows of the micro-batch") == 8192 * 4096 * 2, "without sequence parallelism they are joined before the loss"
    teacher = all_stages(streamed)[-1]
    assert item(teacher, "send buffer") == staging_bytes(1, 8192, 4096, tp=2, student_tp=2)


def test_streaming_takes_the_teachers_weights_off_the_student():
    colocated, streamed = job(), job(placement="streamed")
    teacher = 2 * total_params(colocated.teacher)
    assert item(student_stage(colocated, 0), "teacher weights") == teacher
    head = colocated.student.vocab * colocated.teacher.hidden * 2
    saved = student_stage(colocated, 0).allocated - student_stage(streamed, 0).allocated
    assert saved == pytest.approx(teacher - head, rel=0.05)
    assert student_stage(job(placement="cached"), 0).allocated < student_stage(streamed, 0).allocated


def frozen(name: str, num_layers: int, config: dict | None = None, **changes):
    """Memory of a streamed teacher on one H200, sequences of 8,192: a known model's first layers, its `config` changed."""
    teacher = from_config(model_config([name, {"num_hidden_layers": num_layers, **(config or {})}]), "teacher")
    return teacher_stage(job(student=teacher, teacher=teacher, placement="streamed", **changes), 0)


def test_frozen_experts_are_planned_as_measured_on_an_h200():
    # torch.cuda.max_memory_allocated, GiB, of an 8-layer cut with TE's grouped kernel; with one product an expert 0.25 GiB more at 2 and 4 sequences.
    # Measured while every layer's token dispatcher still kept its maps; a frozen teacher gives them back after the layer.
    def kept(layers: int) -> float:
        return (layers - 1) * 8192 * routing_maps(load_model("qwen3.5-35b-a3b"), ActivationSpec(seq=8192)) / GIB

    measured = {1: 15.067, 2: 16.328, 4: 18.986}
    planned = {}
    for sequences in measured:
        stage = frozen("qwen3.5-35b-a3b", 8, micro_batch=sequences)
        planned[sequences] = (stage.allocated - item(stage, "send buffer")) / GIB + kept(8) * sequences
    assert planned == pytest.approx(measured, rel=0.005)
    assert (planned[4] - planned[2]) / 2 == pytest.approx(1.329, rel=0.005), "a sequence of 8,192"
    assert frozen("qwen3.5-35b-a3b", 40).allocated / GIB + kept(40) == pytest.approx(66.8 - 0.95, abs=0.1), "the whole teacher, its head taken off"


def test_teacher_that_ran_out_of_memory_fits_since_its_experts_are_stacked():
    stage = frozen("qwen3.5-122b-a10b", 28)
    lost_then = segment_loss(6 * MIB, 28 * 256)
    assert lost_then / GIB == pytest.approx(4.74, rel=0.02), "torch reported 4.74 GiB reserved but unallocated when each expert was a tensor"
    assert stage.fits and stage.total + lost_then > stage.capacity
    assert item(stage, "allocator segments of teacher weights") < 0.1 * GIB
    assert stage.allocated / GIB == pytest.approx(134.59, abs=0.1), "measured, with expandable segments"


@pytest.mark.parametrize("size, count, lost", [
    (1 * MIB, 2, 0), (1 * MIB, 3, 0),  # two in a segment of 2 MiB
    (1 * MIB + 512, 19, 20 * MIB - 19 * (MIB + 512)),  # the large pool: 19 in a segment of 20 MiB
    (5 * MIB, 4, 0), (6 * MIB, 3, 2 * MIB), (6 * MIB, 8, 4 * MIB), (6 * MIB, 2, 0), (8 * MIB, 4, 8 * MIB),
    (10 * MIB, 3, 0), (12 * MIB, 3, 0), (13 * MIB, 3, 3 * MIB),  # a segment each, a multiple of 2 MiB
    (3 * MIB // 4, 4, MIB), (100, 4096, 0), (100, 1, 0),
    (6 * MIB, 28 * 256, 28 * 256 // 3 * 2 * MIB),
])
def test_segments_lose_what_is_counted_by_hand(size, count, lost):
    assert segment_loss(size, count) == lost


def test_segments_count_for_frozen_weights_on_gpus_alone():
    name = "allocator segments of teacher weights"
    here = job(student=load_model("qwen3.5-4b"), teacher=load_model("qwen3.5-35b-a3b"))
    assert item(student_stage(here, 0), name) > 0
    for other in (replace(here, placement="streamed"), replace(here, placement="cached"), replace(here, kernels="torch")):
        assert not any(entry.name == name for entry in student_stage(other, 0).items)


def test_expert_matrices_of_a_layer_are_one_tensor_in_the_allocator():
    even, odd = (item(frozen("qwen3.5-35b-a3b", 4, {"num_experts": 8, "moe_intermediate_size": ffn}), "allocator segments of teacher weights") for ffn in (512, 520))
    assert odd - even == 4 * (MIB * 3 // 2 + MIB * 7 // 4), "32.5 and 16.25 MiB in segments of 34 and 18, where 32 and 16 lose nothing"


def test_experts_with_a_bias_in_fp32_or_on_other_cards_are_single_tensors_in_the_allocator():
    name = "allocator segments of teacher weights"
    whole, split = (frozen("gpt-oss-20b", 24, teacher_layout=layout) for layout in (ParallelLayout(), ParallelLayout(dp=4, ep=4, etp=1)))
    matrices = 24 * 32 * sum(-size % (2 * MIB) for size in (2 * 2880 * 2880 * 2, 2880 * 2880 * 2))
    assert item(whole, name) - item(split, name) == pytest.approx(matrices * 3 / 4, rel=0.01), "three quarters of the experts"
    bf16, fp32 = (frozen("qwen3.5-35b-a3b", 8, dtype_bytes=size) for size in (2, 4))
    assert item(fp32, name) > segment_loss(8 * MIB, 8 * 256) == 4 * GIB and item(bf16, name) < 0.1 * GIB
    assert [entry.group for entry in fp32.items if entry.name == name] == ["outside"], "not in max_memory_allocated"
    for card, stacks in {"h100-80": True, "h200-141": True, "a100-80": False, "b200": False}.items():
        lost = item(frozen("qwen3.5-122b-a10b", 28, gpu=gpu(card)), name)
        assert lost < 0.1 * GIB if stacks else lost > segment_loss(6 * MIB, 28 * 256), card


def test_all_to_all_adds_a_copy_of_the_tokens_and_a_bias_on_the_experts_two():
    qwen, oss = load_model("qwen3.5-35b-a3b"), load_model("gpt-oss-20b")
    one, two = (layer_forward_peak(qwen, 0, ActivationSpec(seq=8192, ep=ep)) for ep in (1, 2))
    assert one == 2 * (4 * 8 * 2048 + 5 * 2048) + 256 * 3 + 4 * 513 and two - one == 2 * 8 * 2048
    assert layer_forward_peak(oss, 0, ActivationSpec(seq=8192)) == 2 * (4 * (5 * 2880 + 3 * 2880) + 4 * 2880) + 32 * 3 + 4 * 65


def test_frozen_head_has_neither_scratch_nor_state():
    full, frozen = (student_stage(job(student=load_model("llama-3.1-8b"), freeze_head=freeze, distributed_optimizer=False), 0) for freeze in (False,
                                                                                                                                              True))
    head = 128256 * 4096
    assert full.allocated - frozen.allocated >= head * (4 + 12 + 4)
    assert item(frozen, "head gradient scratch fp32") == 0


def test_hidden_terms_projection_is_a_trained_weight_of_the_last_stage_where_widths_differ():
    two = ParallelLayout(pp=2)
    plain, term = (all_stages(job(placement="streamed", layout=two, teacher_layout=ParallelLayout(), distributed_optimizer=False, hidden_term=on)) for on in (False, True))
    assert [after.allocated - before.allocated for before, after in zip(plain, term)] == [0, 18 * 3072 * 4096, 0]
    same = job(student=load_model("llama-3.1-8b"))
    assert student_stage(replace(same, hidden_term=True), 0).allocated == student_stage(same, 0).allocated


def test_longest_sequence_fits_and_the_next_one_does_not():
    for placement in ("colocated", "streamed", "cached"):
        here = job(placement=placement)
        longest = largest_sequence(here)
        assert fits(replace(here, seq=longest)) and not fits(replace(here, seq=longest + 256))


def test_colocated_frontier_falls_with_sequence_and_ends_before_the_streamed_one():
    here = job(gpu=gpu("h100-80"))
    points = frontier(here, replace(here, placement="streamed"))
    sizes = [point.colocated for point in points]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > total_params(load_model("llama-3.1-8b"))
    assert any(point.colocated < total_params(load_model("llama-3.1-8b")) <= point.streamed for point in points)
    assert largest_teacher(job(seq=131072)) == 0


@pytest.mark.parametrize("changes, message", [
    (dict(layout=ParallelLayout(pp=3)), "28 layers, which must divide by pp x vpp = 3"),
    (dict(layout=ParallelLayout(tp=5, sequence_parallel=True)), "24 attention heads must divide by tp"),
    (dict(layout=ParallelLayout(ep=2, dp=2)), "a dense model has no experts"),
    (dict(seq=262144), "takes at most 131072"),
    (dict(global_batch=7, layout=ParallelLayout(dp=2)), "must divide by micro_batch x dp = 2"),
    (dict(teacher=load_model("qwen3.5-9b")), "must share one tokenizer"),
    (dict(seq=8191, layout=ParallelLayout(tp=2, sequence_parallel=True)), "must divide by 2"),
])
def test_impossible_job_is_refused_with_the_rule(changes, message):
    with pytest.raises(PlanError, match=message):
        job(**changes)


def test_layouts_that_megatron_gets_wrong_are_refused():
    qwen, oss = load_model("qwen3.5-9b"), from_config(GPT_OSS, "tiny")
    for model, layout, message in ((qwen, ParallelLayout(tp=2), "out_norm"), (oss, ParallelLayout(tp=2, sequence_parallel=True), "etp=1")):
        with pytest.raises(PlanError, match=message):
            job(student=model, teacher=model, layout=layout, seq=512)
    with pytest.raises(UnsupportedLayout):
        ParallelLayout(tp=2, ep=3)


def test_vocabulary_that_does_not_divide_is_padded_to_tp():
    tiny = from_config({**LLAMA, "vocab_size": 321, "tie_word_embeddings": False}, "odd")
    head = [w for w in stage_weights(tiny, ParallelLayout(tp=2, sequence_parallel=True), 0) if w.name == "output_layer"]
    assert head[0].numel == 322 * 64

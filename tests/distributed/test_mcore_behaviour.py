"""What attach promises around the step: resume, checkpoints, weights, extra term, broken teachers, refusals. Tiny models on the CPU runtime."""

import contextlib

import pytest

LOSS = {"kd_weight": 0.7, "ce_weight": 0.3, "temperature": 2.0}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    from tests.mcore_training import make_models

    return make_models(tmp_path_factory.mktemp("models"))


def run_of(models, **settings):
    from tests.mcore_training import Run

    return Run(**{"student": models["llama"], "teacher": models["teacher"], **settings})


def distil(rank, world, runs, loss):
    """Steps and last parameters of runs made one after the other in the same processes."""
    from tests.mcore_training import train_distilled
    from tests.megatron_cleanup import cleanup

    results = []
    for run in runs:
        recorder = train_distilled(run, world, loss=loss)
        results.append((recorder.steps, recorder.after, recorder.before))
        cleanup()
    return results


def tensors_of_checkpoint(folder):
    from torch.distributed.checkpoint import FileSystemReader

    return {name: tuple(entry.size) for name, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items() if hasattr(entry, "size")}


def load_plainly(rank, world, run, folder):
    """Weights of a checkpoint in a model without the plugin's projection, as an export builds it."""
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore.checkpoint import load_weights
    from megatron_kd.mcore.model import build_model, provider_for
    from tests.mcore_training import SEQ, quiet

    import torch

    with quiet():
        provider = provider_for(run.student, layout=ParallelLayout.for_world(world, tp=run.tp, sequence_parallel=run.sp), dtype=torch.float32, seq_length=SEQ, load_weights=False)
        chunks = build_model(provider, seed=3)
        load_weights(chunks, folder)
    return dict(chunks[0].named_parameters())


def test_resume_continues_bit_for_bit_and_the_teacher_is_not_saved(megatron_ranks, models, tmp_path):
    """With the hidden-state term, whose projection is saved and resumed, and left out by a plain load."""
    import torch

    from megatron_kd.config.schema import HiddenTermConfig

    save, loss = str(tmp_path / "checkpoints"), {**LOSS, "hidden_term": HiddenTermConfig(kind="mse", weight=0.2)}
    whole, first, second = (run_of(models, tp=2, sp=True, **settings) for settings in ({"iters": 4}, {"iters": 2, "save": save, "save_interval": 2}, {"iters": 4, "load": save}))
    results = megatron_ranks.run(distil, 2, timeout_s=150, runs=[whole, first, second], loss=loss)
    for whole_result, _, resumed in results:
        assert [step for step, _ in resumed[0]] == [step for step, _ in whole_result[0][2:]]
        assert all(torch.equal(resumed[1][name], value) for name, value in whole_result[1].items())
    saved = tensors_of_checkpoint(f"{save}/iter_0000002")
    assert saved, "the checkpoint holds no tensors"
    foreign = [name for name, size in saved.items() if (48 in size or "teacher" in name) and "kd_hidden_term" not in name]
    assert not foreign, "48 is the teacher's width, no dimension of the student"
    for loaded, (_, (_, at_save, _), _) in zip(megatron_ranks.run(load_plainly, 2, run=first, folder=save), results):
        names = {name.removeprefix("0.module."): name for name in at_save}
        assert set(names) - set(loaded) == {"kd_hidden_term.projection"}
        assert all(torch.equal(value, at_save[names[name]]) for name, value in loaded.items())


def test_uniform_weights_leave_the_mean_as_it_is_where_they_are_the_denominator(megatron_ranks, models):
    plain, light = run_of(models), run_of(models, weight=0.25)
    ((plain_steps, *_), (light_steps, *_)), = megatron_ranks.run(distil, 1, runs=[plain, light], loss={**LOSS, "denominator": "weights"})
    for (ours, norm), (reference, reference_norm) in zip(light_steps, plain_steps):
        assert norm == pytest.approx(reference_norm, rel=1e-4) and ours == pytest.approx(reference | {"kd tokens": reference["kd tokens"] / 4}, rel=1e-4)
    ((rows_steps, *_),), = megatron_ranks.run(distil, 1, runs=[light], loss=LOSS)
    assert rows_steps[0][0]["kd loss"] == pytest.approx(plain_steps[0][0]["kd loss"] / 4, rel=1e-4)
    assert rows_steps[0][0]["kd tokens"] == pytest.approx(plain_steps[0][0]["kd tokens"])


def test_hidden_term_is_the_same_in_every_layout_and_its_projection_learns(megatron_ranks, models):
    loss = {**LOSS, "hidden_term": None}
    from megatron_kd.config.schema import HiddenTermConfig

    loss["hidden_term"] = HiddenTermConfig(kind="cosine", weight=0.5)
    (alone, *_), = megatron_ranks.run(distil, 1, runs=[run_of(models)], loss=loss)[0]
    for layout in ({"tp": 2}, {"tp": 2, "sp": True}, {"pp": 2}):
        ((steps, after, before),) = megatron_ranks.run(distil, 2, runs=[run_of(models, **layout)], loss=loss)[-1]
        for (ours, norm), (reference, reference_norm) in zip(steps, alone):
            assert ours == pytest.approx(reference, rel=1e-4) and norm == pytest.approx(reference_norm, rel=1e-4), layout
        (projection,) = [name for name in after if "kd_hidden_term" in name]
        assert (after[projection] - before[projection]).abs().max() > 1e-4


def test_a_step_without_any_row_changes_nothing_and_hangs_nothing(megatron_ranks, models):
    import torch

    run = run_of(models, iters=1, pattern=("none",), distributed_optimizer=True)
    for ((_, after, before),) in megatron_ranks.run(distil, 2, runs=[run], loss=LOSS):
        assert after and all(torch.equal(after[name], value) for name, value in before.items())


def test_numbers_reach_tensorboard(megatron_ranks, models, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    ((steps, *_),), = megatron_ranks.run(distil, 1, runs=[run_of(models, tensorboard=str(tmp_path))], loss=LOSS)
    events = EventAccumulator(str(tmp_path)).Reload()
    for name in ("total loss", "kd loss", "ce loss", "kd tokens"):
        assert [event.value for event in events.Scalars(name)] == pytest.approx([numbers[name] for numbers, _ in steps])
    assert events.Scalars("megatron_kd/teacher/forwards")[-1].value == 4, "four micro-batches a step"


def failure_of(rank, world, run, loss):
    """Type and text of the error that distilling ends with."""
    from tests.mcore_training import train_distilled

    try:
        train_distilled(run, world, loss=loss)
    except Exception as e:  # noqa: BLE001 -- the test looks at it
        return type(e).__name__, str(e)
    return None, None


def test_nan_in_teacher_rows_stops_naming_source_step_and_rows(megatron_ranks, models):
    kind, text = megatron_ranks.run(failure_of, 1, run=run_of(models, teacher=models["teacher_nan"]), loss=LOSS)[0]
    assert kind == "NonFiniteTeacher"
    assert "the colocated teacher" in text and "train step 0, micro-batch" in text and "drop_rows" in text


def dropped_against_dense(rank, world, run, loss):
    from tests.mcore_training import difference, train_dense, train_distilled
    from tests.megatron_cleanup import cleanup

    ours = train_distilled(run, world, loss={**loss, "on_nonfinite": "drop_rows"})
    cleanup()
    dense = train_dense(run, world, loss=loss)
    return *difference(ours, dense), ours.steps, dense.steps


def test_drop_rows_trains_on_the_finite_rows_alone(megatron_ranks, models):
    worst, moved, ours, dense = megatron_ranks.run(dropped_against_dense, 1, run=run_of(models, teacher=models["teacher_nan"]), loss=LOSS)[0]
    assert moved > 1e-3 and worst < 2e-6
    assert ours[0][0]["total loss"] == pytest.approx(dense[0][0]["total loss"], rel=1e-5)


@contextlib.contextmanager
def shares():
    """Inside, the colocated teacher gives each rank the rows of its own positions alone, as the streamed one does under sequence parallelism."""
    from dataclasses import replace

    from megatron_kd.student.colocated import ColocatedSource
    from megatron_kd.teacher.forward import hidden_rows

    take = ColocatedSource.take
    ColocatedSource.take = lambda source, block: replace(hidden_rows(source._lm, block, gather=False), is_share=True)
    try:
        yield
    finally:
        ColocatedSource.take = take


def whole_and_shared(rank, world, runs, loss):
    """Results of `distil` with whole rows on each rank, and with shares."""
    whole = distil(rank, world, runs, loss)
    with shares():
        return whole, distil(rank, world, runs, loss)


def failure_of_shares(rank, world, run, loss):
    """As failure_of, with shares."""
    with shares():
        return failure_of(rank, world, run, loss)


def test_shares_of_teacher_rows_train_as_whole_rows_do_bit_for_bit(megatron_ranks, models):
    """Masks of every kind, micro-batches without a row, the hidden term, and broken rows that drop_rows leaves out."""
    import torch

    from megatron_kd.config.schema import HiddenTermConfig

    runs = [run_of(models, tp=2, sp=True, teacher=models["teacher_nan"], iters=2)]
    loss = {**LOSS, "on_nonfinite": "drop_rows", "hidden_term": HiddenTermConfig(kind="cosine", weight=0.5), "window_rows": 16}
    for ((whole, whole_after, before),), ((shared, shared_after, _),) in megatron_ranks.run(whole_and_shared, 2, timeout_s=120, runs=runs, loss=loss):
        assert whole == shared and all(torch.equal(shared_after[name], value) for name, value in whole_after.items())
        assert any(not torch.equal(before[name], value) for name, value in whole_after.items())
    for kind, text in megatron_ranks.run(failure_of_shares, 2, timeout_s=60, run=runs[0], loss=LOSS):
        assert kind == "NonFiniteTeacher" and "drop_rows" in text, "on every rank, whoever holds the broken rows"


REFUSED = {  # settings of cfg -> the setting that the error names
    "virtual_pipeline_model_parallel_size": {"model.pipeline_model_parallel_size": 2, "model.virtual_pipeline_model_parallel_size": 2, "model.overlap_p2p_comm": False},
    "sequence_parallel": {"model.experimental_attention_variant": "gated_delta_net", "model.tensor_model_parallel_size": 2},
    "expert_tensor_parallel_size": {"model.num_moe_experts": 4, "model.add_bias_linear": True, "model.expert_tensor_parallel_size": 2},
    "mtp_num_layers": {"model.mtp_num_layers": 1, "model.overlap_moe_expert_parallel_comm": True},
    "fp16": {"model.fp16": True},
    "cuda_graph_impl": {"model.cuda_graph_impl": "full_iteration"},
    "rerun_state_machine.rerun_mode": {"rerun_state_machine.rerun_mode": "validate_results"},
    "use_megatron_fsdp": {"dist.use_megatron_fsdp": True},
    "vocab_size": {"model.vocab_size": 133, "model.tensor_model_parallel_size": 2},
}


def refusals(rank, world, run):
    """{name: (type, text)} of attach under each of REFUSED."""
    import megatron_kd

    from tests.mcore_training import config, quiet

    results = {}
    for name, settings in REFUSED.items():
        with quiet():
            cfg = config(run, world)
        for path, value in settings.items():
            owner, attribute = path.split(".")
            setattr(getattr(cfg, owner), attribute, value)
        try:
            megatron_kd.attach(cfg, teacher=run.teacher)
            results[name] = (None, "")
        except Exception as e:  # noqa: BLE001
            results[name] = (type(e).__name__, str(e))
    return results


def test_attach_refuses_by_name_what_megatron_does_wrong(megatron_ranks, models):
    results = megatron_ranks.run(refusals, 1, run=run_of(models))[0]
    for name, (kind, text) in results.items():
        assert kind == "UnsupportedLayout", (name, kind, text)
        assert text.startswith(f"{name} = "), text


def other_failures(rank, world, run, teacher_other_heads):
    """Texts of: a forward step without our callbacks; a colocated teacher whose heads do not fit; a loss function of two values."""
    import dataclasses

    import megatron_kd
    from megatron.bridge.training.pretrain import pretrain

    from tests.mcore_training import config, quiet, train_distilled
    from tests.megatron_cleanup import cleanup

    def two_values(state, data_iterator, model):
        batch = next(data_iterator)
        return model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"]), lambda output: (output.sum(), {})

    def without_callbacks():
        with quiet():
            cfg = config(run, world)
            pretrain(cfg, megatron_kd.attach(cfg, teacher=run.teacher).forward_step)

    texts = []
    for attempt in (without_callbacks, lambda: train_distilled(dataclasses.replace(run, teacher=teacher_other_heads), world, loss=LOSS),
                    lambda: train_distilled(run, world, loss=LOSS, step=two_values)):
        try:
            attempt()
            texts.append("no error")
        except Exception as e:  # noqa: BLE001
            texts.append(f"{type(e).__name__}: {e}")
        cleanup()
    return texts


def test_wrong_use_is_named(megatron_ranks, models, tmp_path):
    import transformers as hf

    teacher = hf.LlamaForCausalLM(hf.LlamaConfig(hidden_size=48, intermediate_size=96, vocab_size=131, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3))
    teacher.save_pretrained(tmp_path / "three_heads")
    no_callbacks, heads, two = megatron_ranks.run(other_failures, 2, run=run_of(models, tp=2), teacher_other_heads=str(tmp_path / "three_heads"))[0]
    assert no_callbacks.startswith("ConfigError") and "callbacks=kd.callbacks" in no_callbacks
    assert heads.startswith("UnsupportedLayout: num_attention_heads = 3") and "tp = 2" in heads
    assert two.startswith("ConfigError") and "three values" in two

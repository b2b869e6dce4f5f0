"""`megatron-kd train` on tiny models: recipe in, losses, checkpoint, resume, summary and curve out."""

import io
import json
from pathlib import Path

import pytest

from megatron_kd.config.load import build
from megatron_kd.errors import ConfigError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "intermediate_size": 1,
    "num_hidden_layers": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A teacher twice as wide as its student, an equally wide tied one, and text."""
    from megatron_kd.convert.tiny import tiny_config, write_tiny_model

    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(tiny_config(LLAMA, num_layers=4, scale=2), folder / "teacher", seed=1)
    write_tiny_model(tiny_config(LLAMA, num_layers=2), folder / "student", seed=2)
    write_tiny_model(tiny_config(LLAMA | {"tie_word_embeddings": True}, num_layers=2), folder / "tied", seed=3)
    with (folder / "text.jsonl").open("w") as f:
        for i in range(40):
            f.write(json.dumps({"text": f"Document {i}. " + " ".join(str(j * (i + 3)) for j in range(40))}) + "\n")
    return folder


def content(models, out, **train) -> dict:
    return {
        "name": "tiny",
        "device": "cpu",
        "output_dir": str(out),
        "student": {"model": str(models / "student"), "precision": "fp32"},
        "teacher": {"model": str(models / "teacher"), "precision": "fp32"},
        "loss": {"kd_weight": 0.95, "ce_weight": 0.05},
        "data": {"kind": "text", "text": str(models / "text.jsonl"), "seq_length": 32, "held_out": 0.2},
        "train": {"iters": 4, "global_batch": 4, "micro_batch": 2, "lr": 0.003, "lr_decay": "constant", "eval_iters": 1, "tensorboard": False}
        | train,
    }


def _train(rank, world, content, overrides):
    """One rank; the history's steps and evaluations on the reporting one."""
    from megatron_kd.cli import logs
    from megatron_kd.cli.train import train

    recipe = build(content, overrides)
    with logs.to_file(Path(recipe.output_dir) / f"rank{rank}.log"):
        train(recipe, rank=rank, world=world, terminal=io.StringIO() if rank == world - 1 else None)


def records(out) -> tuple[dict, dict]:
    lines = [json.loads(line) for line in (Path(out) / "history.jsonl").read_text().splitlines()]
    steps, evaluations = ({r["step"]: (r["kd loss"], r["ce loss"]) for r in lines if r["kind"] == kind} for kind in ("step", "evaluation"))
    return steps, evaluations


def test_resumed_run_repeats_the_unbroken_one_bit_for_bit_and_keeps_its_history(megatron_ranks, models, tmp_path):
    layout = ["student.layout.tp=2", "student.layout.sequence_parallel=true"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    megatron_ranks.run(_train, 2, timeout_s=120, content=content(models, whole), overrides=layout)
    megatron_ranks.run(_train, 2, timeout_s=120, content=content(models, parts), overrides=[*layout, "train.iters=2"])
    megatron_ranks.run(_train, 2, timeout_s=120, content=content(models, parts), overrides=layout)
    steps, evaluations = records(whole)
    assert list(steps) == [0, 1, 2, 3] and list(evaluations) == [0, 4]
    resumed_steps, resumed_evaluations = records(parts)
    assert resumed_steps == steps
    assert resumed_evaluations[0] == evaluations[0] and resumed_evaluations[4] == evaluations[4]
    result = json.loads((parts / "summary.json").read_text())
    assert result["heldout_kl_after"] < result["heldout_kl_before"]
    assert result["steps"] == 4 and result["tokens"] == 4 * 4 * 32 and result["layout"] == "tp=2 dp=1 sp"
    assert 0 < result["loss_peak_bytes"] and result["loss_relative_difference"] < 1e-5
    assert (parts / "curve.png").stat().st_size > 1000


def test_pruned_student_with_adapters_learns(megatron_ranks, models, tmp_path):
    overrides = [
        f"student.model={models / 'teacher'}",
        "student.init=pruned",
        "student.prune.keep_layers=[0,3]",
        "student.lora.rank=4",
        "train.lr=0.002",
        "train.iters=12",
        "loss.ce_weight=0",
        "train.save=false",
    ]
    megatron_ranks.run(_train, 1, timeout_s=120, content=content(models, tmp_path), overrides=overrides)
    result = json.loads((tmp_path / "summary.json").read_text())
    assert result["heldout_kl_after"] < result["heldout_kl_before"]


def _configure(rank, world, content, overrides):
    """Names of frozen parameters and one overridden setting of the student that the recipe describes."""
    from megatron.core import parallel_state

    from megatron_kd.cli.prepare import prepare_models, prepare_text_of
    from megatron_kd.mcore import bridge_config

    recipe = build(content, overrides)
    models = prepare_models(recipe)
    sources = bridge_config.Sources(student=models.student, tokenizer=models.student_tokenizer, text=prepare_text_of(recipe, models))
    cfg = bridge_config.config_container(recipe, sources, world)
    if not parallel_state.is_initialized():
        cfg.model.initialize_model_parallel(seed=0)
    chunks = cfg.model.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    return [name for name, p in chunks[0].named_parameters() if not p.requires_grad], (cfg.optimizer.adam_eps, cfg.model.layernorm_epsilon)


def test_frozen_head_and_bridge_overrides_reach_the_model(megatron_ranks, models, tmp_path):
    overrides = ["student.freeze_head=true", "bridge.optimizer.adam_eps=1e-5", "bridge.model.layernorm_epsilon=1e-3"]
    frozen, settings = megatron_ranks.run(_configure, 1, content=content(models, tmp_path), overrides=overrides)[0]
    assert frozen == ["output_layer.weight"] and settings == (1e-5, 1e-3)


WRONG = [
    ("bridge.optimizer.adam_ep=1", ["bridge.optimizer.adam_ep", "no attribute", "bridge.optimizer.adam_eps"]),
    ("bridge.optimzer.lr=1", ["bridge.optimzer.lr", "bridge.optimizer"]),
    ("bridge.model.layernorm_epsilo=1", ["layernorm_epsilo", "bridge.model.layernorm_epsilon"]),
    ("student.model={models}/tied", ["student.freeze_head", "head is its embedding"]),
    ("student.model={models}/nowhere", ["student.model", "no such folder"]),
]


def _errors(rank, world, content, overrides):
    messages = []
    for override in overrides:
        try:
            _configure(rank, world, content, ["student.freeze_head=true", override])
            messages.append("")
        except ConfigError as error:
            messages.append(str(error))
    return messages


def test_wrong_setting_is_named_before_training(megatron_ranks, models, tmp_path):
    overrides = [override.format(models=models) for override, _ in WRONG]
    messages = megatron_ranks.run(_errors, 1, content=content(models, tmp_path), overrides=overrides)[0]
    for (override, words), message in zip(WRONG, messages):
        assert message and all(word in message for word in words), (override, message)

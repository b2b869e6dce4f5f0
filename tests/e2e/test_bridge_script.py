"""recipes/bridge/distill_gpt.py, a Bridge user's script with the added line, trains and saves on two ranks."""

import contextlib
import io
import runpy
from pathlib import Path

import transformers

from megatron_kd.convert.tiny import tiny_config, write_tiny_model

SCRIPT = Path(__file__).parents[2] / "recipes/bridge/distill_gpt.py"
CPU = ["mixed_precision=null", "model.bf16=false", "model.fp16=false", "optimizer.bf16=false", "dist.distributed_backend=gloo", "dist.use_gloo_process_groups=true",
       "dataset.num_workers=0", "dataset.pin_memory=false", "dataset.persistent_workers=false"]


def run_script(rank, world, student, teacher, overrides):
    """The script's main() in this process; what it printed."""
    from megatron_kd.mcore.cpu import CPU_OVERRIDES

    cpu = [f"model.{key}={str(value).lower()}" for key, value in CPU_OVERRIDES.items()] + CPU
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(str(SCRIPT), run_name="script")["main"](["--student", str(student), "--teacher", str(teacher), *cpu, *overrides])
    return text.getvalue()


def test_the_script_distils_with_bridges_own_overrides(megatron_ranks, tmp_path):
    student = write_tiny_model(tiny_config(transformers.GptOssConfig().to_dict()), tmp_path / "student", seed=1)
    teacher = write_tiny_model(tiny_config(transformers.GptOssConfig().to_dict(), scale=2), tmp_path / "teacher", seed=2)
    overrides = ["model.seq_length=32", "dataset.seq_length=32", "model.tensor_model_parallel_size=2", "model.sequence_parallel=true", "model.expert_tensor_parallel_size=1",
                 "model.expert_model_parallel_size=2", "train.train_iters=2", "train.global_batch_size=2", "validation.eval_iters=1", "validation.eval_interval=2",
                 "scheduler.lr_warmup_iters=0", "logger.log_interval=1", f"checkpoint.save={tmp_path / 'out'}", "checkpoint.save_interval=2"]
    texts = megatron_ranks.run(run_script, 2, timeout_s=120, student=student, teacher=teacher, overrides=overrides)
    assert any("kd loss" in text and "ce loss" in text for text in texts), texts[-1][-2000:]
    assert (tmp_path / "out/iter_0000002/.metadata").exists()

"""Train a student from a recipe: builds Megatron-Bridge's configuration, attaches the teacher, runs Bridge's own pretrain().

Alone for one process, or under torchrun:
    torchrun --nproc-per-node 3 -m megatron_kd train recipes/demo_smollm2.yaml train.iters=10
Each rank's output goes to OUTPUT_DIR/logs; the last rank shows progress and writes summary.json and curve.png.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path

from megatron_kd.cli import logs
from megatron_kd.cli.ports import free_port
from megatron_kd.config.check import check_world
from megatron_kd.config.load import load, to_yaml
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import KDError, MissingDependency

EXIT_STOPPED_EARLY = 75
"""The run was told to stop, saved, and can be continued (sysexits.h's EX_TEMPFAIL); launchers start it again."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Recipe, overrides, and where the logs go."""
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="for example train.lr=1e-3 student.layout.tp=2 bridge.optimizer.adam_eps=1e-5"
    )
    parser.add_argument("--output", choices=("files", "terminal"), default="files", help="where each rank's own output goes (default: OUTPUT_DIR/logs)")
    parser.add_argument("--print-config", action="store_true", help="print the recipe with every default filled in, and stop")


def run(args: argparse.Namespace) -> int:
    """Train; returns the exit code."""
    recipe = load(args.recipe, args.overrides)
    if args.print_config:
        print(to_yaml(recipe), end="")
        return 0
    rank, world = rank_and_world()
    check_world(recipe, world)
    check_loggers(recipe)
    path = Path(recipe.output_dir) / "logs" / f"train_rank{rank}.log" if args.output == "files" else None
    with logs.to_file(path) as terminal:
        try:
            train(recipe, rank=rank, world=world, terminal=terminal if rank == world - 1 else None)
        except KDError as error:
            traceback.print_exc()
            print(f"rank {rank}: {type(error).__name__}: {error}", file=terminal)
            return 1
        except Exception as error:  # noqa: BLE001 -- Megatron and torch raise anything; the log has the traceback
            traceback.print_exc()
            print(f"rank {rank}: {type(error).__name__}: {error}" + (f"\n  (traceback in {path})" if path else ""), file=terminal)
            return 1
        except SystemExit as stop:  # how Bridge ends a run early, after saving: a signal, exit_interval, exit_duration
            if stop.code not in (None, 0):
                raise
            print(f"rank {rank}: stopped early, after saving; the same command continues the run", file=terminal if rank == world - 1 else sys.stdout)
            return EXIT_STOPPED_EARLY
    return 0


def check_loggers(recipe: Recipe) -> None:
    """MissingDependency for a logging service whose package is not there: Bridge would find out on one rank, after building the models."""
    for key, package in (("wandb_project", "wandb"), ("mlflow_experiment", "mlflow")):
        if getattr(recipe.train, key) and importlib.util.find_spec(package) is None:
            raise MissingDependency(f"train.{key} = {getattr(recipe.train, key)!r}: needs the package {package}: pip install {package}")


def rank_and_world() -> tuple[int, int]:
    """torchrun's RANK and WORLD_SIZE; for a process started alone, (0, 1) and the environment that torch.distributed needs."""
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def start_runtime(recipe: Recipe) -> None:
    """The CPU runtime where the recipe asks for it, with this rank's share of the cores; on GPUs what must be set before CUDA starts.

    One hardware queue (Megatron's demand for tensor and context parallelism below Blackwell) lets kernels start in the order of their launches: a
    collective is not overtaken by the GEMM that it is to run beside, and communicators that overlap start in one order on every rank.
    Triton keeps what its autotuning chose, so that a process that starts again neither measures for minutes nor chooses otherwise.
    """
    if recipe.device == "cuda":
        os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
        if any(part is not None and part.tp * part.cp > 1 for part in (recipe.student.layout, recipe.teacher.layout)):
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    else:
        from megatron_kd.mcore import cpu

        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        cpu.install(num_threads=recipe.train.threads_per_rank or max(1, len(os.sched_getaffinity(0)) // ranks))


def train(recipe: Recipe, *, rank: int, world: int, terminal) -> None:
    """One rank of the run. `terminal`: where the reporting rank shows progress, None elsewhere."""
    from megatron_kd.cli.history import History
    from megatron_kd.cli.prepare import prepare_models, prepare_text_of
    from megatron_kd.cli.progress import ProgressCallback, Reporter

    started_s = time.monotonic()
    reporter = Reporter(terminal)
    reporter.say(f"{recipe.name}: preparing models and data, importing Megatron")
    models = prepare_models(recipe)
    start_runtime(recipe)
    from megatron_kd.mcore import bridge_config, pretraining
    from megatron_kd.student.attach import attach

    text = prepare_text_of(recipe, models)
    sources = bridge_config.Sources(student=models.student, tokenizer=None if recipe.data.kind == "mock" else models.student_tokenizer, text=text)
    cfg = bridge_config.config_container(recipe, sources, world)
    kd = attach(
        cfg,
        teacher=dataclasses.replace(
            recipe.teacher, model=models.teacher, checkpoint=None, tokenizer=models.teacher_tokenizer if text is not None else recipe.teacher.tokenizer
        ),
        loss=recipe.loss,
        stream=recipe.stream,
        cache=recipe.cache,
        per_token_loss=recipe.train.calculate_per_token_loss,
        output_dir=recipe.output_dir,
    )
    callbacks = list(kd.callbacks)
    first_step = bridge_config.checkpoint_step(recipe)
    history = None
    if terminal is not None:
        history = History.open(Path(recipe.output_dir) / "history.jsonl", first_step)
        callbacks.append(
            ProgressCallback(
                reporter,
                history,
                train_iters=recipe.train.iters,
                tokens_per_step=recipe.train.global_batch * recipe.data.seq_length,
                log_interval=recipe.train.log_interval,
                eval_iters=recipe.train.eval_iters,
                source_metrics=lambda: kd.source_metrics,
            )
        )
    reporter.say("building the models" if first_step == 0 else f"building the models, resuming after step {first_step}")
    measured = MeasureLossMemory(recipe)
    try:
        pretraining.pretrain(cfg, kd.forward_step, [pretraining.EvaluateFirst(kd, callbacks), *callbacks, measured])
    finally:
        kd.close()
    finish(recipe, history, reporter, world=world, wall_s=time.monotonic() - started_s, text=text, memory=measured.result, teacher=models.teacher)


class MeasureLossMemory:
    """Callback at the end of a CPU run: the loss's peak beside a dense one, on the last pipeline stage."""

    def __init__(self, recipe: Recipe):
        self._recipe, self.result = recipe, None

    def on_train_end(self, context) -> None:
        """Every rank of the last stage takes part."""
        recipe = self._recipe
        if recipe.device != "cpu" or recipe.loss.divergence != "forward_kl" or recipe.loss.temperature != 1.0:
            return
        from megatron_kd.cli.loss_memory import measure
        from megatron_kd.mcore.pretraining import head_shapes

        shapes = head_shapes(context.model)
        if shapes is not None:
            self.result = measure(
                num_rows=recipe.train.micro_batch * recipe.data.seq_length,
                student_width=shapes.width,
                teacher_width=shapes.width,
                vocab=shapes.vocab,
                dtype=shapes.dtype,
                kd_weight=recipe.loss.kd_weight,
                ce_weight=recipe.loss.ce_weight,
                window_rows=recipe.loss.window_rows,
                group=shapes.tp_group,
            )


def finish(recipe: Recipe, history, reporter, *, world: int, wall_s: float, text, memory, teacher: str) -> None:
    """Summary, curve and table, on the reporting rank."""
    if history is None:
        return
    from megatron_kd.cli import report

    extra = (
        {}
        if text is None
        else {
            "train_tokens_available": text.train_tokens,
            "heldout_tokens_available": text.held_out_tokens,
            "heldout_documents": text.held_out_documents,
        }
    )
    layout = recipe.student.layout.for_world(world)
    if recipe.teacher.placement == "streamed" and text is not None and (width := hidden_size(teacher)):
        extra["stream_bytes_expected"] = report.stream_bytes_expected(recipe, dp=layout.dp, teacher_width=width)
    result = report.summary(recipe, history, layout=layout.describe(), wall_s=wall_s, memory=memory, extra=extra)
    paths = report.write(Path(recipe.output_dir), result, history)
    reporter.say(report.table(result))
    reporter.say("  ".join(str(p) for p in paths))


def hidden_size(model: str) -> int | None:
    """Width of a model in a local folder; None for a hub name."""
    path = Path(model) / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return config.get("text_config", config).get("hidden_size")

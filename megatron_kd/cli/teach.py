"""Serve one teacher replica to students that stream from it: its own world, its own layout, forward only, until told to stop.

Alone for one process, or under torchrun:
    torchrun --nproc-per-node 2 -m megatron_kd teach recipes/gpt_oss_20b_smoke.yaml teacher.layout.tp=2
Students come and go; the replica looks for them at stream.rendezvous. SIGTERM and SIGINT end it after what it owes is answered.
Each rank's output goes to OUTPUT_DIR/logs.
"""

import argparse
import ctypes
import os
import signal
import socket
import traceback
from pathlib import Path

from megatron_kd.cli import logs
from megatron_kd.cli.prepare import prepare_models
from megatron_kd.cli.train import rank_and_world, start_runtime
from megatron_kd.config.load import load
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import ConfigError, KDError, rule
from megatron_kd.stream.channel import load_token, parse_address


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Recipe, overrides, the replica's name, and where the logs go."""
    parser.add_argument("recipe", help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example teacher.layout.tp=2 stream.rendezvous=10.0.0.1:29790")
    parser.add_argument("--name", help="name of this replica in messages (default: host and first process id)")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="short for stream.rendezvous=HOST:PORT")
    parser.add_argument("--output", choices=("files", "terminal"), default="files", help="where each rank's own output goes (default: OUTPUT_DIR/logs)")


def run(args: argparse.Namespace) -> int:
    """Serve; returns the exit code."""
    recipe = load(args.recipe, [*args.overrides, *([f"stream.rendezvous={args.rendezvous}"] if args.rendezvous else [])])
    rank, world = rank_and_world()
    name = args.name or f"{socket.gethostname()}-{os.environ.get('MASTER_PORT', os.getpid())}"
    path = Path(recipe.output_dir) / "logs" / f"teach_{name}_rank{rank}.log" if args.output == "files" else None
    stopped = []
    if "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # a launcher that is killed takes its ranks along (Linux), or they would serve on unseen
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(True))
    with logs.to_file(path) as terminal:
        try:
            teach(recipe, name=name, world=world, stop=lambda: bool(stopped), say=lambda text: print(text, file=terminal, flush=True))
        except Exception as error:  # noqa: BLE001 -- Megatron and torch raise anything; the log has the traceback
            traceback.print_exc()
            hint = "" if isinstance(error, KDError) or path is None else f"\n  (traceback in {path})"
            print(f"teacher {name}, rank {rank}: {type(error).__name__}: {error}{hint}", file=terminal, flush=True)
            return 1
    return 0


def teach(recipe: Recipe, *, name: str, world: int, stop, say) -> None:
    """One rank of the replica."""
    degrees = recipe.teacher.layout or recipe.student.layout
    layout = degrees.for_world(world)
    models = prepare_models(recipe)
    start_runtime(recipe)
    import torch
    import torch.distributed as dist

    from megatron_kd.mcore import model as megatron_models
    from megatron_kd.stream.nixl import NixlOutbox
    from megatron_kd.stream.spec import TeacherSpec
    from megatron_kd.teacher.identity import identify
    from megatron_kd.teacher.serve import serve

    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.teacher.precision]
    identity = identify(models.teacher, compute_fingerprint=True, context_length=recipe.teacher.context_length)
    if identity.context_length < recipe.data.seq_length:
        raise ConfigError(rule("teacher's context length", identity.context_length, f"must reach data.seq_length, {recipe.data.seq_length}", "Shorten data.seq_length"))
    if not dist.is_initialized():
        if recipe.device == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("gloo" if recipe.device == "cpu" else "nccl")
    provider = megatron_models.teacher_provider(models.teacher, layout=layout, dtype=dtype, seq_length=recipe.data.seq_length)
    (chunk,) = megatron_models.build_model(provider, seed=recipe.train.seed)
    spec = TeacherSpec(rendezvous=parse_address(recipe.stream.rendezvous), token=load_token(recipe.stream.token_file), name=name,
                       agreement=identity.agreement(recipe.stream.rows), head_digest=identity.head_digest, context_length=identity.context_length)
    lm = megatron_models.language_model(chunk)
    try:
        serve(lm, spec, NixlOutbox, stop=stop, say=say if int(os.environ["RANK"]) == 0 else lambda _: None, warm_up_length=recipe.data.seq_length)
    finally:
        dist.destroy_process_group()

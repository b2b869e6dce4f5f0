"""Checkpoints: look at one, take out a head, cut a student from a teacher, go to Megatron and back.

  megatron-kd convert info MODEL                      what a Hugging Face directory holds
  megatron-kd convert head MODEL TARGET               its output head, tied or not
  megatron-kd convert text MODEL TARGET               the language model of a multimodal checkpoint
  megatron-kd convert prune MODEL TARGET --num-layers 12 [--num-experts 64 --router-stats FILE]
  megatron-kd convert router-stats MODEL FILE --text DIR --tokens 1000000
  megatron-kd convert import MODEL TARGET             Hugging Face -> Megatron
  megatron-kd convert export TARGET --recipe RECIPE   a run's newest checkpoint -> Hugging Face
  megatron-kd convert export TARGET --checkpoint DIR --reference MODEL

import and export need the memory of one layer and a scratch file as large as the weights; export's check needs the memory of the model.
With router-stats they also run under torchrun with --tp, --pp, --ep. A target appears whole or not at all.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Column

from megatron_kd.errors import ConvertError, rule
from megatron_kd.layout import ParallelLayout

SECONDS_BETWEEN_LINES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `megatron-kd convert`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    info = actions.add_parser("info", help="what a Hugging Face directory holds")
    info.add_argument("source")
    info.add_argument("--json", action="store_true", help="as JSON")
    for name, text in (("head", "take out the output head"), ("text", "take the language model out of a multimodal checkpoint"), ("prune", "drop layers and experts"),
                       ("import", "Hugging Face -> Megatron")):
        action = actions.add_parser(name, help=text)
        action.add_argument("source"), action.add_argument("target")
        if name != "import":
            action.add_argument("--overwrite", action="store_true", help="replace an existing target (in the last moment, whole)")
        if name == "prune":
            action.add_argument("--layers", help="layers that stay: 0,1,4-7")
            action.add_argument("--num-layers", type=int, help="or: this many, evenly spaced")
            action.add_argument("--num-experts", type=int, help="experts that stay in each layer, chosen by --router-stats")
            action.add_argument("--router-stats", help="JSON of `convert router-stats`")
            action.add_argument("--experts", help="or: JSON {layer: [expert, ...]}")
        if name == "import":
            _add_layout(action, device="cpu")
            _add_scratch(action)
    stats = actions.add_parser("router-stats", help="which experts a model uses on a text")
    stats.add_argument("source"), stats.add_argument("target")
    stats.add_argument("--text", required=True, help=".txt or .jsonl file, or a folder of them")
    stats.add_argument("--tokens", type=int, default=1 << 20, help="tokens to run")
    stats.add_argument("--seq", type=int, default=2048, help="tokens a sequence")
    _add_layout(stats)
    export = actions.add_parser("export", help="Megatron -> Hugging Face")
    export.add_argument("target")
    export.add_argument("--recipe", help="the run's recipe; with key=value overrides after it")
    export.add_argument("--checkpoint", help="or: Megatron checkpoint directory")
    export.add_argument("--reference", help="with --checkpoint: Hugging Face directory with the student's config and tokenizer")
    export.add_argument("--no-check", action="store_true", help="do not compare logits with transformers")
    export.add_argument("--max-logit-error", type=float, metavar="X", help="largest difference from transformers' logits (default: see docs/convert.md)")
    export.add_argument("--overwrite", action="store_true", help="replace an existing target")
    export.add_argument("overrides", nargs="*", help="key=value for the recipe")
    _add_layout(export, device="cpu")
    _add_scratch(export)


def run(args: argparse.Namespace) -> int:
    """Run one action; returns the exit code."""
    if getattr(args, "device", None) == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before anything asks for GPUs: the CPU runtime is for machines without one
    return {"info": _info, "head": _head, "text": _prune, "prune": _prune, "import": _import, "export": _export, "router-stats": _router_stats}[args.action](args)


def layers_from_text(text: str) -> list[int]:
    """[0, 1, 4, 5, 6, 7] of "0,1,4-7". Errors: ConvertError."""
    try:
        parts = [part.partition("-") for part in text.split(",")]
        return [i for first, dash, last in parts for i in range(int(first), int(last if dash else first) + 1)]
    except ValueError as e:
        raise ConvertError(rule("--layers", text, "must be numbers and ranges with commas", "For example 0,1,4-7")) from e


def _add_layout(parser: argparse.ArgumentParser, device: str = "auto") -> None:
    for name in ("tp", "pp", "ep", "etp"):
        parser.add_argument(f"--{name}", type=int, default=1, help="parallel degree of the world that torchrun started")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="weights in the target")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default=device, help=f"where the model is built ({device})")


def _add_scratch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scratch", metavar="DIR", help="on a disk, for a file as large as the weights while this runs (beside the target)")


def _info(args: argparse.Namespace) -> int:
    from megatron_kd.convert import naming
    from megatron_kd.convert.head import find_head
    from megatron_kd.convert.hf_index import Checkpoint

    checkpoint = Checkpoint.open(args.source)
    text, head = checkpoint.text_config, find_head(checkpoint)
    facts = {"model_type": text.get("model_type"), "layers": text.get("num_hidden_layers"), "experts": naming.num_experts(text), "hidden_size": head.width,
             "vocabulary_rows": head.num_rows, "head": head.name, "tied": head.tied, "soft_cap": head.soft_cap, "logit_scale": head.logit_scale,
             "dtype": str(checkpoint.spec(head.name).dtype).removeprefix("torch."),
             "tensors": len(checkpoint.specs), "gib": round(checkpoint.num_bytes / 2**30, 3), "multimodal": naming.is_text_wrapper(checkpoint.config),
             "mtp": any(naming.MTP.match(name) for name in checkpoint.specs), "mxfp4": any(name.endswith("_blocks") for name in checkpoint.specs)}
    print(json.dumps(facts, indent=2) if args.json else "\n".join(f"{key:<16} {value}" for key, value in facts.items()))
    return 0


def _head(args: argparse.Namespace) -> int:
    from megatron_kd.convert.head import extract_head

    with _progress("head") as (progress,):
        head = extract_head(args.source, args.target, overwrite=args.overwrite, progress=progress)
    print(f"{head.name} [{head.num_rows}, {head.width}]{' (tied to the embedding)' if head.tied else ''} -> {args.target}")
    return 0


def _prune(args: argparse.Namespace) -> int:
    from megatron_kd.config.schema import PruneConfig
    from megatron_kd.convert.hf_index import Checkpoint
    from megatron_kd.convert.prune import prune

    spec = PruneConfig()
    if args.action == "prune":
        if not (args.layers or args.num_layers or args.num_experts or args.experts):
            raise ConvertError(rule("prune", args.source, "nothing to drop was named", "Give --layers, --num-layers, --num-experts or --experts"))
        spec = PruneConfig(keep_layers=layers_from_text(args.layers) if args.layers else None, num_layers=args.num_layers, num_experts=args.num_experts,
                           keep_experts=args.experts, router_statistics=args.router_stats)
    with _progress(args.action) as (progress,):
        prune(args.source, args.target, spec, overwrite=args.overwrite, progress=progress)
    before, after = Checkpoint.open(args.source), Checkpoint.open(args.target)
    print(f"{before.num_bytes / 2**30:.3f} GiB, {before.text_config['num_hidden_layers']} layers -> {after.num_bytes / 2**30:.3f} GiB, "
          f"{after.text_config['num_hidden_layers']} layers in {args.target}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from megatron_kd.convert.export import import_hf

    layout, dtype = _join_world(args)
    with _progress("convert", "write") as (converted, written):
        import_hf(args.source, args.target, layout=layout, dtype=dtype, scratch=args.scratch, progress=converted, write_progress=written)
    _say(f"{args.source} -> {args.target} ({layout.describe()})")
    return 0


def _export(args: argparse.Namespace) -> int:
    checkpoint, reference = args.checkpoint, args.reference
    if args.recipe:
        from megatron_kd.cli.prepare import prepare_models
        from megatron_kd.config.load import load

        recipe = load(args.recipe, args.overrides)
        checkpoint = checkpoint or str(Path(recipe.output_dir) / "checkpoints")
        reference = reference or prepare_models(recipe).student
        args.dtype = recipe.student.precision
    if not checkpoint or not reference:
        raise ConvertError(rule("export", args.target, "needs --recipe, or --checkpoint and --reference", "See megatron-kd convert --help"))
    from megatron_kd.convert.export import export_hf

    layout, dtype = _join_world(args)
    with _progress("read", "export") as (read, written):
        done = export_hf(checkpoint, args.target, reference=reference, layout=layout, dtype=dtype, check=not args.no_check, overwrite=args.overwrite,
                         max_logit_error=args.max_logit_error, scratch=args.scratch, progress=written, read_progress=read)
    checked = "" if done.max_logit_error is None else f", logits equal transformers' within {done.max_logit_error:.2e}"
    _say(f"{done.num_tensors} tensors, {done.num_bytes / 2**30:.3f} GiB -> {args.target}{checked}")
    return 0


def _router_stats(args: argparse.Namespace) -> int:
    import torch

    from megatron_kd.mcore import model
    from megatron_kd.mcore.groups import Groups
    from megatron_kd.mcore.router_stats import RouterStatistics, token_sequences
    from megatron_kd.rows import TokenBlock
    from megatron_kd.teacher.forward import hidden_rows

    layout, dtype = _join_world(args)
    chunks = model.build_model(model.teacher_provider(args.source, layout=layout, dtype=dtype, seq_length=args.seq), seed=0)
    dp = Groups.current().dp
    total = max(1, args.tokens // (args.seq * dp.size()))
    batches = token_sequences(args.text, args.source, seq_length=args.seq, rank=dp.rank(), num_ranks=dp.size(), limit=total)
    with RouterStatistics(chunks) as statistics, _progress("tokens") as (progress,):
        for step, tokens_s in enumerate(batches):
            tokens_bs = tokens_s[None]
            hidden_rows(model.language_model(chunks[0]), TokenBlock(tokens_bs=tokens_bs, loss_mask_bs=torch.ones(tokens_bs.shape), step=step, micro_batch=0))
            progress((step + 1) * args.seq, total * args.seq, "")
    result = statistics.result()
    if _rank() == 0:
        Path(args.target).write_text(json.dumps(result))
    _say(f"{sum(v['tokens'] for v in result.values()) // max(1, len(result))} tokens, {len(result)} MoE layers -> {args.target}")
    return 0


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _say(text: str) -> None:
    if _rank() == 0:
        print(text)


def _join_world(args: argparse.Namespace) -> tuple[ParallelLayout, object]:
    """Start torch.distributed for what torchrun started (or one process) and return (layout, dtype)."""
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")  # Megatron and its friends warn a page long about packages that this command does not need
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    on_gpu = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        from megatron_kd.mcore import cpu

        cpu.install()
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group("nccl" if on_gpu else "gloo")
        else:
            dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    layout = ParallelLayout.for_world(dist.get_world_size(), tp=args.tp, pp=args.pp, ep=args.ep, etp=args.etp, sequence_parallel=args.tp > 1)
    return layout, {"bf16": torch.bfloat16, "fp32": torch.float32}[args.dtype]


class _progress:
    """Progress over bytes (or tokens) on rank 0: a bar for each title on a terminal, a line now and then elsewhere.

    Gives a call (done, total or None, what was done last) for each title.
    """

    def __init__(self, *titles: str):
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        columns = [TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(),
                   TimeRemainingColumn(elapsed_when_finished=True), TextColumn("{task.fields[name]}", table_column=rest)]
        console = Console(stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, expand=True, disable=_rank() != 0 or not console.is_terminal)
        self._prints_lines = _rank() == 0 and not console.is_terminal
        self._titles, self._last_line_s = titles, time.monotonic()

    def __enter__(self):
        self._bar.start()
        return tuple(self._callback(title) for title in self._titles)

    def __exit__(self, *_):
        self._bar.stop()

    def _callback(self, title: str):
        task = self._bar.add_task(title, total=None, name="", start=False, visible=False)

        def call(done: int, total: int | None, name: str) -> None:
            self._bar.start_task(task)
            self._bar.update(task, completed=done, total=total, name=name, visible=True)
            if self._prints_lines and time.monotonic() - self._last_line_s > SECONDS_BETWEEN_LINES:
                self._last_line_s = time.monotonic()
                print(f"{title} {done / 2**30:.3f} of {'?' if total is None else f'{total / 2**30:.3f}'} G  {name}", file=sys.stderr, flush=True)

        return call

"""`megatron-kd COMMAND ...`, the same as `python -m megatron_kd COMMAND ...` (for `torchrun -m megatron_kd`).

Owns the list of commands and how errors reach the user. Each command is a module of this package with `add_arguments(parser)` and
`run(args) -> int`, imported only when it is asked for, so that one command does not pay for, or need, what another imports.
"""

import argparse
import importlib
import os
import sys
import traceback

import megatron_kd
from megatron_kd.errors import KDError

COMMANDS = {
    "train": "train a student from a recipe (alone or under torchrun)",
    "teach": "serve one teacher replica to students that stream from it",
    "run": "start teachers and student of a recipe on this machine and supervise them",
    "cache": "build, inspect and check a teacher's stored targets",
    "plan": "memory, traffic and replicas of a recipe before anything is rented",
    "convert": "convert, prune and export checkpoints",
    "launch": "write a Slurm script for a recipe",
    "compare": "finished runs side by side: losses, step time, stream and cache",
    "selfcheck": "check the loss on this machine and layout against its fp64 reference",
    "bench": "measure the loss against other implementations, or the ring between two processes",
}
SHORTHANDS = """with any recipe:
  --shrink              its small twin instead: tiny random models of the same kind on the CPU, made once below out/shrink
  --data DIR            read this folder of .txt or .jsonl files: data.kind=text data.text=DIR
"""
EXIT_FAILURE, EXIT_USAGE = 1, 2


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 for an error of this package, 2 for wrong usage."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] in ([], ["-h"], ["--help"]):
        print(_overview())
        return 0 if argv else EXIT_USAGE
    if argv[0] == "--version":
        print(f"megatron-kd {megatron_kd.__version__}")
        return 0
    if argv[0] not in COMMANDS:
        print(f"megatron-kd: no command {argv[0]!r}. Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return EXIT_USAGE
    try:
        command = importlib.import_module(f"megatron_kd.cli.{argv[0]}")
        if {"--shrink", "--data"} & set(argv):
            from megatron_kd.cli.shorthands import expand

            argv = expand(argv)
        parser = argparse.ArgumentParser(
            prog=f"megatron-kd {argv[0]}", description=command.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        command.add_arguments(parser)
        if any(action.dest == "recipe" for action in parser._actions):
            parser.epilog = SHORTHANDS
        return command.run(_parse(parser, argv[1:]))
    except KDError as error:
        if os.environ.get("MEGATRON_KD_TRACEBACK") == "1":
            traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return 130


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The arguments; key=value overrides may also follow an option, where argparse has closed the list of positional arguments."""
    args, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(args, "overrides") or any(part.startswith("-") or "=" not in part for part in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"megatron-kd {megatron_kd.__version__}: knowledge distillation for Megatron-Core and Megatron-Bridge",
        "",
        "usage: megatron-kd COMMAND ...   (megatron-kd COMMAND --help)",
        "",
    ]
    return "\n".join(lines + [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()])

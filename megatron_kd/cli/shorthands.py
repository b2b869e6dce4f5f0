"""Two options that every command with a recipe understands, expanded before the command sees its arguments.

  --shrink       run the recipe's small twin (tiny random models, on the CPU) instead; made once below out/shrink/NAME
  --data DIR     read this folder of .txt or .jsonl files: the same as data.kind=text data.text=DIR
"""

import os
import sys
from pathlib import Path

from megatron_kd.errors import ConfigError, rule


def expand(argv: list[str]) -> list[str]:
    """The arguments without shorthands. Errors: ConfigError where there is no recipe to apply them to."""
    if "--data" in argv:
        i = argv.index("--data")
        if i + 1 == len(argv):
            raise ConfigError(rule("--data", "nothing", "needs a folder or file", "For example --data data/train"))
        argv = [*argv[:i], *argv[i + 2:], "data.kind=text", f"data.text={argv[i + 1]}"]
    if "--shrink" not in argv:
        return argv
    recipe = next((i for i, arg in enumerate(argv) if arg.endswith((".yaml", ".yml"))), None)
    if recipe is None:
        raise ConfigError(rule("--shrink", argv[:3], "needs a recipe", "For example megatron-kd train recipes/NAME.yaml --shrink"))
    shrunk = shrunken(argv[recipe])
    return [str(shrunk.path) if i == recipe else arg for i, arg in enumerate(argv) if arg != "--shrink"]


def shrunken(recipe: str):
    """The small twin of a recipe file (convert.shrink.Shrunk), made once; rank 0 says what was dropped."""
    from megatron_kd.cli.prepare import only_one
    from megatron_kd.convert.shrink import shrink

    folder = Path("out/shrink") / Path(recipe).stem
    with only_one(folder.parent):
        shrunk = shrink(recipe, folder)
    if os.environ.get("RANK", "0") == "0":
        ranks = f"student: {shrunk.student_ranks} process(es)" + (f", teacher: {shrunk.teacher_ranks}" if shrunk.teacher_ranks else "")
        print("\n".join([f"{recipe} shrunk to {shrunk.path} ({ranks})", *(f"  dropped: {note}" for note in shrunk.notes)]), file=sys.stderr)
    return shrunk

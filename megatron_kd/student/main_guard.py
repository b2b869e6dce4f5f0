"""check_main_guard: a training script that Megatron's first save would run a second time is refused before the first step.

megatron-core starts a helper process for every checkpoint (dist_checkpointing/strategies/filesystem_async.py: get_write_results_queue), and Python's
`spawn` imports the main script there. A script that trains at its top level then trains again, as the same rank, and the job hangs or dies at its
first checkpoint. Called by attach.
"""

import ast
import multiprocessing
import sys
from pathlib import Path

from megatron_kd.errors import ConfigError, rule

WAY_OUT = 'Put what it does under `if __name__ == "__main__":`'


def check_main_guard(*, saves: bool) -> None:
    """ConfigError where the main script runs us again in a helper process, or, if the run `saves` checkpoints, would be run again."""
    main = sys.modules["__main__"]
    path = Path(getattr(main, "__file__", None) or "")
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing itself asks, while a spawned process imports its parent's main
        raise ConfigError(rule("training script", path.name, "was started again by a process that Megatron makes to save a checkpoint", WAY_OUT))
    if saves and path.is_file() and not _is_guarded(path, main):
        raise ConfigError(rule("training script", path.name, "trains at its top level, and a process that Megatron makes to save a checkpoint would run it again", WAY_OUT))


def _is_guarded(path: Path, main) -> bool:
    """Whether the top-level statement of the main script that is running now is an `if` on `__name__`; also where none is running."""
    frame = sys._getframe()
    while frame is not None and not (frame.f_globals is main.__dict__ and frame.f_code.co_name == "<module>"):
        frame = frame.f_back
    if frame is None:
        return True
    try:
        statements = ast.parse(path.read_text()).body
    except (SyntaxError, ValueError):  # not Python's source
        return True
    running = [statement for statement in statements if statement.lineno <= frame.f_lineno <= statement.end_lineno]
    return any(isinstance(statement, ast.If) and any(isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)) for statement in running)

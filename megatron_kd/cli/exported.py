"""A teacher whose weights are a Megatron checkpoint: written once as a Hugging Face folder, from which every placement then loads it.

So the student's shard of the head, the fingerprint and the vocabulary come from where they always do, and the fingerprint is the one that
the same weights have as a Hugging Face model. Called by cli/prepare.py under its lock; the export is a process of its own, because it needs
a Megatron world that the caller must not have yet.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from megatron_kd.errors import ConfigError, ConvertError, rule

LAUNCHER_PREFIXES = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Variables of a launcher, which would make the export a rank of the caller's world."""
WAY_OUT = "Write a Hugging Face folder with `megatron-kd convert export FOLDER --checkpoint DIR --reference MODEL` and give that folder"


def is_megatron_checkpoint(path: Path) -> bool:
    """Whether a folder is a Megatron checkpoint: a run's checkpoints or one iteration of them."""
    return (path / ".metadata").is_file() or (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("iter_*/.metadata"))


def exported_teacher(checkpoint: str, reference: str, root: Path, *, precision: str) -> str:
    """A Hugging Face folder under `root` with the weights of `checkpoint` (its newest iteration); `reference`: the folder that it was trained from.

    Made once for each iteration, by one process on the CPU; takes the room of its weights on disk, and as much again meanwhile. Errors: ConfigError where
    `reference` is no local folder, ConvertError where there is no finished iteration or the weights do not fit.
    """
    from megatron_kd.mcore.checkpoint import iteration_dir

    if not (Path(reference) / "config.json").is_file():
        raise ConfigError(rule("teacher.model", reference, "must be a local Hugging Face folder beside teacher.checkpoint",
                               "Download the model that the checkpoint was trained from, and give its folder"))
    iteration = iteration_dir(Path(checkpoint).expanduser().resolve())
    identity = f"{iteration} {(iteration / '.metadata').stat().st_mtime_ns} {reference} {precision}"
    target = root / f"{iteration.parent.name}_{iteration.name}_{hashlib.sha256(identity.encode()).hexdigest()[:8]}"
    if not (target / "config.json").is_file():
        command = [sys.executable, "-m", "megatron_kd", "convert", "export", str(target), "--checkpoint", str(iteration), "--reference", reference,
                   "--dtype", precision, "--no-check"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ["no output"]
            raise ConvertError(rule("teacher.checkpoint", checkpoint, f"cannot be written as a Hugging Face folder: {lines[-1]}",
                                    "Run `megatron-kd convert export` by hand and set teacher.model"))
    return str(target)

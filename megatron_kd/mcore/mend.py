"""mend: a run that was killed while Bridge described its newest checkpoint can be resumed from it.

Weights and optimizer are on disk by then. What says so is written one after another and in place (bridge/training/checkpointing.py:
train_state_finalize_fn): iter_*/train_state.pt, its copy latest_train_state.pt, a tracker in text, iter_*/run_config.yaml. A kill among them leaves a
copy that cannot be read, or a checkpoint without the layout that the loader asks for (KeyError: 'tensor_model_parallel_size'). Called by attach on
every rank, before Bridge looks; all ranks find and write the same, whole or not at all.
"""

import logging
import os
from pathlib import Path

import torch
import yaml

logger = logging.getLogger(__name__)

LATEST = "latest_train_state.pt"


def mend(folder: str | Path, cfg) -> None:
    """Make the newest finished checkpoint in `folder` one that Bridge can load; nothing to do where it is. `cfg`: this run's ConfigContainer, whose
    layout is taken for the checkpoint's where no older checkpoint of the run says it."""
    latest = Path(folder) / LATEST
    if not latest.is_file() or ((step := _step(latest)) is not None and _says_layout(_iteration(folder, step) / "run_config.yaml")):
        return
    iterations = sorted((path for path in Path(folder).glob("iter_*") if path.name.removeprefix("iter_").isdigit()), reverse=True)
    finished = [path for path in iterations if (path / ".metadata").is_file() and _step(path / "train_state.pt") is not None]
    if not finished:
        return
    if step is None:
        logger.warning("%s was cut off when the run was killed: taken from %s", latest, finished[0].name)
        _replace(latest, lambda path: path.write_bytes((finished[0] / "train_state.pt").read_bytes()))
    chosen = finished[0] if step is None else _iteration(folder, step)
    if chosen not in finished or _says_layout(chosen / "run_config.yaml"):
        return
    other = next((path for path in finished if _says_layout(path / "run_config.yaml")), None)
    logger.warning("%s/run_config.yaml was cut off when the run was killed: taken from %s", chosen, other.name if other else "this run's settings, so keep the layout")
    _replace(chosen / "run_config.yaml", lambda path: path.write_bytes((other / "run_config.yaml").read_bytes()) if other else cfg.to_yaml(str(path)))


def _iteration(folder: str | Path, step: int) -> Path:
    """Where Bridge saves that step."""
    return Path(folder) / f"iter_{step:07d}"


def _step(path: Path) -> int | None:
    """The training step that a train_state.pt holds; None where it cannot be read."""
    try:
        return int(torch.load(path, map_location="cpu", weights_only=True)["step"])
    except Exception:  # noqa: BLE001 -- whatever a cut-off file raises
        return None


def _says_layout(path: Path) -> bool:
    """Whether a run_config.yaml can be read up to what the loader asks for."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        return {"tensor_model_parallel_size", "pipeline_model_parallel_size"} <= config["model"].keys() and "checkpoint" in config
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, KeyError, AttributeError):
        return False


def _replace(path: Path, write) -> None:
    """`path` written by `write` beside it and moved into place."""
    beside = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    write(beside)
    os.replace(beside, path)

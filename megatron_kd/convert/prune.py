"""A student cut from its teacher: a Hugging Face folder with fewer layers, tensor by tensor.

Owns which tensors stay and under which name. Called by `megatron-kd train` (student.init: pruned) and `megatron-kd convert prune`.
Memory: one tensor at a time is read, one output shard is held. Width is left to ModelOpt.
"""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from megatron_kd.config.schema import PruneConfig
from megatron_kd.errors import ConvertError, rule

LAYER = re.compile(r"^(.*\blayers\.)(\d+)(\..+)$")
PER_LAYER_LISTS = ("layer_types",)
"""Configuration entries that hold one value a layer."""


def even_layers(num_layers: int, keep: int) -> list[int]:
    """`keep` of `num_layers` indices, evenly spaced, first and last included."""
    if not 1 <= keep <= num_layers:
        raise ConvertError(rule("prune.num_layers", keep, f"must be between 1 and the teacher's {num_layers} layers", "Choose fewer"))
    return [0] if keep == 1 else [round(i * (num_layers - 1) / (keep - 1)) for i in range(keep)]


def prune(source: Path, target: Path, spec: PruneConfig) -> Path:
    """Write the pruned model to `target` (which appears whole or not at all) and return it.

    Errors: ConvertError for a folder without configuration or weights, or layers that the model does not have.
    """
    config = json.loads((source / "config.json").read_text()) if (source / "config.json").is_file() else None
    files = sorted(source.glob("*.safetensors"))
    if config is None or not files:
        raise ConvertError(rule("prune", str(source), "needs config.json and *.safetensors", "Give a Hugging Face model folder"))
    text = config.get("text_config", config)
    num_layers = text["num_hidden_layers"]
    keep = list(spec.keep_layers) if spec.keep_layers is not None else even_layers(num_layers, spec.num_layers or num_layers)
    if keep[-1] >= num_layers:
        raise ConvertError(rule("prune.keep_layers", keep, f"the model has layers 0 to {num_layers - 1}", "Leave the higher ones out"))
    new_index = {old: new for new, old in enumerate(keep)}
    text["num_hidden_layers"] = len(keep)
    for name in PER_LAYER_LISTS:
        if isinstance(text.get(name), list):
            text[name] = [text[name][i] for i in keep]

    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    try:
        weight_map: dict[str, str] = {}
        for i, file in enumerate(files):
            kept = _kept_tensors(file, new_index)
            if kept:
                shard = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
                save_file(kept, work / shard, metadata={"format": "pt"})
                weight_map |= dict.fromkeys(kept, shard)
        (work / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}, indent=1))
        (work / "config.json").write_text(json.dumps(config, indent=2))
        for other in source.iterdir():
            if other.is_file() and other.suffix != ".safetensors" and not (work / other.name).exists():
                shutil.copy2(other, work / other.name)
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _kept_tensors(file: Path, new_index: dict[int, int]) -> dict:
    kept = {}
    with safe_open(file, framework="pt") as tensors:
        for name in tensors.keys():
            layer = LAYER.match(name)
            if layer is None:
                kept[name] = tensors.get_tensor(name)
            elif int(layer[2]) in new_index:
                kept[f"{layer[1]}{new_index[int(layer[2])]}{layer[3]}"] = tensors.get_tensor(name)
    return kept

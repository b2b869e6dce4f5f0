"""A student cut from its teacher: fewer layers, fewer experts, text only.

Owns which tensors stay, under which name, and what the config says then. Called by `megatron-kd train` (student.init: pruned)
and `megatron-kd convert prune`. Streams tensor by tensor; MXFP4 weights stay MXFP4. Multi-token prediction layers are dropped
with the first layer or expert (they belong to the layers that they were trained behind); width is left to ModelOpt.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_kd.config.schema import PruneConfig
from megatron_kd.convert import naming
from megatron_kd.convert.hf_index import Checkpoint, read_json
from megatron_kd.convert.writer import CheckpointWriter, Progress
from megatron_kd.errors import ConvertError, rule


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What stays."""

    layers: tuple[int, ...]
    """The teacher's layers in ascending order; the student's layer i is `layers[i]`."""
    experts: Mapping[int, tuple[int, ...]]
    """Teacher layer -> its experts that stay, ascending; empty: all of them."""
    keeps_mtp: bool
    """Whether multi-token prediction layers stay: only where nothing else goes."""


def prune(source: str | Path, target: str | Path, spec: PruneConfig, *, overwrite: bool = False, progress: Progress | None = None) -> Path:
    """Write the pruned model to `target`, which appears whole or not at all, and return it. The peak is the largest tensor kept.

    Errors: ConvertError for a damaged checkpoint, layers or experts that it does not have, or a layer pattern that Bridge cannot build.
    """
    checkpoint = Checkpoint.open(source)
    plan = make_plan(checkpoint, spec)
    kept = list(_kept_tensors(checkpoint, plan))
    num_bytes = sum(checkpoint.spec(name).num_bytes for name, _, _ in kept)
    with CheckpointWriter(target, expected_bytes=num_bytes, overwrite=overwrite, progress=progress) as writer:
        for name, new_name, rows in kept:
            writer.add(new_name, checkpoint.read(name) if rows is None else _read_rows(checkpoint, name, rows))
        writer.add_json("config.json", pruned_config(checkpoint.config, plan))
        writer.add_json("prune.json", {"source": Path(source).name, "layers": list(plan.layers), "experts": {str(k): list(v) for k, v in plan.experts.items()}})
        writer.copy_companions(checkpoint.path)
    return Path(target)


def make_plan(checkpoint: Checkpoint, spec: PruneConfig) -> PrunePlan:
    """The layers and experts that `spec` means for this model."""
    text = checkpoint.text_config
    total = text["num_hidden_layers"]
    if spec.keep_layers is not None:
        layers = tuple(spec.keep_layers)
        if layers[-1] >= total:
            raise ConvertError(rule("prune.keep_layers", list(layers), f"the model has layers 0 to {total - 1}", "Leave the higher ones out"))
    else:
        layers = even_layers(total, spec.num_layers or total, period=_pattern_period(text))
    _check_pattern(text, layers)
    experts = _experts_to_keep(text, layers, spec)
    return PrunePlan(layers=layers, experts=experts, keeps_mtp=len(layers) == total and not experts)


def even_layers(num_layers: int, keep: int, period: int = 1) -> tuple[int, ...]:
    """`keep` of `num_layers` layers, evenly spaced, first and last included; whole groups of `period` layers where at least two fit."""
    if not 1 <= keep <= num_layers:
        raise ConvertError(rule("prune.num_layers", keep, f"must be between 1 and the model's {num_layers} layers", "Choose fewer"))
    if keep % period or num_layers % period or keep == period:
        period = 1
    groups, wanted = num_layers // period, keep // period
    chosen = [0] if wanted == 1 else [round(i * (groups - 1) / (wanted - 1)) for i in range(wanted)]
    return tuple(group * period + offset for group in chosen for offset in range(period))


def pruned_config(config: dict, plan: PrunePlan) -> dict:
    """The student's config.json: text only, per-layer lists cut, counts changed."""
    text = naming.text_only_config(config)
    text = text if plan.keeps_mtp else naming.without_mtp(text)
    total = text["num_hidden_layers"]
    result = {key: [value[i] for i in plan.layers] if isinstance(value, list) and len(value) == total and _is_per_layer(key) else value for key, value in text.items()}
    result["num_hidden_layers"] = len(plan.layers)
    if plan.experts:
        key = next(key for key in naming.NUM_EXPERTS_KEYS if text.get(key))
        result[key] = len(next(iter(plan.experts.values())))
    return result


def experts_by_mass(statistics: Mapping[str, Mapping[str, Sequence[float]]], layers: Sequence[int], keep: int, measure: str = "mass") -> dict[int, tuple[int, ...]]:
    """The `keep` experts of each layer with the largest `measure` (summed gate probability); equal ones by lower number."""
    chosen = {}
    for layer in layers:
        values = (statistics.get(str(layer)) or {}).get(measure)
        if values is None:
            raise ConvertError(rule("router statistics", sorted(statistics)[:4], f"hold no `{measure}` for layer {layer}", "Gather them with the model that is pruned"))
        if keep > len(values):
            raise ConvertError(rule("prune.num_experts", keep, f"layer {layer} has {len(values)} experts", "Keep fewer"))
        best = sorted(range(len(values)), key=lambda e: (-values[e], e))[:keep]
        chosen[layer] = tuple(sorted(best))
    return chosen


def _is_per_layer(key: str) -> bool:
    return "layer" in key


def _pattern_period(text: dict) -> int:
    """Length of the shortest repeating group of layer types."""
    types = text.get("layer_types")
    if not types:
        return 1
    return next(p for p in range(1, len(types) + 1) if len(types) % p == 0 and all(types[i] == types[i % p] for i in range(len(types))))


def _check_pattern(text: dict, layers: Sequence[int]) -> None:
    pattern, types = naming.FIXED_PATTERN.get(text.get("model_type")), text.get("layer_types")
    if pattern is None or types is None:
        return
    wrong = [(i, layer) for i, layer in enumerate(layers) if types[layer] != pattern[i % len(pattern)]]
    if wrong:
        i, layer = wrong[0]
        raise ConvertError(rule("prune.keep_layers", list(layers), f"layer {layer} ({types[layer]}) would become layer {i}, where Megatron-Bridge builds "
                                f"{pattern[i % len(pattern)]} for {text['model_type']}", "Keep layers in whole pairs, or an even num_layers"))


def _experts_to_keep(text: dict, layers: Sequence[int], spec: PruneConfig) -> dict[int, tuple[int, ...]]:
    if spec.num_experts is None and spec.keep_experts is None:
        return {}
    total = naming.num_experts(text)
    if total is None:
        raise ConvertError(rule("prune.num_experts", spec.num_experts, f"{text.get('model_type')} has no experts", "Leave expert pruning out"))
    if spec.keep_experts is not None:
        lists = read_json(Path(spec.keep_experts))
        chosen = {layer: tuple(sorted(lists[str(layer)])) for layer in layers if str(layer) in lists}
    elif spec.router_statistics is not None:
        chosen = experts_by_mass(read_json(Path(spec.router_statistics)), layers, spec.num_experts)
    else:
        raise ConvertError(rule("prune.num_experts", spec.num_experts, "does not say which experts stay",
                                "Give prune.router_statistics (see `megatron-kd convert router-stats`) or prune.keep_experts"))
    _check_experts(chosen, layers, total, text.get("num_experts_per_tok", 1), spec.num_experts)
    return chosen


def _check_experts(chosen: dict[int, tuple[int, ...]], layers: Sequence[int], total: int, top_k: int, wanted: int | None) -> None:
    missing = [layer for layer in layers if layer not in chosen]
    if missing:
        raise ConvertError(rule("prune.keep_experts", sorted(chosen), f"names no experts for layers {missing}", "List every layer that stays"))
    sizes = {len(experts) for experts in chosen.values()}
    if len(sizes) != 1 or (wanted is not None and sizes != {wanted}):
        raise ConvertError(rule("prune.keep_experts", sorted(sizes), f"every layer must keep the same number{f', {wanted}' if wanted else ''}", "Make the lists equally long"))
    for layer, experts in chosen.items():
        if len(set(experts)) != len(experts) or experts[0] < 0 or experts[-1] >= total:
            raise ConvertError(rule(f"experts of layer {layer}", list(experts), f"must be distinct numbers from 0 to {total - 1}", "Correct the list"))
    if sizes.pop() < top_k:
        raise ConvertError(rule("prune.num_experts", len(chosen[layers[0]]), f"is below num_experts_per_tok = {top_k}", "Keep at least that many"))


def _kept_tensors(checkpoint: Checkpoint, plan: PrunePlan) -> Iterator[tuple[str, str, tuple[int, ...] | None]]:
    """(stored name, new name, expert rows or None for the whole tensor), layer by layer."""
    new_layer = {old: new for new, old in enumerate(plan.layers)}
    total = naming.num_experts(checkpoint.text_config)
    for stored in sorted(checkpoint.specs, key=_natural):
        name = naming.text_name(stored) if naming.is_text_wrapper(checkpoint.config) else stored
        if name is None or (naming.MTP.match(name) and not plan.keeps_mtp):
            continue
        part = naming.layer_of(name)
        if part is None:
            yield stored, name, None
        elif part.layer in new_layer:
            stem, experts = f"{part.prefix}{new_layer[part.layer]}.", plan.experts.get(part.layer)
            expert = naming.EXPERT.match(part.rest)
            if experts is None:
                yield stored, stem + part.rest, None
            elif expert is not None:
                if int(expert["expert"]) in experts:
                    yield stored, f"{stem}{expert['prefix']}{experts.index(int(expert['expert']))}{expert['rest']}", None
            elif naming.PACKED_EXPERTS.match(part.rest) or naming.ROUTER.match(part.rest):
                if checkpoint.spec(stored).shape[0] != total:
                    raise ConvertError(rule(f"shape of {stored}", checkpoint.spec(stored).shape, f"dimension 0 must be the model's {total} experts", "Check the config"))
                yield stored, stem + part.rest, experts
            else:
                yield stored, stem + part.rest, None


def _read_rows(checkpoint: Checkpoint, name: str, rows: Sequence[int]) -> torch.Tensor:
    return torch.cat([checkpoint.read(name, (row, row + 1)) for row in rows])


def _natural(name: str) -> list:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]

"""Recipe files: YAML and `key=value` overrides in, a checked Recipe out.

Owns reading, merging and the errors of both. Called by every command of the CLI. OmegaConf does the merging and the types; what it
says is translated here into ConfigError. Torch-free.
"""

import dataclasses
import difflib
import types
import typing
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_kd.config.check import check
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import ConfigError, rule


def load(path: str | Path, overrides: typing.Sequence[str] = ()) -> Recipe:
    """The recipe in `path` with `overrides` ("train.lr=1e-3") applied in order.

    Values follow YAML; `${other.key}` refers to another key. Errors: ConfigError for a file that cannot be read, an unknown key (names
    the nearest one), a value of the wrong type, a missing key, or a combination that check() refuses.
    """
    return build(read(path), overrides, source=str(path))


def read(path: str | Path) -> dict:
    """The YAML mapping in `path` as plain dicts. Errors: ConfigError."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(
            rule("recipe", str(path), f"cannot be read ({e.strerror})", "Give the path of a recipe, for example recipes/demo_smollm2.yaml")
        ) from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(rule("recipe", str(path), f"is not YAML: {' '.join(str(e).split())}", "Correct the file at that place")) from e
    if not isinstance(content, dict):
        raise ConfigError(rule("recipe", str(path), f"must be a mapping of keys, is {type(content).__name__}", "See recipes/demo_smollm2.yaml"))
    return content


def build(content: dict, overrides: typing.Sequence[str] = (), source: str = "recipe") -> Recipe:
    """A checked Recipe from plain dicts. Errors: ConfigError."""
    merged: dict = {}
    try:
        merged = OmegaConf.to_container(OmegaConf.merge(OmegaConf.create(content), _from_overrides(overrides)))
        _check_keys(merged, Recipe, "", source)
        if isinstance(merged.get("bridge"), dict):
            merged["bridge"] = _flatten(merged["bridge"])
        conf = OmegaConf.merge(OmegaConf.structured(Recipe), OmegaConf.create(merged))
        missing = sorted(OmegaConf.missing_keys(conf))
        if missing:
            raise ConfigError(rule(source, missing, "these keys have no default and are not given", f"Add them, for example {missing[0]}: ..."))
        recipe = OmegaConf.to_object(conf)
    except OmegaConfBaseException as e:
        raise ConfigError(
            rule(
                getattr(e, "full_key", None) or source,
                _value_at(merged, getattr(e, "full_key", None)),
                str(e.msg or e).splitlines()[0],
                "Correct this key in the recipe or on the command line",
            )
        ) from e
    check(recipe)
    return recipe


def to_yaml(recipe: Recipe) -> str:
    """The whole recipe with every default filled in; loads again to an equal Recipe."""
    return yaml.safe_dump(dataclasses.asdict(recipe), sort_keys=False)


def _from_overrides(overrides: typing.Sequence[str]) -> DictConfig:
    for text in overrides:
        key, equals, _ = text.partition("=")
        if not equals or not key.strip() or key != key.strip():
            raise ConfigError(rule("override", text, "must be key=value", "For example train.lr=1e-3"))
    return OmegaConf.from_dotlist(list(overrides))


def _value_at(tree: dict, key: str | None) -> object:
    """What was given under the dotted `key`, as far as the path leads."""
    value: object = tree
    for part in (key or "").split("."):
        value = value.get(part) if isinstance(value, dict) else value
    return value


def _dataclass_of(annotation: object) -> type | None:
    """The dataclass in `X` or `X | None`, else None."""
    options = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union else (annotation,)
    )
    return next((o for o in options if dataclasses.is_dataclass(o)), None)


def _all_keys(cls: type, prefix: str = "") -> list[str]:
    keys = []
    for field in dataclasses.fields(cls):
        keys.append(prefix + field.name)
        inner = _dataclass_of(field.type)
        if inner:
            keys += _all_keys(inner, f"{prefix}{field.name}.")
    return keys


def _nearest(key: str, siblings: list[str]) -> str:
    """The known dotted key that a reader most likely meant: a sibling's spelling first, then the same last word elsewhere."""
    known = _all_keys(Recipe)
    prefix, _, last = key.rpartition(".")
    close = difflib.get_close_matches(last, siblings, n=1, cutoff=0.6)
    if close:
        return f"{prefix}.{close[0]}" if prefix else close[0]
    same_word = [k for k in known if k.rpartition(".")[2] == last]
    return same_word[0] if same_word else difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]


def _check_keys(node: dict, cls: type, prefix: str, source: str) -> None:
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key, value in node.items():
        full = f"{prefix}{key}"
        if key not in fields:
            raise ConfigError(rule(full, value, f"{source} has no such key", f"Did you mean {_nearest(full, list(fields))}"))
        inner = _dataclass_of(fields[key].type)
        if inner and isinstance(value, dict):
            _check_keys(value, inner, f"{full}.", source)
        elif inner and value is not None:
            raise ConfigError(rule(full, value, "must be a section of keys", f"Its keys are {', '.join(f.name for f in dataclasses.fields(inner))}"))


def _flatten(tree: dict, prefix: str = "") -> dict:
    """{"model": {"a": 1}} and {"model.a": 1} both become {"model.a": 1}."""
    flat = {}
    for key, value in tree.items():
        full = f"{prefix}{key}"
        flat.update(_flatten(value, f"{full}.") if isinstance(value, dict) and value else {full: value})
    return flat

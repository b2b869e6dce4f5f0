"""Raw text to Megatron's indexed dataset, once: prefixes of .bin/.idx pairs for training and for evaluation.

Owns reading documents, splitting them and writing tokens. Called by `megatron-kd train`, `teach` and `cache build` (data.kind: text).
Whole documents are held out, chosen by their hash, and no paragraph of a held-out document stays in training. Two passes over the
source; memory: 24 bytes a document and 8 bytes a held-out paragraph.
"""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from megatron_kd.config.schema import DataConfig
from megatron_kd.errors import ConfigError, DataError, rule

FORMAT_VERSION = 1
PYTHON_PREFIX = "python:"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedText:
    """Two indexed datasets and what they hold."""

    folder: str
    """Where they are."""
    train_tokens: int
    """End-of-document tokens included."""
    held_out_tokens: int
    """End-of-document tokens included."""
    train_documents: int
    """Documents with at least one token."""
    held_out_documents: int
    """Documents with at least one token."""
    dropped_paragraphs: int
    """Paragraphs taken out of training because a held-out document has them too."""

    @property
    def train_prefix(self) -> str:
        """Path of the training set without .bin/.idx."""
        return f"{self.folder}/train"

    @property
    def held_out_prefix(self) -> str:
        """Path of the evaluation set without .bin/.idx."""
        return f"{self.folder}/held_out"


def prepare_text(config: DataConfig, tokenizer_dir: str, folder: Path) -> PreparedText:
    """Indexed datasets of `config.text`, made once under `folder` and found again by the hash of what they are made from.

    Errors: ConfigError where there is no text, DataError where a file is not what its name says. The caller holds a lock where several
    processes share `folder`.
    """
    key = _source_key(config, tokenizer_dir)
    target = folder.resolve() / f"text_{key}"
    manifest = target / "manifest.json"
    if manifest.is_file():
        return PreparedText(folder=str(target), **json.loads(manifest.read_text()))
    folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder, prefix=f".text_{key}."))
    try:
        counts = _write(config, tokenizer_dir, work)
        (work / "manifest.json").write_text(json.dumps(counts, indent=1))
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return PreparedText(folder=str(target), **counts)


def documents(config: DataConfig) -> Iterator[str]:
    """The texts of `config.text` in a fixed order. Errors: ConfigError, DataError."""
    count = 0
    for text in _python_documents(config.text) if config.text.startswith(PYTHON_PREFIX) else _file_documents(config):
        if config.max_documents is not None and count == config.max_documents:
            return
        count += 1
        yield text


def _python_documents(source: str) -> Iterator[str]:
    module, _, attribute = source.removeprefix(PYTHON_PREFIX).rpartition(".")
    try:
        texts = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as e:
        raise ConfigError(
            rule("data.text", source, f"cannot be loaded ({e})", "Write python:MODULE.ATTRIBUTE, for example python:pydoc_data.topics.topics")
        ) from e
    yield from (texts[name] for name in sorted(texts)) if isinstance(texts, dict) else iter(texts)


def _files(source: str) -> list[Path]:
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(rule("data.text", source, "there is no such file or folder", "Give a file, a folder of .txt or .jsonl files, or python:MODULE.ATTRIBUTE"))
    files = sorted(p for p in path.rglob("*") if p.suffix in (".txt", ".jsonl")) if path.is_dir() else [path]
    if not files or not all(f.is_file() for f in files):
        raise ConfigError(rule("data.text", source, "holds no .txt or .jsonl file", "Give a file, a folder of them, or python:MODULE.ATTRIBUTE"))
    return files


def _file_documents(config: DataConfig) -> Iterator[str]:
    for file in _files(config.text):
        if file.suffix != ".jsonl":
            yield file.read_text(encoding="utf-8")
            continue
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)[config.text_key]
                except (ValueError, KeyError, TypeError) as e:
                    raise DataError(
                        rule(
                            "data.text",
                            f"{file}:{number}",
                            f"is no JSON object with a field {config.text_key!r}",
                            "Correct the line, or set data.text_key",
                        )
                    ) from e
                yield text


def _source_key(config: DataConfig, tokenizer_dir: str) -> str:
    digest = hashlib.sha256(json.dumps([FORMAT_VERSION, config.text, config.text_key, config.held_out, config.max_documents]).encode())
    tokenizer = Path(tokenizer_dir) / "tokenizer.json"
    digest.update(tokenizer.read_bytes() if tokenizer.is_file() else str(tokenizer_dir).encode())
    if config.text.startswith(PYTHON_PREFIX):
        for text in _python_documents(config.text):
            digest.update(text.encode())
    else:
        for file in _files(config.text):
            stat = file.stat()
            digest.update(f"{file}:{stat.st_size}:{stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _paragraphs(text: str) -> list[str]:
    return [p for p in text.split("\n\n") if p.strip()]


def _paragraph_hash(paragraph: str) -> int:
    return xxhash.xxh3_64_intdigest(" ".join(paragraph.split()).encode())


def held_out_documents(config: DataConfig) -> tuple[set[int], set[int]]:
    """(indices of the held-out documents, hashes of their paragraphs): by document hash, until `held_out` of the characters is reached."""
    sizes = [(xxhash.xxh3_64_intdigest(text.encode()), i, len(text)) for i, text in enumerate(documents(config))]
    if len(sizes) < 2:
        raise ConfigError(rule("data.text", config.text, f"has {len(sizes)} document(s); one must train and one be held out", "Give more text"))
    target, chosen, taken = config.held_out * sum(size for *_, size in sizes), set(), 0
    for _, index, size in sorted(sizes):
        if taken + size <= target or not chosen:
            chosen.add(index)
            taken += size
    held = {_paragraph_hash(p) for i, text in enumerate(documents(config)) if i in chosen for p in _paragraphs(text)}
    return chosen, held


def _write(config: DataConfig, tokenizer_dir: str, work: Path) -> dict[str, int]:
    """Tokenise into `work`; the counts of PreparedText."""
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)
    if tokenizer.eos_token_id is None:
        raise ConfigError(rule("data.tokenizer", tokenizer_dir, "has no end-of-text token", "Use a tokenizer with one"))
    chosen, held = held_out_documents(config)
    names = {"train": str(work / "train"), "held_out": str(work / "held_out")}
    builders = {name: IndexedDatasetBuilder(get_bin_path(prefix), dtype=DType.optimal_dtype(len(tokenizer))) for name, prefix in names.items()}
    tokens, counts, dropped = dict.fromkeys(names, 0), dict.fromkeys(names, 0), 0
    for index, text in enumerate(documents(config)):
        part = "held_out" if index in chosen else "train"
        if part == "train":
            paragraphs = _paragraphs(text)
            kept = [p for p in paragraphs if _paragraph_hash(p) not in held]
            dropped += len(paragraphs) - len(kept)
            text = "\n\n".join(kept)
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if not ids:
            continue
        builders[part].add_document(np.array([*ids, tokenizer.eos_token_id]), [len(ids) + 1])
        tokens[part] += len(ids) + 1
        counts[part] += 1
    for name, builder in builders.items():
        builder.finalize(get_idx_path(names[name]))
    return {
        "train_tokens": tokens["train"],
        "held_out_tokens": tokens["held_out"],
        "train_documents": counts["train"],
        "held_out_documents": counts["held_out"],
        "dropped_paragraphs": dropped,
    }

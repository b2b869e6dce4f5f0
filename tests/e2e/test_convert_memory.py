"""Converting a model of some hundred MB in a process of its own: its anonymous memory grows by a few layers, not by the model.

The scratch file's pages belong to the page cache and do not count (RssAnon). Shown on a machine that seems to have GPU packages, which must not be
imported: they need a GPU.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from megatron_kd.convert.hf_index import Checkpoint
from megatron_kd.convert.mxfp4 import read_plain
from megatron_kd.convert.naming import layer_of
from megatron_kd.convert.tiny import tiny_config, write_tiny_model
from megatron_kd.convert.writer import CheckpointWriter

MODELS = {
    "llama": (transformers.LlamaConfig, dict(hidden_size=768, intermediate_size=3072, num_attention_heads=8, num_key_value_heads=4, head_dim=96), 24),
    "gpt_oss": (transformers.GptOssConfig, dict(hidden_size=512, intermediate_size=512), 56),
}
"""Config, widths and layers of some 400 MB of bf16 weights: gated dense layers, and experts packed in MXFP4 with biases and sinks."""

CONVERT = '''
import ctypes, gc, json, sys, threading
from pathlib import Path

def anonymous():
    return int(next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")).split()[1]) * 1024

def growth(command):
    """Over what is in use before it; what the C library keeps of the command before, and would use again uncounted, is given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, peak, over = anonymous(), [0], threading.Event()
    def sample():
        while not over.wait(0.003):
            peak[0] = max(peak[0], anonymous())
    thread = threading.Thread(target=sample)
    thread.start()
    assert main(command) == 0
    over.set(), thread.join()
    return peak[0] - before

if __name__ == "__main__":
    import torch
    from megatron_kd.mcore import cpu
    cpu.install()
    import megatron.bridge.training.model_load_save, transformers
    from megatron_kd.cli.main import main
    source, megatron, back = sys.argv[1:4]
    imported = growth(["convert", "import", source, megatron])
    exported = growth(["convert", "export", back, "--checkpoint", megatron, "--reference", source, "--no-check"])
    print(json.dumps({"import": imported, "export": exported}))
'''


def deep_model(name: str, folder: Path) -> Path:
    """A model of MODELS whose layers are made from two: each with its own multiple of the floats, or order of the packed experts."""
    config_class, widths, num_layers = MODELS[name]
    config = tiny_config(config_class().to_dict(), num_layers=num_layers)
    shallow = Checkpoint.open(write_tiny_model(config | widths | {key: value[:2] if key == "layer_types" else 2 for key, value in config.items()
                                                                  if key in ("layer_types", "num_hidden_layers")}, folder / "two", packed_mxfp4=name == "gpt_oss"))
    with CheckpointWriter(folder / "hf", max_shard_bytes=64 << 20) as writer:
        for key in shallow.specs:
            found, tensor = layer_of(key), shallow.read(key)
            if found is None:
                writer.add(key, tensor)
                continue
            for layer in range(found.layer, num_layers, 2):
                writer.add(f"{found.prefix}{layer}.{found.rest}", tensor * (1 + layer) if tensor.is_floating_point() else tensor.roll(layer // 2, 0))
        writer.add_json("config.json", shallow.config | {key: config[key] for key in ("layer_types", "num_hidden_layers") if key in config})
        writer.copy_companions(shallow.path)
    return folder / "hf"


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """With GPU packages that cannot be imported without a GPU, in front of all others."""
    for name in ("transformer_engine", "fla", "causal_conv1d"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").write_text("raise RuntimeError('no GPU')")
    paths = [str(tmp_path / "packages"), str(Path(__file__).parents[2])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", MODELS)
def test_import_and_export_need_the_memory_of_a_few_layers(tmp_path, environment, name):
    source = deep_model(name, tmp_path)
    script = tmp_path / "convert.py"
    script.write_text(CONVERT)
    done = subprocess.run([sys.executable, str(script), str(source), str(tmp_path / "megatron"), str(tmp_path / "back")], env=environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    grown = json.loads(done.stdout.splitlines()[-1])
    before, after = Checkpoint.open(source), Checkpoint.open(tmp_path / "back")
    print(name, after.num_bytes >> 20, "MiB of weights; anonymous memory grew by", {key: value >> 20 for key, value in grown.items()}, "MiB")
    assert 300 << 20 < after.num_bytes < 500 << 20
    for key in after.specs:
        assert torch.equal(after.read(key), read_plain(before, key).bfloat16()), key
    assert max(grown.values()) < 0.3 * after.num_bytes
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "convert.py", "hf", "megatron", "packages", "two"]

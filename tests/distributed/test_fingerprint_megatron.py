"""A teacher is the same teacher as a Hugging Face folder and as a Megatron model under any layout: one fingerprint."""

import pytest
import torch
import transformers

from megatron_kd.convert.tiny import tiny_config, write_tiny_model
from megatron_kd.fingerprint import fingerprint_hf

CONFIGS = {"llama": transformers.LlamaConfig, "qwen": transformers.Qwen3_5TextConfig, "gpt_oss": transformers.GptOssConfig}


def fingerprints(rank, world, sources, dtype):
    """Of each folder's model, loaded under TP=2 and exported through Bridge; the last time with one weight moved. Rank 0's count."""
    from megatron_kd.fingerprint import read_config, teacher_fingerprint
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore import checkpoint, model

    found = []
    for i, source in enumerate([*sources, sources[-1]]):
        config = read_config(source)
        layout = ParallelLayout.for_world(world, tp=2, etp=1, sequence_parallel=True)
        (chunk,) = chunks = model.build_model(model.teacher_provider(source, layout=layout, dtype=dtype), seed=0)
        if i == len(sources) and rank == 1:
            next(p for name, p in chunk.named_parameters() if "linear_qkv.weight" in name).data[0, 0] += 1.0
        tensors = checkpoint.hf_tensors(model.bridge_for(source, dtype), chunks, vocab_size=config["vocab_size"])
        if rank == 0:
            found.append(teacher_fingerprint(tensors, config=config, tokenizer_dir=source))
        else:
            found.append(len(list(tensors)))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_folder_and_megatron_model_have_one_fingerprint(megatron_ranks, tmp_path, dtype):
    """A padded head, a tied head beside linear attention, and experts packed in MXFP4."""
    changes = {"llama": {"vocab_size": 321, "tie_word_embeddings": False}, "qwen": {"tie_word_embeddings": True}, "gpt_oss": {}}
    configs = {name: tiny_config(CONFIGS[name]().to_dict()) | change for name, change in changes.items()}
    sources = [write_tiny_model(config, tmp_path / name, packed_mxfp4=name == "gpt_oss") for name, config in configs.items()]
    found = megatron_ranks.run(fingerprints, 2, timeout_s=80, sources=[str(source) for source in sources], dtype=dtype)[0]
    want = [fingerprint_hf(source) for source in sources]
    assert found[:-1] == want and len(set(want)) == len(want)
    assert found[-1] != want[-1], "a weight on rank 1 was moved"

"""hidden_rows of a frozen Megatron teacher are transformers' last hidden states of the asked rows, under every layout; heads are cut by token id."""

import pytest
import torch

TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def teachers(tmp_path_factory):
    """Tiny random models of each architecture: Llama (tied), GPT-OSS, Qwen3.5 dense with Gated DeltaNet."""
    import transformers as hf

    torch.manual_seed(0)
    common = dict(vocab_size=131, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
    qwen = dict(head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, max_position_embeddings=512, intermediate_size=64,
                rope_parameters=dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=[1, 1, 0], mrope_interleaved=True))
    models = {
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(intermediate_size=64, tie_word_embeddings=True, **common)),
        "gptoss": hf.GptOssForCausalLM(hf.GptOssConfig(intermediate_size=48, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
                                                       max_position_embeddings=4096 * 32, pad_token_id=0, eos_token_id=1, **common)),
        "qwen35": hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=1, **qwen, **common)),
    }
    paths = {}
    for name, model in models.items():
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                parameter.normal_(1.0 if parameter_name.endswith("linear_attn.norm.weight") or ("norm" in parameter_name and name != "qwen35") else 0.0, 0.05)
        paths[name] = str(tmp_path_factory.mktemp(name))
        model.float().save_pretrained(paths[name])
    return paths


def blocks():
    """Three micro-batches of one shape: all rows, some rows, no row."""
    from megatron_kd.rows import TokenBlock

    generator = torch.Generator().manual_seed(3)
    masks = [torch.ones(2, 24), (torch.rand(2, 24, generator=generator) < 0.5).float(), torch.zeros(2, 24)]
    return [TokenBlock(tokens_bs=torch.randint(2, 131, (2, 24), generator=generator), loss_mask_bs=mask, step=0, micro_batch=i) for i, mask in enumerate(masks)]


def rows_of(rank, world, path, layout, gather):
    """[(row ids, hidden)] of each block on this rank, or None."""
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore.model import build_model, language_model, teacher_provider
    from megatron_kd.teacher.forward import hidden_rows_many
    from tests.mcore_training import quiet

    with quiet():
        provider = teacher_provider(path, layout=ParallelLayout.for_world(world, **layout), dtype=torch.float32, seq_length=24)
        (chunk,) = build_model(provider, seed=0)
    assert not chunk.training and not any(parameter.requires_grad for parameter in chunk.parameters())
    rows = hidden_rows_many(language_model(chunk), blocks(), gather=gather)
    return None if rows is None else [(block.row_ids_N, block.hidden_NH) for block in rows]


CASES = [
    ("llama", dict(tp=2, pp=1), True),
    ("llama", dict(tp=2, sequence_parallel=True), True),
    ("llama", dict(tp=2, sequence_parallel=True), False),
    ("llama", dict(pp=2), True),
    ("gptoss", dict(tp=2, ep=2, etp=1, sequence_parallel=True), True),
    ("gptoss", dict(pp=2), True),
    ("qwen35", dict(tp=2, sequence_parallel=True), True),
    ("qwen35", dict(pp=2), True),
]


@pytest.mark.parametrize(("name", "layout", "gather"), CASES)
def test_rows_are_those_of_transformers(megatron_ranks, teachers, name, layout, gather):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(teachers[name], dtype=torch.float32).eval()
    results = [result for result in megatron_ranks.run(rows_of, 2, timeout_s=100, path=teachers[name], layout=layout, gather=gather) if result is not None]
    assert len(results) == (1 if layout.get("pp", 1) == 2 else 2)
    for index, block in enumerate(blocks()):
        with torch.no_grad():
            expected = reference.model(block.tokens_bs).last_hidden_state.reshape(-1, 32)
        for row_ids, hidden in (result[index] for result in results):
            assert bool((row_ids[1:] > row_ids[:-1]).all())
            assert hidden.shape == (row_ids.numel(), 32)
            torch.testing.assert_close(hidden, expected[row_ids], rtol=TOLERANCE, atol=TOLERANCE)
            if gather:
                assert torch.equal(row_ids, block.row_ids_N)
        if not gather:
            assert torch.equal(torch.cat([result[index][0] for result in results]).sort().values, block.row_ids_N), "the ranks' slices must join to the asked rows"


def head_of(rank, world, path, student_padded):
    """(shard from the model, shard from the checkpoint, number of true columns)."""
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore.model import build_model, language_model, teacher_provider
    from megatron_kd.mcore.teacher_head import head_of_model
    from megatron_kd.student.targets import head_from_checkpoint
    from megatron_kd.vocab import VocabSpec
    from tests.mcore_training import quiet

    with quiet():
        (chunk,) = build_model(teacher_provider(path, layout=ParallelLayout.for_world(world, tp=world), dtype=torch.float32, seq_length=24), seed=0)
    vocab = VocabSpec(true_size=131, student_padded=student_padded, teacher_padded=131, tp=world)
    weight, bias = head_of_model(language_model(chunk), vocab)
    assert bias is None
    return weight, head_from_checkpoint(path, vocab, rank, dtype=torch.float32, device=torch.device("cpu")).weight_VH, vocab.num_true(rank)


@pytest.mark.parametrize("student_padded", [132, 160], ids=["padded alike", "padded further"])
def test_the_head_lies_on_the_students_shards_by_token_id(megatron_ranks, teachers, student_padded):
    from transformers import AutoModelForCausalLM

    full = AutoModelForCausalLM.from_pretrained(teachers["llama"], dtype=torch.float32).lm_head.weight
    for rank, (from_model, from_checkpoint, num_true) in enumerate(megatron_ranks.run(head_of, 2, path=teachers["llama"], student_padded=student_padded)):
        expected = full[rank * student_padded // 2:][:num_true]
        torch.testing.assert_close(from_model[:num_true], expected)
        torch.testing.assert_close(from_checkpoint, expected)


def cut_rows(rank, world, cu_seqlens):
    """(asked row ids, row ids of this rank of cp = 2, tokens picked by output index, tokens picked by hidden index)."""
    import torch.distributed as dist

    from megatron_kd.mcore.slices import local_slice
    from megatron_kd.rows import TokenBlock
    from megatron_kd.student.selection import select_rows

    generator = torch.Generator().manual_seed(5)
    sequences = 2 if cu_seqlens is None else 1
    tokens = torch.arange(sequences * 24).view(sequences, 24)
    block = TokenBlock(tokens_bs=tokens, loss_mask_bs=(torch.rand(sequences, 24, generator=generator) < 0.6).float(), cu_seqlens=cu_seqlens, step=0, micro_batch=0)
    selection = select_rows(block, dist.group.WORLD)
    local = local_slice({"tokens": tokens}, cu_seqlens, dist.group.WORLD)["tokens"]
    return block.row_ids_N, selection.row_ids_N, local.reshape(-1)[selection.output_index_N], local.t().reshape(-1)[selection.hidden_index_N]


@pytest.mark.parametrize("cu_seqlens", [None, torch.tensor([0, 8, 24], dtype=torch.int32)], ids=["zigzag", "packed"])
def test_context_parallel_ranks_share_the_rows_by_global_id(megatron_ranks, cu_seqlens):
    """Tokens equal their row ids here, so whatever Megatron cuts must agree with the ids."""
    results = megatron_ranks.run(cut_rows, 2, cu_seqlens=cu_seqlens)
    assert torch.equal(torch.cat([ids for _, ids, *_ in results]).sort().values, results[0][0])
    for _, ids, by_output, by_hidden in results:
        assert ids.numel() and torch.equal(by_output, ids) and torch.equal(by_hidden, ids)


def test_packed_documents_are_cut_in_mirrored_chunks():
    from megatron_kd.errors import UnsupportedLayout
    from megatron_kd.mcore.slices import packed_index

    bounds = torch.tensor([0, 8, 24], dtype=torch.int32)
    assert packed_index(bounds, 0, 2).tolist() == [0, 1, 6, 7, 8, 9, 10, 11, 20, 21, 22, 23]
    assert packed_index(bounds, 1, 2).tolist() == [2, 3, 4, 5, 12, 13, 14, 15, 16, 17, 18, 19]
    with pytest.raises(UnsupportedLayout, match="6 tokens"):
        packed_index(torch.tensor([0, 6]), 0, 2)

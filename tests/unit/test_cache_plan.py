"""Which blocks a build answers, and on which lane."""

import numpy as np
import torch

from megatron_kd.cache.manifest import Manifest
from megatron_kd.cache.segments import split
from megatron_kd.cache.storage import Storage
from megatron_kd.cache.writer import CacheWriter
from megatron_kd.teacher.dump import Plan, lanes, uniforms_of
from tests import cache_samples as samples

MADE = samples.collection()


def test_lanes_share_the_blocks_and_run_equally_often():
    for num_blocks in range(9):
        for num_lanes, depth in ((1, 1), (2, 1), (3, 1), (2, 2)):
            rounds = [list(lanes(range(num_blocks), num_lanes, lane, depth)) for lane in range(num_lanes)]
            assert len({len(of_lane) for of_lane in rounds}) == 1
            answered = [block for of_lane in rounds for blocks, num_real in of_lane for block in blocks[:num_real]]
            assert sorted(answered) == list(range(num_blocks))
            assert all(len(blocks) == depth for of_lane in rounds for blocks, _ in of_lane)


def test_only_what_is_missing_is_planned_and_each_segment_once(tmp_path):
    """Stored, half stored, repeated within the block, repeated in a later block, without any asked row."""
    tokens, storage = samples.random_tokens(5, 8), Storage(str(tmp_path))
    half = (torch.arange(8) < 4)[None]
    with CacheWriter(storage, MADE) as writer:
        samples.store(writer, samples.block(tokens[:1]), MADE)
        samples.store(writer, samples.block(tokens[1:2], half), MADE)
    plan = Plan(Manifest(storage), MADE)
    mask = torch.ones(5, 8)
    mask[1], mask[4] = (torch.arange(8) >= 6), 0
    needed = plan.need(samples.block(tokens[[0, 1, 2, 2, 4]], mask))
    rows = needed.loss_mask_bs.bool()
    assert not rows[0].any() and not rows[3].any() and not rows[4].any()
    assert rows[1].tolist() == [True] * 4 + [False] * 2 + [True] * 2, "the union with what is stored"
    assert rows[2].all() and (plan.new_segments, plan.known_segments, plan.new_rows) == (2, 2, 14)
    assert plan.need(samples.block(tokens[[2, 0]])) is None


def test_draws_are_seeded_by_content_alone():
    """The same uniforms for a row whatever batch, mask and packing it comes in."""
    tokens = samples.random_tokens(3, 6)
    whole = samples.block(tokens)
    uniforms = uniforms_of(whole, whole.row_ids_N, 5)
    mask = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)) > 0.5
    some = samples.block(tokens.flip(0), mask.flip(0))
    assert torch.equal(uniforms_of(some, some.row_ids_N, 5), uniforms.view(3, 6, 5).flip(0)[mask.flip(0)])
    packed = samples.block(tokens.reshape(1, -1), cu_seqlens=[0, 6, 12, 18])
    assert torch.equal(uniforms_of(packed, packed.row_ids_N, 5), uniforms)
    assert len(np.unique(uniforms)) == uniforms.numel() and len(list(split(whole))) == 3

"""The route deals positions to context-parallel ranks exactly as Megatron-Bridge slices them, for whole and for packed sequences."""

import numpy as np
import torch


def held(rank, world, shape, bounds):
    """Row ids that Megatron's own slicing leaves on this rank."""
    import torch.distributed as dist

    from megatron_kd.mcore.slices import local_slice, row_id_grid

    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return local_slice({"row_ids": row_id_grid(shape)}, cu_seqlens, dist.group.WORLD)["row_ids"].tolist()


def test_zigzag_owners_are_megatrons_slices(megatron_ranks):
    from megatron_kd.stream.route import owners

    # two sequences; one packed sequence of unequal documents, the shortest of one position a chunk
    for shape, bounds in (((2, 16), None), ((1, 24), [0, 4, 12, 24])):
        b, s = shape
        owner = owners(s, 2, "zigzag", None if bounds is None else np.array(bounds))
        for rank, rows in enumerate(megatron_ranks.run(held, 2, shape=shape, bounds=bounds)):
            mine = np.flatnonzero(owner == rank)
            assert rows == [(i * s + mine).tolist() for i in range(b)], "and local order is ascending position"

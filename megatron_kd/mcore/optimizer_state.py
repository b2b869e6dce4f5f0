"""Counts by which Megatron saves the distributed optimizer, set right on a wrapped model before its optimizer is built.

Owns one repair of megatron-core 0.19, installed by attach through Bridge's post-wrap hook. The distributed optimizer keeps its state in buckets: parameters
begin at multiples of 64 elements and a bucket is padded to a multiple of the data-parallel size and 128. Both formats of its checkpoints go by a bucket's
`numel_unpadded`, and each misreads it:

- By bucket (the default) it must end with the bucket's last parameter. Where stages of a pipeline share the embedding (tied head, multi-token prediction), the
  bucket before it is counted up to the embedding's aligned start. If its last parameter is small (Gated DeltaNet's are), the save is refused:
  "Failed to validate global plan".
- By parameter (checkpoint.dist_ckpt_optim_fully_reshardable) parameters are cut out by offsets that count the padding of earlier buckets, out of a tensor that
  was joined without it. Every parameter behind a padded bucket is saved shifted, silently, and a resumed run continues from wrong weights and moments.

Counts change nothing but checkpoints, and the default format's stay as they were wherever it could be saved.
"""

import torch


def count_for_checkpoints(chunks: list[torch.nn.Module], *, by_parameter: bool) -> list[torch.nn.Module]:
    """Post-wrap hook. `by_parameter`: whether checkpoints will be of the fully reshardable format."""
    from megatron.core.distributed import DistributedDataParallel

    for chunk in chunks:
        if not isinstance(chunk, DistributedDataParallel) or not chunk.ddp_config.use_distributed_optimizer:
            continue
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            for bucket in buffer.buckets:
                end_of_last = max(end for _, end in bucket.param_to_index.values())
                bucket.numel_unpadded = bucket.grad_data.numel() if by_parameter else min(bucket.numel_unpadded, end_of_last)
            buffer.numel_unpadded = sum(bucket.numel_unpadded for bucket in buffer.buckets)
    return chunks

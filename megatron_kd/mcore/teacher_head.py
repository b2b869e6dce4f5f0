"""The teacher's output head on the student's vocabulary shards, by token id.

Owns cutting a head that lies in a teacher model's own shards. A head that lies in a checkpoint is read by student/targets.py. Shape letters: V
columns of this rank's shard, H the teacher's width.
"""

import torch
import torch.distributed as dist

from megatron_kd.mcore.model import head_weight
from megatron_kd.vocab import VocabSpec


def head_of_model(lm: torch.nn.Module, vocab: VocabSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(weight [V', H], bias [V'] or None): row j belongs to token `vocab.shard_range(rank)[0] + j`.

    A view of the model's own weight where student and teacher are padded alike; else one all-gather over TP at start-up and a copy.
    """
    group = lm.pg_collection.tp
    weight, bias = head_weight(lm).detach(), lm.output_layer.bias
    bias = None if bias is None else bias.detach()
    if weight.shape[0] == vocab.shard_size:
        return weight, bias
    start, end = vocab.teacher_rows(group.rank())
    return _resharded(weight, start, end, group), None if bias is None else _resharded(bias, start, end, group)


def _resharded(shard: torch.Tensor, start: int, end: int, group: dist.ProcessGroup) -> torch.Tensor:
    full = torch.empty((shard.shape[0] * group.size(), *shard.shape[1:]), dtype=shard.dtype, device=shard.device)
    dist.all_gather_into_tensor(full, shard.contiguous(), group=group)
    return full[start:end].clone()

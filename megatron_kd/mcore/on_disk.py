"""Models whose weights lie in a file instead of memory, so that converting one needs the memory of a layer.

Owns the scratch file under a CPU model's parameters, and the view of such a model that Megatron's checkpoint code reads and writes in place.
Called by checkpoint.py and convert/export.py. The kernel writes the file's pages out and takes them back as it needs memory: they count as
page cache, not as the process's own. Parameters on a GPU are left where they are.
"""

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from megatron_kd.errors import ConvertError, rule

SMALLEST_BYTES = 1 << 16
"""Parameters below this (norms, biases, sinks) stay in memory."""
ALIGNMENT_BYTES = 64


def move_to_file(chunks: Sequence[torch.nn.Module], directory: str | Path) -> Sequence[torch.nn.Module]:
    """Give every large CPU parameter zeros in one new file of `directory` as its storage; its old values are lost. Returns `chunks`.

    The file has no name, so that it is gone when the process is, however it ends. Its room is reserved at once: a disk that fills up later
    would be a SIGBUS. Errors: ConvertError where the disk is too small.
    """
    parameters = [p for chunk in chunks for p in chunk.parameters() if p.device.type == "cpu" and _num_bytes(p) >= SMALLEST_BYTES]
    if not parameters:
        return chunks
    offsets_bytes = [0]
    for parameter in parameters:
        offsets_bytes.append(offsets_bytes[-1] + math.ceil(_num_bytes(parameter) / ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, offsets_bytes[-1])
            memory = mmap.mmap(file.fileno(), offsets_bytes[-1])
    except OSError as e:
        raise ConvertError(rule("scratch space", str(directory), f"has no room for {offsets_bytes[-1] / 2**30:.2f} GiB of weights: {e.strerror}",
                                "Free space, or name another directory with --scratch; the target is as it was before")) from e
    for parameter, offset in zip(parameters, offsets_bytes):
        parameter.data = torch.frombuffer(memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset).view(parameter.shape)
    return chunks


@contextlib.contextmanager
def in_place(chunks: Sequence[torch.nn.Module]) -> Iterator[list]:
    """While open, the sharded state dicts of CPU chunks name the parameters' own memory, with nothing left to split, copy or merge.

    Megatron splits a gated layer's weight into two tensors; before it writes, it copies every such view, and after it read, it joins
    all pairs: most of a model each time. Here each view is a tensor with a storage of its own over the same memory, which is written without
    a copy, and a checkpoint that was read is in the model. Yields a list that fills with the ShardedTensors handed out; without CPU chunks it
    stays empty, and nothing is changed.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    handed_out = []

    def wrap(chunk):
        upstream = chunk.sharded_state_dict
        own = {t.untyped_storage().data_ptr() for t in chunk.state_dict(keep_vars=True).values() if torch.is_tensor(t)}

        def sharded_state_dict(*args, **kwargs):
            result = upstream(*args, **kwargs)
            apply_factories(result)
            for sharded in nested_values(result):
                if isinstance(sharded, ShardedTensor):
                    assert sharded.data.untyped_storage().data_ptr() in own, f"{sharded.key} is a copy of the model's weight"
                    sharded.data = _with_own_storage(sharded.data.detach())
                    handed_out.append(sharded)
            return result

        chunk.sharded_state_dict = sharded_state_dict

    wrapped = [chunk for chunk in chunks if next(chunk.parameters()).device.type == "cpu"]
    for chunk in wrapped:
        wrap(chunk)
    try:
        yield handed_out
    finally:
        for chunk in wrapped:
            del chunk.sharded_state_dict


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor whose storage is just it. Errors: AssertionError where the tensor has gaps."""
    assert tensor.is_contiguous(), "a shard of a weight is a block of it"
    return torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy()).view(tensor.dtype).view(tensor.shape)


def _num_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()

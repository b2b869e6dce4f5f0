"""Whole models between Hugging Face and Megatron: import a directory as a Megatron checkpoint, export a distilled one back.

Owns the two directions and the parity check. Called by the CLI on every rank of one world (one process, or under torchrun with
a layout). Weights stream tensor by tensor between the two formats. On a CPU the model between them is spread over the ranks and lies in an
unnamed scratch file of each (mcore/on_disk.py); on a GPU it lies in its memory.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_kd.convert import mxfp4, naming
from megatron_kd.convert.hf_index import Checkpoint, read_json
from megatron_kd.convert.writer import CheckpointWriter, Progress, check_room, check_target, whole_directory
from megatron_kd.errors import ConvertError, rule
from megatron_kd.layout import ParallelLayout

PARITY_TOKENS = (2, 32)
"""[b, s] of the parity check's random ids; s divides by every tensor-parallel degree up to 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What an export wrote."""

    num_tensors: int
    """Tensors in the target."""
    num_bytes: int
    """Their bytes."""
    max_logit_error: float | None
    """|Megatron - transformers| over random tokens as `_check_parity` takes it; None where the check was switched off or runs on another rank."""


def import_hf(source: str | Path, target: str | Path, *, layout: ParallelLayout, dtype: torch.dtype = torch.bfloat16,
              scratch: str | Path | None = None, progress: Progress | None = None, write_progress: Progress | None = None) -> Path:
    """Write the Hugging Face model `source` as a Megatron checkpoint in `target`. Collective.

    `scratch`: directory for this process's share of the weights on the way (None: beside the target). `progress` counts the bytes converted,
    `write_progress` those written. Errors: ConvertError where source is damaged (found before the model is built), the target is not empty or a
    disk is full; the target is then as it was.
    """
    from megatron_kd.mcore import checkpoint, model

    read = Checkpoint.open(source)
    check_target(target, overwrite=False)
    scratch = _checked_scratch(target, scratch, _plain_size(read, dtype)[1])
    provider = _weightless_provider(source, layout, dtype, scratch)
    bridge = model.bridge_for(source, dtype)
    provider.register_pre_wrap_hook(lambda chunks: checkpoint.load_hf_weights(bridge, chunks, progress))
    chunks = model.build_model(provider, seed=0, stack_experts=False)
    with _whole_checkpoint(target) as partial:
        checkpoint.save_weights(chunks, partial, tokenizer=source, progress=write_progress)
    return Path(target)


def export_hf(checkpoint_dir: str | Path, target: str | Path, *, reference: str | Path, layout: ParallelLayout, dtype: torch.dtype = torch.bfloat16,
              max_logit_error: float | None = None, check: bool = True, overwrite: bool = False, scratch: str | Path | None = None,
              progress: Progress | None = None, read_progress: Progress | None = None) -> Exported:
    """Write a Megatron checkpoint as a Hugging Face directory that transformers loads. Collective; rank 0 writes.

    `reference`: directory with the student's config.json and tokenizer (the model it was started from). With `check`, transformers
    loads the result before it is moved into place and must give the same logits; `max_logit_error` None means 1e-4 in fp32 for every
    token, and four bf16 roundings of the largest logit for the median token in bf16; the check needs the memory of the whole result on rank 0.
    `scratch`: directory for this process's share of the weights on the way (None: beside the target). `read_progress` counts the bytes read
    from the checkpoint, `progress` those written. Errors: ConvertError; the target is then as it was.
    """
    from megatron_kd.mcore import checkpoint, model

    check_target(target, overwrite)
    config = naming.text_only_config(read_json(Path(reference) / "config.json"))
    saved = checkpoint.run_config(checkpoint_dir).get("model", {})
    mtp_layers = saved.get("mtp_num_layers") or None
    expected_tensors, expected_bytes = _expected_size(reference, dtype, mtp_layers)
    scratch = _checked_scratch(target, scratch, expected_bytes or 0)
    chunks = _trained_model(checkpoint_dir, reference, layout, dtype, mtp_layers, scratch, read_progress)
    tokens_bs = torch.randint(0, config["vocab_size"], PARITY_TOKENS, generator=torch.Generator().manual_seed(0))
    ours_bsV = _logits_on_rank_0(checkpoint.forward_logits(chunks, tokens_bs)) if check else None
    checkpoint.merge_adapters(chunks)
    tensors = checkpoint.hf_tensors(model.bridge_for(reference, dtype), chunks, vocab_size=config["vocab_size"])
    if dist.is_initialized() and dist.get_rank() != 0:
        for _ in tensors:
            pass
        return Exported(num_tensors=0, num_bytes=0, max_logit_error=None)
    num_tensors, error = 0, None

    def counted(done: int, total: int | None, name: str) -> None:
        if progress is not None:
            progress(done, total, f"{num_tensors} of {expected_tensors or '?'}: {name}")

    with CheckpointWriter(target, expected_bytes=expected_bytes, overwrite=overwrite, progress=counted) as writer:
        for num_tensors, (name, tensor) in enumerate(tensors, 1):
            writer.add(name, tensor.to(dtype) if tensor.is_floating_point() else tensor)
        writer.add_json("config.json", _exported_config(config, mtp_layers, dtype))
        writer.copy_companions(Path(reference))
        if check:
            error = _check_parity(writer.close_shards(), tokens_bs, ours_bsV[..., : config["vocab_size"]], dtype, max_logit_error)
    return Exported(num_tensors=num_tensors, num_bytes=writer.num_bytes, max_logit_error=error)


def _checked_scratch(target: str | Path, scratch: str | Path | None, num_bytes: int) -> Path:
    """The scratch directory, made if need be, after a look at the room for `num_bytes` of target, and of scratch where it shares the disk."""
    parent = Path(target).absolute().parent
    directory = Path(scratch) if scratch else parent
    for each in (parent, directory):
        each.mkdir(parents=True, exist_ok=True)
    shares_disk = not torch.cuda.is_available() and os.stat(directory).st_dev == os.stat(parent).st_dev
    check_room(parent, num_bytes * (2 if shares_disk else 1))
    return directory


def _weightless_provider(source: str | Path, layout: ParallelLayout, dtype: torch.dtype, scratch: str | Path, mtp_layers: int | None = None):
    """A provider of `source` whose CPU weights will be zeros in a file in `scratch`."""
    from megatron_kd.mcore import model
    from megatron_kd.mcore.on_disk import move_to_file

    provider = model.teacher_provider(source, layout=layout, dtype=dtype, load_weights=False,
                                      overrides={"mtp_num_layers": mtp_layers, "perform_initialization": False})
    provider.register_pre_wrap_hook(lambda chunks: move_to_file(chunks, scratch))
    return provider


def _trained_model(checkpoint_dir: str | Path, reference: str | Path, layout: ParallelLayout, dtype: torch.dtype, mtp_layers: int | None,
                   scratch: str | Path, progress: Progress | None) -> list[torch.nn.Module]:
    """The checkpoint's model; for adapters the reference's weights under them."""
    from megatron_kd.mcore import checkpoint, model

    peft = checkpoint.adapters_of(checkpoint_dir)
    provider = _weightless_provider(reference, layout, dtype, scratch, mtp_layers)
    if peft is None:
        chunks = model.build_model(provider, seed=0, stack_experts=False)
        checkpoint.load_weights(chunks, checkpoint_dir, progress)
        return chunks
    bridge = model.bridge_for(reference, dtype)
    provider.register_pre_wrap_hook(lambda chunks: checkpoint.load_hf_weights(bridge, chunks, progress))
    provider.register_pre_wrap_hook(lambda chunks: peft(chunks, training=False))
    chunks = model.build_model(provider, seed=0, stack_experts=False)
    checkpoint.load_adapters(chunks, checkpoint_dir, peft)
    return chunks


@contextlib.contextmanager
def _whole_checkpoint(target: str | Path) -> Iterator[Path]:
    """The hidden directory that rank 0 makes for all ranks, and moves to `target` when every rank's block has ended. Collective."""
    with contextlib.ExitStack() as stack:
        partial = [str(stack.enter_context(whole_directory(target))) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(partial, src=0)
        yield Path(partial[0])
        dist.barrier()
        for config in Path(partial[0]).glob("iter_*/run_config.yaml") if dist.get_rank() == 0 else ():
            config.write_text(config.read_text(encoding="utf-8").replace(partial[0], str(Path(target).absolute())), encoding="utf-8")
    dist.barrier()


def _expected_size(reference: str | Path, dtype: torch.dtype, mtp_layers: int | None) -> tuple[int | None, int | None]:
    """About the tensors, and their bytes, that the export will write, from the reference's weights; None where it has none."""
    with contextlib.suppress(ConvertError):
        return _plain_size(Checkpoint.open(reference), dtype, left_out=() if mtp_layers else (naming.MTP,))
    return None, None


def _plain_size(checkpoint: Checkpoint, dtype: torch.dtype, left_out: Sequence[re.Pattern] = ()) -> tuple[int, int]:
    """Tensors of its language model without those `left_out`, and their bytes in `dtype`, MXFP4 unpacked."""
    names = [name for name in checkpoint.specs if not name.endswith(mxfp4.SCALES) and not any(p.match(name) for p in (naming.NOT_TEXT, *left_out))]
    num_values = sum(math.prod(checkpoint.specs[name].shape) * (2 if name.endswith(mxfp4.BLOCKS) else 1) for name in names)
    return len(names), num_values * dtype.itemsize


def _exported_config(config: dict, mtp_layers: int | None, dtype: torch.dtype) -> dict:
    config = {key: value for key, value in config.items() if key not in ("quantization_config", "torch_dtype")}
    config = config if mtp_layers else naming.without_mtp(config)
    return config | {"dtype": str(dtype).removeprefix("torch.")}


def _logits_on_rank_0(logits_bsV: torch.Tensor | None) -> torch.Tensor | None:
    """The last stage's logits, sent to rank 0."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return logits_bsV
    last = dist.get_world_size() - 1
    shape = [tuple(logits_bsV.shape) if logits_bsV is not None else None]
    dist.broadcast_object_list(shape, src=last)
    device = logits_bsV.device if logits_bsV is not None else torch.get_default_device()
    buffer = logits_bsV.contiguous() if dist.get_rank() == last else torch.empty(shape[0], device=device)
    dist.broadcast(buffer, src=last)
    return buffer


def _check_parity(directory: Path, tokens_bs: torch.Tensor, ours_bsV: torch.Tensor, dtype: torch.dtype, limit: float | None) -> float:
    """The largest difference of a token's logits: over all tokens in fp32; of the median token in bf16, where a rounding can send a token of a
    mixture of experts to another expert (0.8 on tokens of a tiny GPT-OSS whose median is 0.04 and whose fp32 logits agree to 3e-6)."""
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
    device = _device_for(theirs)
    with torch.no_grad():
        theirs_bsV = theirs.to(device)(tokens_bs.to(device)).logits.float().cpu()
    error_T = (ours_bsV.cpu() - theirs_bsV).abs().amax(-1).flatten()
    error = float(error_T.max() if dtype == torch.float32 else error_T.median())
    if limit is None:
        limit = 1e-4 if dtype == torch.float32 else float(theirs_bsV.abs().max()) * 4 * torch.finfo(dtype).eps
    if not error <= limit:
        raise ConvertError(rule("largest logit difference", error, f"Megatron and transformers must agree within {limit:.3g} on the exported weights",
                                "Nothing was written. Check that the reference config is the student's; --dtype fp32 (in a recipe student.precision=fp32) compares "
                                "without bf16's roundings, --max-logit-error X allows more, --no-check leaves the comparison out"))
    return error


def _device_for(network: torch.nn.Module) -> torch.device:
    """The GPU where the weights fit beside what is there: flash-linear-attention's kernels, which transformers takes where they are installed, run nowhere else."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    needed = sum(p.numel() * p.element_size() for p in network.parameters())
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.mem_get_info()[0] > 1.1 * needed else torch.device("cpu")

"""Megatron checkpoint directories: finding, loading and saving weights, and giving them back under Hugging Face's names.

Owns the calls into Bridge's checkpoint code that need no trainer. Called by convert/export.py on every rank of a world whose
model parallelism is initialised; models come from model.py. Optimizer state is left alone. CPU models are filled and written in place (on_disk.py),
so that beyond the model itself the memory is that of one layer.
"""

import contextlib
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import yaml

from megatron_kd.errors import ConvertError, rule
from megatron_kd.mcore.on_disk import in_place

Progress = Callable[[int, int, str], None]
"""Called with the bytes done, all bytes, and what was just finished; on this rank's share."""
SECONDS_BETWEEN_LOOKS = 0.25
EMBEDDING_ROWS = ("embed_tokens.weight", "lm_head.weight", "wte.weight", "word_embeddings.weight")
"""Endings of Hugging Face tensors with one row a token, which Megatron pads to a multiple of tp."""


def iteration_dir(checkpoint: str | Path) -> Path:
    """The directory with the weights: `checkpoint` itself if it is one iteration, else its newest `iter_*`.

    Errors: ConvertError where there is none, or the newest one was not finished.
    """
    path = Path(checkpoint)
    if (path / "metadata.json").is_file() or (path / ".metadata").is_file():
        return path
    iterations = sorted((p for p in path.glob("iter_*") if p.name.removeprefix("iter_").isdigit()), key=lambda p: int(p.name.removeprefix("iter_")))
    finished = [p for p in iterations if (p / ".metadata").is_file()]
    if not finished:
        raise ConvertError(rule("checkpoint", str(path), f"holds no finished iter_* of a Megatron checkpoint (found {[p.name for p in iterations]})",
                                "Give the run's checkpoint directory, or one iter_* in it"))
    return finished[-1]


def run_config(checkpoint: str | Path) -> dict:
    """The run_config.yaml that Bridge saved beside the weights; empty where there is none."""
    file = iteration_dir(checkpoint) / "run_config.yaml"
    return yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}


def load_weights(chunks: Sequence[torch.nn.Module], checkpoint: str | Path, progress: Progress | None = None) -> None:
    """Load model weights from a Megatron checkpoint of any layout into unwrapped chunks. Collective.

    Errors: ConvertError where a weight of the model is not in the checkpoint.
    """
    from megatron.bridge.training.checkpointing import _load_model_weights_from_checkpoint
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from torch.distributed.checkpoint.api import CheckpointException

    path = iteration_dir(checkpoint)
    try:
        with in_place(chunks) as shards, _watched(lambda: _num_bytes(shards), _num_bytes_read(), progress):
            on_gpu = next(chunks[0].parameters()).device.type != "cpu"
            loaded = _load_model_weights_from_checkpoint(str(path), list(chunks), return_state_dict=not on_gpu)
    except (Exception, CheckpointException) as e:  # several types for one fault; torch's CheckpointException is a BaseException
        why = str(e).strip().splitlines()[-1]
        raise ConvertError(rule("checkpoint", str(path), f"does not fit this model: {why}",
                                "Give the Hugging Face reference (config) that the checkpoint was trained from")) from e
    if not on_gpu:
        own = {shard.data.data_ptr() for shard in shards}
        weights = [t for name, part in loaded.items() if name.startswith("model") for t in nested_values(part) if torch.is_tensor(t)]
        assert all(t.data_ptr() in own for t in weights), "megatron-core loaded a weight into memory of its own"


@torch.no_grad()
def load_hf_weights(bridge, chunks: Sequence[torch.nn.Module], progress: Progress | None = None) -> Sequence[torch.nn.Module]:
    """Copy the weights of an AutoBridge's Hugging Face folder into unwrapped chunks, tensor by tensor; a pre-wrap hook, returns `chunks`. Collective.

    As Bridge's own loader, which keeps every fused expert tensor that it read until the end (unpacked, where they are MXFP4): here a layer's are
    let go with the layer. Errors: ConvertError names the parameters that the folder has nothing for.
    """
    inner, source = bridge._model_bridge, bridge.hf_pretrained
    tasks = [task for task in inner.build_conversion_tasks(source, list(chunks)) if task is not None and task.megatron_module is not None]
    _check_all_found(chunks, tasks)
    num_bytes = [task.param_weight.numel() * task.param_weight.element_size() for task in tasks]
    layer, fused, done = None, {}, 0
    for i, task in enumerate(tasks):
        if layer != (layer := re.findall(r"layers\.\d+", task.global_param_name)):
            fused.clear()
        name = str(task.mapping.hf_param)
        tensors = fused[name] if name in fused else inner.maybe_modify_loaded_hf_weight(task.mapping.hf_param, source.state)
        if getattr(task.mapping, "is_grouped_export", False):
            fused[name] = tensors
        weight = task.mapping.hf_to_megatron(tensors, task.megatron_module)
        if weight is not None:
            if weight.shape != task.param_weight.shape:
                raise ConvertError(rule(task.global_param_name, tuple(weight.shape), f"must be {tuple(task.param_weight.shape)} for this config",
                                        "The config and the weights are of different models"))
            task.param_weight.copy_(weight)
        done += num_bytes[i]
        if progress is not None:
            progress(done, sum(num_bytes), f"{i + 1} of {len(tasks)}: {task.global_param_name}")
    inner._broadcast_shared_embeddings(list(chunks))
    return chunks


def _check_all_found(chunks: Sequence[torch.nn.Module], tasks: list) -> None:
    """A tied output layer of a later pipeline stage gets its weight from the first stage."""
    found = {task.param_weight.data_ptr() for task in tasks}
    missing = [name for chunk in chunks for name, p in chunk.named_parameters() if p.data_ptr() not in found
               and not (name == "output_layer.weight" and chunk.share_embeddings_and_output_weights)]
    if missing:
        raise ConvertError(rule("weights", missing[:4], f"{len(missing)} of the model's parameters have no weight in the Hugging Face folder",
                                "Check that config.json belongs to these weights"))


def adapters_of(checkpoint: str | Path):
    """Bridge's PEFT object (LoRA, ...) that the checkpoint was trained with, or None."""
    settings = run_config(checkpoint).get("peft")
    if not settings:
        return None
    from megatron.bridge.utils.instantiate_utils import instantiate

    return instantiate({key: value for key, value in settings.items() if key != "params_to_save"})


def load_adapters(chunks: Sequence[torch.nn.Module], checkpoint: str | Path, peft) -> None:
    """Load adapters into chunks that `peft` transformed; their base weights are not in the checkpoint. Collective."""
    from megatron.bridge.training.checkpointing import _generate_model_state_dict, apply_peft_adapter_filter_to_state_dict
    from megatron.bridge.training.utils.pg_utils import get_pg_collection
    from megatron.core import dist_checkpointing

    path = str(iteration_dir(checkpoint))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=dist_checkpointing.load_common_state_dict(path))
    wanted = _generate_model_state_dict(list(chunks), {"metadata": metadata}, pg_collection=get_pg_collection(list(chunks)))
    loaded = dist_checkpointing.load(apply_peft_adapter_filter_to_state_dict(wanted, peft), path, strict="assume_ok_unexpected")
    for i, chunk in enumerate(chunks):
        unexpected = chunk.load_state_dict(loaded["model" if len(chunks) == 1 else f"model{i}"], strict=False).unexpected_keys
        if unexpected:
            raise ConvertError(rule("adapters", unexpected[:4], "the model has no such adapters", "Export with the recipe that trained them"))


def merge_adapters(chunks: Sequence[torch.nn.Module]) -> int:
    """Add every LoRA adapter to the weights that it wraps and take it out; returns how many. Collective.

    Bridge's own merge at export does not transpose GPT-OSS's expert weights back. Errors: ConvertError for adapters of another shape than LoRA's.
    """
    from megatron.bridge.peft.adapter_wrapper import AdapterWrapper

    merged = 0
    for parent in [module for chunk in chunks for module in chunk.modules()]:
        for name, child in list(parent.named_children()):
            if isinstance(child, AdapterWrapper):
                _merge_adapter(child)
                parent._modules[name] = child.to_wrap
                merged += 1
    return merged


@torch.no_grad()
def _merge_adapter(wrapper: torch.nn.Module) -> None:
    from megatron.bridge.peft.lora_merge import LoRAMerge

    adapter = wrapper.adapter
    if not (hasattr(adapter, "linear_in") and hasattr(adapter, "linear_out")):
        raise ConvertError(rule("adapter", type(adapter).__name__, "only plain LoRA can be merged", "Export with Bridge's own tools"))
    weights = [weight for name, weight in wrapper.to_wrap.named_parameters(recurse=False) if name.startswith("weight")]
    for weight in weights:  # grouped experts have one a local expert, and share the adapter
        full = LoRAMerge().merge(weight.float(), adapter.linear_out.weight.float(), adapter.linear_in.weight.float(), adapter.alpha, adapter.dim,
                                 tp_group=getattr(adapter.linear_in, "tp_group", None))
        weight.copy_(full)


def save_weights(chunks: Sequence[torch.nn.Module], directory: str | Path, *, tokenizer: str | Path | None = None,
                 progress: Progress | None = None) -> None:
    """Write the weights as a Megatron checkpoint (iter_0000000, no optimizer state) with its run_config.yaml. Collective.

    Errors: ConvertError where it cannot be written; Megatron's writer hides why, so a full disk is told from the room that is left.
    """
    from megatron.bridge.training.model_load_save import save_megatron_model
    from torch.distributed.checkpoint.api import CheckpointException

    def written() -> int:
        return sum(file.stat().st_size for file in Path(directory).glob(f"iter_*/__{torch.distributed.get_rank()}_*"))

    with in_place(chunks) as shards, _watched(lambda: _num_bytes(shards, main_replicas=True), written, progress):
        try:
            save_megatron_model(list(chunks), str(directory), hf_tokenizer_path=str(tokenizer) if tokenizer else None)
        except (Exception, CheckpointException) as e:
            is_full = shutil.disk_usage(directory).free < _num_bytes(shards, main_replicas=True) - written()
            why = "the disk is full" if is_full else str(e).strip().splitlines()[-1]
            raise ConvertError(rule("checkpoint in", str(Path(directory).parent), f"could not be written: {why}; nothing is left of it",
                                    "Free space or choose another target, then run the same command again")) from e


def _num_bytes(shards: list, *, main_replicas: bool = False) -> int:
    """Bytes of all shards, or of those that this rank writes."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    return sum(shard.data.numel() * shard.data.element_size() for shard in list(shards) if not main_replicas or is_main_replica(shard.replica_id))


def _num_bytes_read() -> Callable[[], int]:
    """Counts what this process reads from files from now on."""
    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])  # "rchar: N"

    start = count()
    return lambda: count() - start


@contextlib.contextmanager
def _watched(total_bytes: Callable[[], int], done_bytes: Callable[[], int], progress: Progress | None) -> Iterator[None]:
    """Reports, from a thread of its own, on a call into Megatron that reports nothing. The total may be 0 while it is not known."""
    if progress is None:
        yield
        return
    over = threading.Event()

    def watch() -> None:
        while not over.wait(SECONDS_BETWEEN_LOOKS):
            total = total_bytes()
            if total:
                progress(min(done_bytes(), total), total, "")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        progress(total_bytes(), total_bytes(), "")
    finally:
        over.set()
        thread.join()


def hf_tensors(bridge, chunks: Sequence[torch.nn.Module], *, vocab_size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full CPU tensor), padding rows of embedding and head dropped. Collective: every rank must exhaust it."""
    for name, tensor in bridge.export_hf_weights(list(chunks), cpu=True, show_progress=False):
        yield name, tensor[:vocab_size] if name.endswith(EMBEDDING_ROWS) else tensor


def forward_logits(chunks: Sequence[torch.nn.Module], tokens_bs: torch.Tensor) -> torch.Tensor | None:
    """float32 [b, s, V_padded] on the ranks of the last stage, None elsewhere. Collective; builds the whole matrix, for checks only."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    model = chunks[0]
    device = next(model.parameters()).device
    b, s = tokens_bs.shape
    tokens_bs = tokens_bs.to(device)
    positions_bs = torch.arange(s, device=device)[None].expand(b, s)
    mask = torch.ones(1, 1, s, s, device=device).tril() < 0.5

    def step(_, chunk):
        return chunk(tokens_bs, positions_bs, mask, runtime_gather_output=True), lambda out, non_loss_data=True: out

    with torch.no_grad():
        outputs = get_forward_backward_func()(forward_step_func=step, data_iterator=None, model=model, num_microbatches=1, seq_length=s,
                                              micro_batch_size=b, forward_only=True, collect_non_loss_data=True)
    return outputs[0].float() if parallel_state.is_pipeline_last_stage() else None

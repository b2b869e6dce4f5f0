"""Time, memory and answers of a frozen teacher's forward on one GPU: experts stacked as the product does, beside Transformer Engine's own grouped linear layers.

    python tools/measure_teacher.py out/published_runs/qwen35_35b_4b_streamed/teacher --layers 8 --json out.json
    NVTE_USE_CUTLASS_GROUPED_GEMM=1 python tools/measure_teacher.py ...     # Transformer Engine's one-launch kernel of Hopper in its place

The model comes from config.json alone, with random weights that depend on names (tools/measure_training.py), so both ways have the same. Per way: seconds of
a forward (least and median of the repeats, with the GPU idle before and after), host seconds until the call returns, bytes allocated at most while it was built and in the last forward, and reserved.
`rows_difference`: norm of the difference of the hidden states of the two ways over their norm.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from measure_training import fill

WAYS = ("transformer engine", "stacked")


def cut(folder: Path, num_layers: int | None, target: Path) -> Path:
    """The configuration with its first `num_layers` layers."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    if num_layers:
        text["num_hidden_layers"] = num_layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][:num_layers]
    (target / "config.json").write_text(json.dumps(config))
    return target


def build(model: Path, way: str, seq: int):
    """The frozen language model."""
    from megatron_kd.layout import ParallelLayout
    from megatron_kd.mcore import model as models
    from megatron_kd.teacher.serve import drop_output_layer

    provider = models.teacher_provider(str(model), layout=ParallelLayout(), seq_length=seq, load_weights=False)
    (chunk,) = models.build_model(provider, seed=1, stack_experts=way == "stacked")
    for name, parameter in chunk.named_parameters():
        fill(parameter.data, name)
    lm = models.language_model(chunk)
    drop_output_layer(lm)
    return lm


def measure(model: Path, way: str, args) -> tuple[dict, torch.Tensor]:
    """(numbers, hidden states of the last forward on the host)."""
    from megatron_kd.rows import TokenBlock
    from megatron_kd.teacher.forward import hidden_rows

    lm = build(model, way, args.seq)
    built = torch.cuda.max_memory_allocated()
    torch.cuda.empty_cache()
    generator = torch.Generator().manual_seed(3)
    tokens_bs = torch.randint(0, 50_000, (args.sequences, args.seq), generator=generator)
    block = TokenBlock(tokens_bs=tokens_bs, loss_mask_bs=torch.ones(tokens_bs.shape), cu_seqlens=None, step=0, micro_batch=0)
    seconds, host = [], []
    for _ in range(args.repeats + 1):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()  # the first forward's autotuning has buffers of its own
        started = time.perf_counter()
        rows = hidden_rows(lm, block)
        host.append(time.perf_counter() - started)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    numbers = {"way": way, "first_s": seconds[0], "forward_s": min(seconds[1:]), "median_s": sorted(seconds[1:])[len(seconds[1:]) // 2], "host_s": min(host[1:]),
               "weights_bytes": sum(p.numel() * p.element_size() for p in lm.parameters()), "built_bytes": built,
               "peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
    return numbers, rows.hidden_NH.float().cpu()


def main() -> None:
    """Both ways, one table, one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="folder with a config.json")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    torch.distributed.init_process_group("nccl")
    with tempfile.TemporaryDirectory() as folder:
        model = cut(args.model, args.layers, Path(folder))
        results, answers = [], []
        for way in args.ways:
            numbers, rows = measure(model, way, args)
            results.append(numbers)
            answers.append(rows)
            gc.collect()  # hooks and modules hold each other
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    result = {"model": args.model.name if args.model.name != "teacher" else args.model.parent.name, "layers": args.layers, "seq": args.seq, "sequences": args.sequences, "ways": results,
              "rows_difference": float((answers[0] - answers[-1]).norm() / answers[0].norm()), "device": torch.cuda.get_device_name(), "torch": torch.__version__,
              "cutlass": os.environ.get("NVTE_USE_CUTLASS_GROUPED_GEMM"), "date": datetime.now(UTC).isoformat(timespec="seconds"),
              "command": " ".join(["tools/measure_teacher.py", *os.sys.argv[1:]])}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for numbers in results:
        print(f"{numbers['way']:20} forward {numbers['forward_s'] * 1e3:8.1f} ms (median {numbers['median_s'] * 1e3:.1f}, first {numbers['first_s']:.1f} s), host {numbers['host_s'] * 1e3:8.1f} ms, "
              f"weights {numbers['weights_bytes'] / 2**30:.2f}, peak {numbers['peak_bytes'] / 2**30:.2f}, reserved {numbers['reserved_bytes'] / 2**30:.2f} GiB")
    print(f"rows differ by {result['rows_difference']:.2e}")


if __name__ == "__main__":
    main()

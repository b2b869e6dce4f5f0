"""Train, save, resume and export a small model of a family, on GPUs with Transformer Engine or on the CPU, through the command line that users have.

    python tools/gpu_smoke.py gpt-oss --out out/smoke                       # one GPU
    python tools/gpu_smoke.py qwen3.5-moe --layout tp=2,ep=2,etp=1 --out out/smoke --set train.overlap_grad_reduce=true
    python tools/gpu_smoke.py llama --layout cp=2 --world 2 --placement streamed --out out/smoke --steps-only    # CUDA_VISIBLE_DEVICES=0,1,1: teacher on GPU 1
    python tools/gpu_smoke.py gpt-oss --device cpu --out out/smoke --steps-only       # losses of the local specs, to compare with

Head sizes are those of the real models, so that the kernels are; widths, depth, experts and vocabulary are small. Random weights from a fixed
seed, Megatron's mock data. Three runs: STEPS without a break; the first half, saved; the second half, resumed; then an export, compared with
transformers. Writes one JSON: losses of each, their differences, exit codes. Exit code 0 if all steps did what they should.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

STEPS, SEQ = 4, 256
FAMILIES = {"gpt-oss": ("gpt-oss-20b", "gpt-oss-20b"), "qwen3.5-moe": ("qwen3.5-35b-a3b", "qwen3.5-35b-a3b"), "qwen3.5": ("qwen3.5-9b", "qwen3.5-4b"),
            "qwen3.5-moe-dense": ("qwen3.5-35b-a3b", "qwen3.5-4b"), "llama": ("llama-3.1-8b", "llama-3.2-3b")}
"""Teacher and student, by their real names."""
GPU_SIZES = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 256, "moe_intermediate_size": 128,
             "shared_expert_intermediate_size": 128, "num_experts": 8, "num_local_experts": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
             "linear_num_key_heads": 16, "linear_num_value_heads": 32, "sliding_window": 128}
"""What GPU kernels have their conditions on; the rest is convert/tiny.py's."""
CONVOLUTION_SCALE = 100.0


def write_model(name: str, folder: Path, *, seed: int, hidden: int) -> None:
    """A Hugging Face folder of `name`'s kind. Convolutions of gated delta nets are scaled up: their outputs would be far below the epsilon of the norm after them."""
    from megatron_kd.cli.prepare import only_one
    from megatron_kd.convert.tiny import tiny_config, write_tiny_model
    from megatron_kd.plan.models import config_of

    config = tiny_config(config_of(name))
    config |= {key: value for key, value in GPU_SIZES.items() if key in config or key == "head_dim"} | {"hidden_size": hidden}
    with only_one(folder.parent):
        if not (folder / "config.json").is_file():
            write_tiny_model(config, folder, seed=seed)
            scale_convolutions(folder)


def scale_convolutions(folder: Path) -> None:
    """Values of ordinary size for the delta rule, in the folder's shards."""
    from safetensors.torch import load_file, save_file

    for shard in folder.glob("*.safetensors"):
        tensors = load_file(shard)
        scaled = {name: tensor * CONVOLUTION_SCALE if name.endswith("conv1d.weight") else tensor for name, tensor in tensors.items()}
        save_file(scaled, shard, metadata={"format": "pt"})


def recipe(args, folder: Path) -> Path:
    """The recipe's file."""
    import yaml

    layout = {key: int(value) for key, value in (part.split("=") for part in args.layout.split(",") if part)}
    if layout.get("tp", 1) > 1:
        layout["sequence_parallel"] = True
    streamed = {"world_size": 1, "layout": {"tp": 1}} if args.placement == "streamed" else {}
    content = {
        "name": f"smoke_{args.family}", "device": args.device, "output_dir": str(folder / "out"),
        "student": {"model": str(folder.parent / "models" / f"{args.family}_student"), "layout": layout, "precision": "bf16" if args.device == "cuda" else "fp32"},
        "teacher": {"model": str(folder.parent / "models" / f"{args.family}_teacher"), "placement": args.placement, **streamed, "precision": "bf16" if args.device == "cuda" else "fp32"},
        "loss": {"kd_weight": 0.9, "ce_weight": 0.1}, "data": {"kind": "mock", "seq_length": SEQ},
        "train": {"iters": STEPS, "global_batch": 4, "micro_batch": 1, "lr": 1e-3, "lr_decay": "constant", "distributed_optimizer": args.device == "cuda",
                  "tensorboard": False, "save": False},
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def start(args, world: int, path: Path, log: Path, overrides: list[str]) -> subprocess.Popen:
    """`megatron-kd train`, under torchrun where there are several ranks; `megatron-kd run` with a streamed teacher."""
    if args.placement == "streamed":
        with log.open("w") as file:
            return subprocess.Popen([sys.executable, "-m", "megatron_kd", "run", str(path), *args.set, *overrides, "--student-ranks", str(world)], stdout=file, stderr=subprocess.STDOUT)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), "-m", "megatron_kd"] if world > 1 else [
        sys.executable, "-m", "megatron_kd"]
    with log.open("w") as file:
        return subprocess.Popen([*launch, "train", str(path), *args.set, *overrides, *([] if world > 1 else ["--output", "terminal"])], stdout=file, stderr=subprocess.STDOUT)


def losses(out: Path) -> dict[int, dict[str, float]]:
    """Losses by step."""
    path = out / "history.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {r["step"]: {k: r[k] for k in ("kd loss", "ce loss") if k in r} for r in records if r["kind"] == "step"}


def largest(a: dict, b: dict) -> float | None:
    """Largest relative difference over the steps and losses that both have."""
    pairs = [(a[s][k], b[s][k]) for s in a.keys() & b.keys() for k in a[s].keys() & b[s].keys()]
    return max((abs(x - y) / max(abs(y), 1e-9) for x, y in pairs), default=None)


def main() -> int:
    """Run; write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("--layout", default="", help="student.layout, e.g. tp=2,ep=2,etp=1")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--placement", choices=("colocated", "streamed"), default="colocated")
    parser.add_argument("--name")
    parser.add_argument("--set", nargs="*", default=[], help="overrides of the recipe")
    parser.add_argument("--steps-only", action="store_true", help="one unbroken run")
    parser.add_argument("--reference", type=Path, help="JSON of another run to compare losses with")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began = time.monotonic()
    out = args.out.absolute()
    folder = out / (args.name or f"{args.family}_{args.device}_{args.layout.replace('=', '').replace(',', '_') or 'tp1'}")
    teacher, student = FAMILIES[args.family]
    write_model(teacher, out / "models" / f"{args.family}_teacher", seed=1, hidden=512)
    write_model(student, out / "models" / f"{args.family}_student", seed=2, hidden=256)
    path = recipe(args, folder)
    unbroken = start(args, args.world, path, folder / "unbroken.log", [f"output_dir={folder}/unbroken"])
    codes = {}
    if not args.steps_only:
        half = [f"output_dir={folder}/halves", "train.save=true"]
        codes["first half, saved"] = start(args, args.world, path, folder / "first.log", [*half, f"train.iters={STEPS // 2}"]).wait()
        codes["second half, resumed"] = start(args, args.world, path, folder / "second.log", half).wait()
        with (folder / "export.log").open("w") as file:
            codes["export"] = subprocess.run([sys.executable, "-m", "megatron_kd", "convert", "export", str(folder / "hf"), "--recipe", str(path), f"output_dir={folder}/halves"],
                                             stdout=file, stderr=subprocess.STDOUT).returncode
    codes["unbroken"] = unbroken.wait()
    whole, halves = losses(folder / "unbroken"), losses(folder / "halves")
    result = {"family": args.family, "layout": args.layout or "tp=1", "world": args.world, "placement": args.placement, "set": args.set, "device": device_name(args.device), "exit": codes,
              "losses": whole, "resumed_difference": None if args.steps_only else largest(halves, whole), "wall_s": round(time.monotonic() - began, 1),
              "command": " ".join(["tools/gpu_smoke.py", *sys.argv[1:]]), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if args.reference and args.reference.is_file():
        other = {int(s): v for s, v in json.loads(args.reference.read_text())["losses"].items()}
        result["reference"] = str(args.reference)
        result["reference_difference"] = largest(whole, other)
    export = folder / "export.log"
    result["export_says"] = [line for line in export.read_text().splitlines() if "logit" in line][-1:] if export.is_file() else None
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    for name, code in codes.items():
        if code:
            log = folder / {"first half, saved": "first.log", "second half, resumed": "second.log", "export": "export.log", "unbroken": "unbroken.log"}[name]
            print(f"--- {name}\n" + "\n".join(line for line in log.read_text(errors="replace").splitlines() if "Error" in line or "error" in line or "File" in line)[-2500:])
    print(json.dumps({k: v for k, v in result.items() if k not in ("command", "losses")} | {"last": whole.get(STEPS - 1)}))
    return int(any(codes.values()) or len(whole) < STEPS)


def device_name(device: str) -> str:
    """For the JSON."""
    if device == "cpu":
        return "cpu"
    return subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True).stdout.split("\n")[0] or os.uname().machine


if __name__ == "__main__":
    raise SystemExit(main())

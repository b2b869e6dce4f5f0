"""Markdown table of model pairs by GPUs: which placements fit, and how. Run by people: `python tools/plan_pairs.py [--seq 8192] [--max-cp 1]`."""

import argparse

from megatron_kd.layout import ParallelLayout
from megatron_kd.plan.balance import Rates
from megatron_kd.plan.gpus import gpu
from megatron_kd.plan.job import Job
from megatron_kd.plan.models import load_model
from megatron_kd.plan.search import Found, Limits, search

PAIRS = (("35b-a3b", "4b"), ("35b-a3b", "9b"), ("122b-a10b", "9b"), ("122b-a10b", "27b"), ("397b-a17b", "9b"), ("397b-a17b", "27b"),
         ("397b-a17b", "35b-a3b"))
GPUS = (8, 16, 32, 64)


def cell(found: Found, num_gpus: int) -> str:
    """`yes`, or what the nearest layout would need."""
    if found.best:
        job = found.best[0].job
        split = f" ({job.layout.world_size} + {job.teacher_gpus})" if job.teacher_gpus else ""
        return f"yes{split}" + " full recompute" * (job.recompute == "full")
    return "no" if found.nearest is None else f"no: {found.nearest.total / 2**30:.0f} GiB"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seq", type=int, default=8192)
    parser.add_argument("--max-cp", type=int, default=1)
    args = parser.parse_args()
    print("| card | Qwen3.5 pair | placement | " + " | ".join(f"{n} GPUs" for n in GPUS) + " |\n|---|---|---|" + "---|" * len(GPUS))
    for card in ("h100-80", "h200-141"):
        for teacher, student in PAIRS:
            for placement in ("colocated", "streamed"):
                template = Job(student=load_model(f"qwen3.5-{student}"), teacher=load_model(f"qwen3.5-{teacher}"), placement="colocated",
                               gpu=gpu(card), layout=ParallelLayout(),
                               seq=args.seq, global_batch=256)
                cells = [cell(search(template, placement, n, Rates(), limits=Limits(max_cp=args.max_cp), keep=1), n) for n in GPUS]
                print(f"| {card} | {teacher} -> {student} | {placement} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

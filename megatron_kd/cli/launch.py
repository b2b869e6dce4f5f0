"""Write a Slurm script for a recipe: the student and each teacher replica as step groups of one job.

  megatron-kd launch recipes/qwen35_35b_9b_streamed.yaml --slurm --student-gpus 32 --output job.sbatch
  megatron-kd launch ... --heterogeneous          student and teachers as two components of a heterogeneous job
  megatron-kd launch ... --gpu h200-141           refuse what the planner says does not fit, and note its figure in the script
  megatron-kd launch ... --submit                 hand it to sbatch at once

Teacher replicas and their layout come from the recipe. The job saves and requeues itself before its time limit and on preemption,
resumes from the newest checkpoint, and writes logs by role to OUTPUT_DIR/logs/slurm.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from megatron_kd.cli.slurm_script import SlurmJob, slurm_script
from megatron_kd.config.check import check_world
from megatron_kd.config.load import load
from megatron_kd.config.schema import Recipe
from megatron_kd.errors import ConfigError, rule
from megatron_kd.plan.gpus import gpu
from megatron_kd.plan.memory import worst
from megatron_kd.plan.recipe import job_from_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Recipe, overrides, and what Slurm has to know."""
    parser.add_argument("recipe", help="YAML file, by the path that the job will see")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--slurm", action="store_true", required=True, help="write an sbatch script (the only launcher so far)")
    parser.add_argument("--output", help="file to write (default: standard output)")
    parser.add_argument("--submit", action="store_true", help="run sbatch on it")
    parser.add_argument("--student-gpus", type=int, help="ranks of the student's world (default: the fewest that its layout takes, in whole nodes)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="GPUs of a node; with device: cpu, ranks of a node")
    parser.add_argument("--gpu", help="the GPUs' model, as for `megatron-kd plan`: have the planner check the memory first")
    parser.add_argument("--heterogeneous", action="store_true", help="two components instead of one allocation")
    parser.add_argument("--time", default="24:00:00", help="wall clock limit of one attempt")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="another #SBATCH option, for example --sbatch=--partition=h200")
    parser.add_argument("--teacher-sbatch", action="append", default=[], metavar="OPTION", help="the same for the teachers' component")
    parser.add_argument("--max-restarts", type=int, default=20)
    parser.add_argument("--program", default="python3 -m megatron_kd", help="how megatron-kd starts on a node")


def run(args: argparse.Namespace) -> int:
    """Write, and submit where asked."""
    recipe = load(args.recipe, args.overrides)
    text = slurm_script(job_for(recipe, args))
    Path(recipe.output_dir).mkdir(parents=True, exist_ok=True)  # Slurm opens the job's log there before the script runs
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(text, encoding="utf-8")
    elif not args.submit:
        print(text, end="")
    if not args.submit:
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError(rule("--submit", "sbatch", "is not on this machine", "Write the script with --output and submit it on a login node of the cluster"))
    answer = subprocess.run(["sbatch", "--parsable"], input=text, text=True, capture_output=True)
    print(answer.stdout.strip() or answer.stderr.strip(), file=sys.stdout if answer.returncode == 0 else sys.stderr)
    return answer.returncode


def job_for(recipe: Recipe, args: argparse.Namespace) -> SlurmJob:
    """Nodes and ranks of every world. Errors: ConfigError, UnsupportedLayout where they do not fit the nodes."""
    per_node = args.gpus_per_node
    least = recipe.student.layout.min_world
    ranks = args.student_gpus or (least if least <= per_node else -(-least // per_node) * per_node)
    check_world(recipe, ranks)
    student_nodes, student_per_node = _spread("--student-gpus", ranks, per_node)
    streamed = recipe.teacher.placement == "streamed"
    layout = recipe.teacher.layout or recipe.student.layout
    teacher_nodes, teacher_per_node = _spread("teacher.world_size", recipe.teacher.world_size or layout.min_world, per_node) if streamed else (1, 1)
    replicas = recipe.stream.replicas if streamed else 0
    notes = [f"{recipe.name}: {recipe.teacher.model} -> {recipe.student.model}, {recipe.teacher.placement}. Written by megatron-kd launch.",
             f"student: {student_nodes} node(s) x {student_per_node} rank(s), {recipe.student.layout.for_world(ranks).describe()}"]
    if replicas:
        teacher_world = teacher_nodes * teacher_per_node
        notes.append(f"teacher: {replicas} replica(s) of {teacher_nodes} node(s) x {teacher_per_node} rank(s), {layout.for_world(teacher_world).describe()}")
    if args.gpu:
        notes.append(_planned(recipe, args.gpu, ranks + replicas * teacher_nodes * teacher_per_node))
    if replicas and args.heterogeneous and args.sbatch and not args.teacher_sbatch:
        notes.append("the teachers' component repeats the options of the student's; give --teacher-sbatch for others")
    return SlurmJob(name=recipe.name, recipe=args.recipe, overrides=tuple(args.overrides), output_dir=recipe.output_dir, student_nodes=student_nodes,
                    student_ranks_per_node=student_per_node, replicas=replicas, nodes_per_replica=teacher_nodes, teacher_ranks_per_node=teacher_per_node,
                    build_cache=recipe.teacher.placement == "cached", heterogeneous=args.heterogeneous, gpus_per_node=per_node if recipe.device == "cuda" else 0,
                    student_directives=tuple(args.sbatch), teacher_directives=tuple(args.teacher_sbatch or args.sbatch), time=args.time,
                    max_restarts=args.max_restarts, program=args.program, notes=tuple(notes))


def _planned(recipe: Recipe, gpu_name: str, num_gpus: int) -> str:
    """The planner's figure. Errors: ConfigError where it does not fit, PlanError for what it does not know."""
    job = job_from_recipe(recipe, gpu(gpu_name), num_gpus)
    tight = worst(job)
    peak_gib, room_gib = tight.total / 2**30, tight.headroom / 2**30
    if not tight.fits:
        raise ConfigError(rule("--gpu", gpu_name, f"the planner expects {peak_gib:.1f} GiB on one, {-room_gib:.1f} GiB more than there is",
                               f"Give more GPUs, or see `megatron-kd plan RECIPE --gpus {num_gpus} --gpu {gpu_name} --search`"))
    return f"memory: {peak_gib:.1f} GiB on the fullest of {num_gpus} GPUs by the planner, {room_gib:.1f} GiB of {gpu_name} left"


def _spread(name: str, ranks: int, per_node: int) -> tuple[int, int]:
    """(nodes, ranks a node) with equally many ranks on every node."""
    nodes = -(-ranks // per_node)
    if ranks % nodes:
        raise ConfigError(rule(name, ranks, f"does not spread evenly over {nodes} nodes of {per_node}", "Choose a multiple of the node's GPUs"))
    return nodes, ranks // nodes

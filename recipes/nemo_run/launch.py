#!/usr/bin/env python3
"""Launch a recipe with NeMo-Run (pip install nemo-run 'leptonai<0.27'): on this machine, or on Slurm.

    python recipes/nemo_run/launch.py recipes/qwen35_35b_9b_colocated.yaml --local --gpus 8 [--shrink] [key=value ...]
    python recipes/nemo_run/launch.py recipes/qwen35_35b_9b_streamed.yaml --slurm --account A --partition P \
        --student-nodes 2 --replicas 1 --teacher-nodes 1 --student-host node17 --token SECRET --gpus 8 --job-dir /shared/jobs [--dryrun]

For teams that launch with NeMo-Run already; `megatron-kd launch RECIPE --slurm` needs nothing but Slurm and also requeues and resumes.
"""

import argparse
from pathlib import Path

import nemo_run as run
from nemo_run.config import set_nemorun_home
from omegaconf import OmegaConf


def script(command: list[str], args: argparse.Namespace, overrides: list[str]) -> run.Script:
    """One rank of `megatron-kd COMMAND RECIPE`."""
    return run.Script(path="megatron_kd", m=True, entrypoint="python", args=[*command, args.recipe, *overrides])


def add_student(experiment: run.Experiment, args: argparse.Namespace, overrides: list[str], executor: run.Executor) -> None:
    """The student's job, after one that builds (or finds complete) the cache of a cached recipe."""
    first = []
    if args.placement == "cached":
        first = [experiment.add(script(["cache", "build"], args, overrides), executor=executor.clone(), name="cache")]
    experiment.add(script(["train"], args, overrides), executor=executor, name="student", dependencies=first)


def local(args: argparse.Namespace) -> None:
    """The student (with its teacher beside it, or from the cache) under torchrun on this machine."""
    if args.placement == "streamed":
        raise SystemExit("a streamed recipe needs a second world: use `megatron-kd run RECIPE` on one machine, or --slurm")
    executor = run.LocalExecutor(ntasks_per_node=args.gpus, launcher="torchrun", env_vars={"LOGLEVEL": "WARNING"})
    with run.Experiment(args.name) as experiment:
        add_student(experiment, args, args.overrides, executor)
        experiment.dryrun() if args.dryrun else experiment.run(tail_logs=True)
    ended = {job.id: job.state.name for job in experiment.jobs}  # known once leaving the experiment has waited for them
    if not args.dryrun and set(ended.values()) != {"SUCCEEDED"}:
        raise SystemExit("not every job succeeded: " + ", ".join(f"{name} {state}" for name, state in ended.items()))


def slurm(args: argparse.Namespace) -> None:
    """The student as one Slurm job and, where the recipe streams, each teacher replica as another; they meet at --student-host."""
    def executor(nodes: int, **parameters) -> run.SlurmExecutor:
        return run.SlurmExecutor(account=args.account, partition=args.partition, nodes=nodes, ntasks_per_node=args.gpus, gpus_per_node=None if args.shrink else args.gpus,
                                 time=args.time, launcher="torchrun", srun_args=[f"--chdir={Path.cwd()}"],  # the recipe's relative paths are those of this directory
                                 tunnel=run.LocalTunnel(job_dir=""), packager=run.Packager(), additional_parameters=parameters,
                                 env_vars={"MEGATRON_KD_TOKEN": args.token} if args.token else {})

    both, student, where, replicas = [], [], {}, args.replicas if args.placement == "streamed" else 0
    if replicas:
        if not (args.student_host and args.token):
            raise SystemExit("a streamed recipe needs --student-host (a node of the student's job) and --token (the shared secret)")
        where = {"nodelist": args.student_host}
        both = [f"stream.rendezvous={args.student_host}:29790", f"stream.replicas={replicas}"]
        student = [r"stream.bind=\${oc.env:SLURMD_NODENAME}"]  # read by each rank on its node, not by the job's shell
    with run.Experiment(args.name) as experiment:
        add_student(experiment, args, both + student + args.overrides, executor(args.student_nodes, **where))
        for replica in range(replicas):
            experiment.add(script(["teach"], args, both + args.overrides), executor=executor(args.teacher_nodes), name=f"teacher{replica}")
        experiment.dryrun() if args.dryrun else experiment.run(detach=True)


def placement(recipe: str, overrides: list[str]) -> str:
    """teacher.placement of the recipe as the job will read it."""
    chosen = [value for key, _, value in (override.partition("=") for override in overrides) if key == "teacher.placement"]
    return chosen[-1] if chosen else OmegaConf.select(OmegaConf.load(recipe), "teacher.placement", default="colocated")


def main() -> None:
    """Parse and launch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--local", action="store_true")
    where.add_argument("--slurm", action="store_true")
    parser.add_argument("--name", default="megatron-kd")
    parser.add_argument("--gpus", type=int, default=8, help="ranks a node")
    parser.add_argument("--student-nodes", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="teacher replicas of a streamed recipe")
    parser.add_argument("--teacher-nodes", type=int, default=1, help="nodes of one replica")
    parser.add_argument("--student-host", help="node that the student's job must hold first; teachers join there")
    parser.add_argument("--account", default="default")
    parser.add_argument("--partition", default="main")
    parser.add_argument("--time", default="24:00:00")
    parser.add_argument("--job-dir", help="where NeMo-Run keeps scripts and logs of its jobs, on a file system that all nodes see (default: NEMORUN_HOME, or ~/.nemo_run)")
    parser.add_argument("--token", help="shared secret of the stream; give the same to both roles")
    parser.add_argument("--shrink", action="store_true", help="run the recipe's small twin on the CPU: as many --gpus as it has processes (it says how many)")
    parser.add_argument("--data", metavar="DIR", help="read this folder of .txt or .jsonl files")
    parser.add_argument("--dryrun", action="store_true")
    args, rest = parser.parse_known_args()  # key=value may also follow an option
    if any(part.startswith("-") or "=" not in part for part in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.overrides += rest
    args.placement = placement(args.recipe, args.overrides)
    args.overrides += ["--shrink"] * args.shrink + (["--data", str(Path(args.data).resolve())] if args.data else [])
    args.recipe = str(Path(args.recipe).resolve())  # seen from anywhere
    if args.job_dir:
        set_nemorun_home(str(Path(args.job_dir).resolve()))
    (local if args.local else slurm)(args)


if __name__ == "__main__":
    main()

"""The text of a Slurm job for a distillation run: one step group for the student, one for each teacher replica.

Owns the shell script. Called by `megatron-kd launch`. Each rank is one task (no torchrun in between), so that Slurm's signals reach
the training processes themselves and a step that saves its checkpoint is not cut short. Torch-free.
"""

import shlex
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmJob:
    """What the script is made from."""

    name: str
    """Job name."""
    recipe: str
    """Path of the recipe, as seen from the directory that the job starts in."""
    overrides: tuple[str, ...] = ()
    """key=value for every command."""
    output_dir: str
    """Shared directory; logs go to its logs/slurm."""
    student_nodes: int
    """Nodes of the student's world."""
    student_ranks_per_node: int
    """Tasks a node."""
    replicas: int = 0
    """Teacher replicas, each a world of its own."""
    nodes_per_replica: int = 1
    """Nodes of one replica."""
    teacher_ranks_per_node: int = 1
    """Tasks a node."""
    build_cache: bool = False
    """Build (or complete) the teacher's cache on the student's nodes before training."""
    heterogeneous: bool = False
    """Two components of one heterogeneous job (student nodes may then be of another kind) instead of one allocation."""
    gpus_per_node: int = 0
    """0 for a CPU run."""
    student_directives: tuple[str, ...] = ()
    """More #SBATCH options, e.g. `--partition=h200`; of the whole job where it is one allocation."""
    teacher_directives: tuple[str, ...] = ()
    """More #SBATCH options of the teachers' component of a heterogeneous job."""
    time: str = "24:00:00"
    """Wall clock limit of one attempt; the job requeues itself when it is reached."""
    max_restarts: int = 20
    """Attempts after the first one."""
    program: str = "python3 -m megatron_kd"
    """How megatron-kd is started on a node (for example inside a container)."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """Comment lines below the first one."""


def slurm_script(job: SlurmJob) -> str:
    """The sbatch file."""
    replica_nodes = job.replicas * job.nodes_per_replica
    gpus = [f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []
    shared = [f"--job-name={job.name}", f"--time={job.time}", "--requeue", "--open-mode=append", "--no-kill", "--signal=B:USR1@180", f"--output={job.output_dir}/slurm-%j.out"]
    every = ["--exclusive", *gpus]
    if job.heterogeneous and replica_nodes:
        first = [*shared, f"--nodes={job.student_nodes}", *every, *job.student_directives]
        second = [f"--nodes={replica_nodes}", *every, *job.teacher_directives]
        directives = [*first, None, *second]
    else:
        directives = [*shared, f"--nodes={job.student_nodes + replica_nodes}", *every, *job.student_directives]
    lines = ["#!/bin/bash", *("#SBATCH hetjob" if d is None else f"#SBATCH {d}" for d in directives), *(f"# {note}" if note else "#" for note in job.notes)]
    settings = {
        "RECIPE": job.recipe, "OUTPUT_DIR": job.output_dir, "STUDENT_NODES": job.student_nodes, "STUDENT_RANKS_PER_NODE": job.student_ranks_per_node,
        "REPLICAS": job.replicas, "NODES_PER_REPLICA": job.nodes_per_replica, "TEACHER_RANKS_PER_NODE": job.teacher_ranks_per_node, "MAX_RESTARTS": job.max_restarts,
    }
    lines += ["set -uo pipefail", "", *(f"{key}={shlex.quote(str(value))}" for key, value in settings.items())]
    lines += [f"PROGRAM=({job.program})", f"OVERRIDES=({' '.join(shlex.quote(o) for o in job.overrides)})", f"HETEROGENEOUS={int(job.heterogeneous and bool(replica_nodes))}", ""]
    return "\n".join(lines) + _functions() + (_BUILD_CACHE if job.build_cache else "") + (_TEACHERS if replica_nodes else "") + _STUDENT


def _functions() -> str:
    return r'''
LOGS=$OUTPUT_DIR/logs/slurm
RESTART=${SLURM_RESTART_COUNT:-0}
mkdir -p "$LOGS"
say() { echo "$(date '+%F %T') $*"; }
address_of() { local a; a=$(scontrol show node "$1" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p'); getent ahostsv4 "$a" | awk 'NR == 1 {print $1}'; }
export -f address_of

if ((HETEROGENEOUS)); then
  mapfile -t students < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
  mapfile -t teachers < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
else
  mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
  students=("${nodes[@]:0:STUDENT_NODES}") teachers=("${nodes[@]:STUDENT_NODES}")
fi
HEAD=$(address_of "${students[0]}")

# The channel between student and teachers is authenticated by a secret that only this user can read.
TOKEN_FILE=$OUTPUT_DIR/slurm-$SLURM_JOB_ID.token
[ -s "$TOKEN_FILE" ] || (umask 077 && head -c 32 /dev/urandom | base64 -w0 > "$TOKEN_FILE")
export MEGATRON_KD_TOKEN=$(< "$TOKEN_FILE")

# ranks GROUP PORT_OFFSET RANKS_PER_NODE LOG "NODE NODE ..." COMMAND ...: one world, one task a rank, each rank's output in LOG-RANK.log
ranks() {
  local group=$1 port=$((20000 + (SLURM_JOB_ID * 64 + RESTART * 16 + $2) % 40000)) per_node=$3 log=$4 list=($5)
  shift 5
  local options=(--overlap --kill-on-bad-exit=1 --nodes=${#list[@]} --ntasks=$((${#list[@]} * per_node)) --ntasks-per-node="$per_node" --nodelist="$(IFS=,; echo "${list[*]}")")
  local job=$SLURM_JOB_ID component=SLURM_JOB_ID_HET_GROUP_$group
  ((HETEROGENEOUS)) && options+=(--het-group="$group") job=${!component}
  export MASTER_ADDR=$(address_of "${list[0]}") MASTER_PORT=$port
  exec srun "${options[@]}" --output="$log-%t.log" --open-mode=append bash -c '
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE='"$per_node"'
    ((RANK == 0)) && echo "'"$job"'.$SLURM_STEP_ID" > "'"$log"'.step"
    exec "$@" stream.bind=$(address_of "$SLURMD_NODENAME")' rank "$@"
}
'''


_BUILD_CACHE = r'''
# An attempt that was cut off continues where it ended; a complete cache is found and left alone.
say "building the teacher's cache on ${students[*]}"
(ranks 0 0 "$STUDENT_RANKS_PER_NODE" "$LOGS/cache" "${students[*]}" "${PROGRAM[@]}" cache build "$RECIPE" "${OVERRIDES[@]}") || { say "cache build ended with $?; see $LOGS/cache-*.log"; exit 1; }
'''

_TEACHERS = r'''
FINISHED=$OUTPUT_DIR/slurm-$SLURM_JOB_ID.finished
rm -f "$FINISHED"
# A replica that ends is started again while the student runs; one on a drained or dead node waits for its node and ends nothing.
teach() {
  local replica=$1 step
  local list="${teachers[*]:replica * NODES_PER_REPLICA:NODES_PER_REPLICA}"
  trap '[ -n "${step:-}" ] && kill -TERM "$step" 2> /dev/null' TERM
  while [ ! -e "$FINISHED" ]; do
    (ranks 1 $((1 + replica)) "$TEACHER_RANKS_PER_NODE" "$LOGS/teacher-$replica" "$list" "${PROGRAM[@]}" teach "$RECIPE" "${OVERRIDES[@]}" stream.rendezvous="$HEAD:$STREAM_PORT") &
    step=$!
    wait "$step"; local status=$?
    [ -e "$FINISHED" ] && break
    say "teacher $replica on $list ended with $status; it is started again in 10 s"
    sleep 10 & wait $!
  done
}
STREAM_PORT=$((10000 + (SLURM_JOB_ID * 16 + RESTART) % 10000))
OVERRIDES+=(stream.replicas="$REPLICAS")
teacher_jobs=()
for ((replica = 0; replica < REPLICAS; replica++)); do
  say "teacher $replica on ${teachers[*]:replica * NODES_PER_REPLICA:NODES_PER_REPLICA}"
  teach "$replica" &
  teacher_jobs+=($!)
done
'''

_STUDENT = r'''
say "student on ${students[*]} (attempt $((RESTART + 1)))"
[ -n "${STREAM_PORT:-}" ] && OVERRIDES+=(stream.rendezvous="$HEAD:$STREAM_PORT")
(ranks 0 15 "$STUDENT_RANKS_PER_NODE" "$LOGS/student" "${students[*]}" "${PROGRAM[@]}" train "$RECIPE" "${OVERRIDES[@]}" bridge.train.exit_signal_handler=true) &
student=$!

# Slurm sends USR1 before the time limit, TERM on preemption: the student saves and ends with 75. (A TERM to srun itself would kill the ranks.)
trap 'say "told to stop: the student saves its checkpoint"; scancel --signal=TERM "$(< "$LOGS/student.step")"' USR1 TERM
while true; do
  wait "$student"; status=$?
  kill -0 "$student" 2> /dev/null || break
done

trap - USR1 TERM

[ -n "${FINISHED:-}" ] && touch "$FINISHED"
((${#teacher_jobs[@]})) 2> /dev/null && kill -TERM "${teacher_jobs[@]}" 2> /dev/null
wait
say "student ended with $status"
# 75: stopped early after saving. Above 128: killed, or its node is gone. Both continue from the newest checkpoint. Anything else is final.
if ((status == 75 || status > 128)) && ((RESTART < MAX_RESTARTS)); then
  say "requeueing"
  scontrol requeue "$SLURM_JOB_ID"
  sleep 60
fi
rm -f "$TOKEN_FILE" "${FINISHED:-}"
exit "$status"
'''

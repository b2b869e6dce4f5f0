#!/usr/bin/env bash
# One teacher replica, a world of its own on one or several nodes; run on every node of the replica, before or after the student starts:
#   recipes/torchrun/teacher_nodes.sh RECIPE NUM_NODES NODE_RANK REPLICA_HEAD GPUS_PER_NODE STUDENT_HEAD [key=value ...]
# It serves whichever student comes to the rendezvous until it is ended (Ctrl-C or SIGTERM to the ranks), also after the student is done; started again after a
# crash, it is taken back.
set -euo pipefail
recipe=$1 nodes=$2 node_rank=$3 head=$4 gpus=$5 student=$6
shift 6
: "${MEGATRON_KD_TOKEN:?set it to the secret of the student nodes}"
bind=${BIND:-$(hostname -I | awk '{print $1}')}
exec torchrun --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$gpus" --master-addr "$head" --master-port "${MASTER_PORT:-29501}" \
  -m megatron_kd teach "$recipe" stream.rendezvous="$student:${STREAM_PORT:-29790}" stream.bind="$bind" "$@"

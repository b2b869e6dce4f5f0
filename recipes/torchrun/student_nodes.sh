#!/usr/bin/env bash
# The student's world on several nodes; run on every student node:
#   recipes/torchrun/student_nodes.sh RECIPE NUM_NODES NODE_RANK HEAD_ADDRESS GPUS_PER_NODE [key=value ...]
# HEAD_ADDRESS is the student's node 0; teachers join there (stream.rendezvous). All nodes share the secret in MEGATRON_KD_TOKEN.
set -euo pipefail
recipe=$1 nodes=$2 node_rank=$3 head=$4 gpus=$5
shift 5
: "${MEGATRON_KD_TOKEN:?set it to the same secret on student and teacher nodes, for example from: head -c 32 /dev/urandom | base64 -w0}"
bind=${BIND:-$(hostname -I | awk '{print $1}')}
exec torchrun --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node "$gpus" --master-addr "$head" --master-port "${MASTER_PORT:-29500}" \
  -m megatron_kd train "$recipe" stream.rendezvous="$head:${STREAM_PORT:-29790}" stream.bind="$bind" "$@"

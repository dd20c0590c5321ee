#!/usr/bin/env bash
# ray_worker.sh HEAD_HOST: on every other machine. Stays until the head ends.
set -euo pipefail

head=${1:?usage: ray_worker.sh HEAD_HOST}
ulimit -n 65536 || echo "note: only $(ulimit -n) open files; see 'meshrl doctor'" >&2
exec ray start --address "$head:${RAY_PORT:-6379}" --num-gpus "${GPUS_PER_NODE:-8}" --disable-usage-stats --block

#!/usr/bin/env bash
# ray_head.sh RECIPE [key=value ...]: on the first machine. Waits for NNODES machines, then trains on all of them.
set -euo pipefail

nnodes=${NNODES:?set NNODES to the number of machines}
gpus=${GPUS_PER_NODE:-8}
port=${RAY_PORT:-6379}
wait_seconds=${WAIT_SECONDS:-600}

ulimit -n 65536 || echo "note: only $(ulimit -n) open files; see 'meshrl doctor'" >&2
ray start --head --port "$port" --num-gpus "$gpus" --disable-usage-stats
trap 'ray stop --force' EXIT

count='import ray; ray.init(address="auto", logging_level="ERROR"); print(sum(n["Alive"] for n in ray.nodes()))'
deadline=$((SECONDS + wait_seconds))
until [ "$(python -c "$count")" -ge "$nnodes" ]; do
    if [ "$SECONDS" -ge "$deadline" ]; then
        echo "fewer than $nnodes machines joined within $wait_seconds s" >&2
        exit 1
    fi
    sleep 5
done

meshrl doctor --address auto --ranks 1
meshrl train --supervise "$@" trainer.backend=ray ray_init.address=auto \
    trainer.nnodes="$nnodes" trainer.n_gpus_per_node="$gpus" &
run=$!
# A signal ends `wait`, not the run, which saves first: wait again until it has ended.
trap 'kill -TERM "$run"' TERM
code=0
while kill -0 "$run" 2>/dev/null; do
    code=0
    wait "$run" || code=$?
done
exit "$code"

#!/usr/bin/env bash
# run.sh vllm|sglang: the tests against the real engine, in an environment of its own (.venv-ENGINE at the tree's root).
# Where the engine cannot be installed it says so, and that is no failure.
set -euo pipefail
engine=$1
cd "$(dirname "$0")/../.."
venv=".venv-$engine" log=".venv-$engine.log"
SECONDS=0
if ! tests/special_standalone/install.sh "$engine" "$venv" 2>"$log"; then
    tail -n 15 "$log" >&2
    echo "SKIPPED: $engine cannot be installed on this machine (the end of $log is above)"
    exit 0
fi
installed=$SECONDS
# What the engines compile and how they bind threads would cost minutes.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR
# The engines are large and every process of theirs imports all of them: compiled files are kept.
unset PYTHONDONTWRITEBYTECODE
results="$venv/test-results"
run_tests() { "$venv/bin/python" -m pytest tests/special_standalone -k "$engine" -o cache_dir="$results" "$@"; }
rm -rf "$results"
# What fails beside a busy engine runs once more, alone: it has to pass then.
run_tests --durations=5 || {
    echo "Once more, alone, what failed:"
    run_tests --last-failed --last-failed-no-failures none
}
echo "$engine: installed in $installed s, tested in $((SECONDS - installed)) s"

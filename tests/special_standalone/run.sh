#!/usr/bin/env bash
# run.sh vllm|sglang: the tests against the real engine, in an environment of its own (.venv-ENGINE at the tree's root).
# Where the engine cannot be installed it says so; that is a failure only with REQUIRED=1. The outcome is kept in .venv-ENGINE.outcome.
set -euo pipefail
engine=$1
cd "$(dirname "$0")/../.."
venv=".venv-$engine" log=".venv-$engine.log" outcome=".venv-$engine.outcome"
SECONDS=0
echo "NOT TESTED: the installation did not end" >"$outcome"
if ! tests/special_standalone/install.sh "$engine" "$venv" 2>"$log"; then
    tail -n 15 "$log" >&2
    echo "NOT TESTED: it cannot be installed on this machine" >"$outcome"
    echo "SKIPPED: $engine cannot be installed on this machine (the end of $log is above)"
    exit "${REQUIRED:-0}"
fi
installed=$SECONDS
# What the engines compile and how they bind threads would cost minutes.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_LOGGING_LEVEL=ERROR
# The engines are large and every process of theirs imports all of them: compiled files are kept.
unset PYTHONDONTWRITEBYTECODE
version=$("$venv/bin/python" -c "from importlib.metadata import distributions as all
print(next(d.version for d in all() if d.name.lower() in ('$engine', '$engine-cpu')))")
echo "$version: FAILED" >"$outcome"
"$venv/bin/python" tests/run_tests.py "$venv/test-results" tests/special_standalone -k "$engine" --durations=5
flaky=$(grep -c . "$venv/test-results/flaky.txt" || true)
echo "$version: tested in $((SECONDS - installed)) s, $flaky flaky" >"$outcome"
echo "$engine: installed in $installed s, tested in $((SECONDS - installed)) s"

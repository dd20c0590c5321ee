#!/usr/bin/env bash
# install.sh vllm|sglang FOLDER: an environment with the real engine on a CPU. Run again, it does nothing.
set -euo pipefail
engine=$1 venv=$2
here="$(cd "$(dirname "$0")" && pwd)"
inputs=("$here/install.sh" "$here/${engine}_requirements.txt" "$here/${engine}_overrides.txt")
stamp="$venv/.installed"
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$(cat "${inputs[@]}" | cksum)" ]; then
    exit 0
fi
echo "installing $engine into $venv (a few minutes the first time)"
rm -rf "$venv"
"${PYTHON:-python3}" -m venv "$venv"
pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check)
# Where pip's own places have no CPU build of torch, PyTorch's index has it.
"${pip[@]}" install uv torch==2.13.0+cpu 2>"$venv/pip.log" ||
    "${pip[@]}" install --extra-index-url https://download.pytorch.org/whl/cpu uv torch==2.13.0+cpu
uv=("$venv/bin/uv" pip install --quiet --python "$venv/bin/python")
if [ "$engine" = sglang ]; then
    "${uv[@]}" --no-deps sglang==0.5.23
fi
"${uv[@]}" --override "${inputs[2]}" -r "${inputs[1]}"
"${uv[@]}" --no-deps -e "$here/../.."
cat "${inputs[@]}" | cksum >"$stamp"

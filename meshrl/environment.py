"""The environment variables that the package reads: their table, and functions to read switches and numbers.

Variables that other libraries read themselves (`HF_HOME`, `NCCL_DEBUG`, `WANDB_MODE`, ...) are not listed.
"""

from __future__ import annotations

import os

TRACEBACK = "MESHRL_TRACEBACK"
SUPERVISED_SINCE = "MESHRL_SUPERVISED_SINCE"
SUPERVISED_PIPE = "MESHRL_SUPERVISED_PIPE"
TRUE, FALSE = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")
# Each variable with its line in the docs (docs/config.md).
VARIABLES = {
    TRACEBACK: "A switch. On: an error that is told in one line comes with its traceback.",
    "MESHRL_TOKEN": "`meshrl serve`: the token of pauses and weight updates, as `--token`.",
    "MESHRL_API_KEY": "`meshrl serve`: the key that requests must have, as `--api-key`.",
    "MESHRL_ENGINE_TOKEN": "Set by a rollout for the engine's server that it starts: the token of its requests.",
    SUPERVISED_SINCE: "Set by `--supervise` for its run: when the command began, in unix seconds.",
    SUPERVISED_PIPE: "Set by `--supervise` for its run: the open file that tells of the command's end, and the seconds "
    "that are left then.",
    "CUDA_VISIBLE_DEVICES": "The GPUs that local workers and the servers of rollouts share out among themselves.",
    "OMP_NUM_THREADS": "A number: the CPU threads of each worker (default: its share of the cores).",
    "PYTORCH_ALLOC_CONF": "Settings of torch's allocator; `expandable_segments` is switched by phase, the rest kept.",
    "PYTORCH_CUDA_ALLOC_CONF": "The older name of `PYTORCH_ALLOC_CONF`; it wins for GPUs.",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "Torch's own; 0 unless it is set: stalls are reported by the run itself.",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "Torch's own; 1 unless it is set, in the process that workers are forked from.",
    "GLOO_SOCKET_IFNAME": "Where it is not set, groups of CPU workers of one machine use the loopback interface.",
    "RANK": "For a worker that another launcher starts: its number; also the next six. Local workers get them set.",
    "WORLD_SIZE": "The number of workers.",
    "LOCAL_RANK": "The worker's number on its machine.",
    "LOCAL_WORLD_SIZE": "The number of workers on its machine.",
    "NODE_RANK": "The number of its machine.",
    "MASTER_ADDR": "Where rank 0 is.",
    "MASTER_PORT": "The port at which the ranks meet.",
    "RAY_ADDRESS": "The Ray cluster of `trainer.backend=ray` and `meshrl doctor`, where `ray_init.address` names none.",
    "WANDB_RUN_ID": "The run at Weights & Biases to go on in (default: the one that the run's folder remembers).",
    "SWANLAB_RUN_ID": "The run at SwanLab to go on in (default: the one that the run's folder remembers).",
    "MLFLOW_TRACKING_URI": "MLflow's server (default: a file in the run's folder).",
}


def switch(name: str) -> bool:
    """Return whether a switch is on; off if it is not set. Raise a `ValueError` for any other word."""
    word = os.environ.get(name, "").strip().lower()
    if word in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError(f"{name}={os.environ[name]} must be one of {', '.join(TRUE)} or {', '.join(filter(None, FALSE))}")


def number(name: str, default: int) -> int:
    """Return a whole number, or the default if the variable is not set. Raise a `ValueError` for anything else."""
    word = os.environ.get(name, "").strip()
    try:
        return int(word) if word else default
    except ValueError:
        raise ValueError(f"{name}={os.environ[name]} must be a whole number") from None

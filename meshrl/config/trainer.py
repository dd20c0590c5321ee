"""`trainer.*`, `ray_init.*` and `global_profiler.*`: processes, length of the run, logging, deadlines and gates."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshrl.config.data import VALIDATES
from meshrl.config.keys import (
    LARGEST_SEED,
    LONGEST_WAIT,
    MOST_MEGABYTES,
    MOST_RANKS,
    MOST_ROWS,
    MOST_STEPS,
    ROLLOUT,
    above,
    all_of,
    any_of,
    differs,
    equals,
    is_set,
    key,
    section,
)

if TYPE_CHECKING:
    from meshrl.config.rl import PPOConfig


# `trainer.gates.*`: health checks during a run, and the action if a check fails.

ACTIONS = ("off", "warn", "stop")
GATES = ("first_step", "log_prob_diff", "non_finite", "entropy_collapse", "equal_rewards")
CORRECTION = "algorithm.rollout_correction"
# A comparison of log-probs needs those of the rollout.
COMPARES = equals(f"{ROLLOUT}.calculate_log_probs", True)


@dataclass
class GatesConfig:
    first_step: str = key(
        "warn",
        "When, at the first step, trainer and rollout are not the same policy.",
        choices=ACTIONS,
        only_if=any_of(COMPARES, equals(f"{CORRECTION}.bypass_mode", False)),
        no_request=("off",),
    )
    on_policy_kl: float = key(
        0.01,
        "Largest KL to the old log-probs before the first update.",
        low=0,
        high=1e6,
        only_if=differs(".first_step", "off"),
    )
    log_prob_diff: str = key(
        "warn",
        "When rollout and trainer disagree about log-probs during the run.",
        choices=ACTIONS,
        only_if=COMPARES,
        no_request=("off",),
    )
    log_prob_diff_mean: float = key(
        0.1,
        "Largest mean difference of log-probs, in nats a token.",
        low=0,
        high=1e6,
        only_if=all_of(COMPARES, any_of(differs(".first_step", "off"), differs(".log_prob_diff", "off"))),
    )
    non_finite: str = key("stop", "When a batch has NaN or inf to train on; the batch is kept.", choices=ACTIONS)
    entropy_collapse: str = key("warn", "When the entropy has all but gone.", choices=ACTIONS)
    entropy_share: float = key(
        0.05,
        "Share of the first step's entropy below which it has.",
        low=0,
        high=1,
        only_if=differs(".entropy_collapse", "off"),
    )
    equal_rewards: str = key(
        "warn", "When no sample has an advantage: all rewards are the same, or of each group.", choices=ACTIONS
    )
    patience: int = key(
        3,
        "Steps in a row before the last two of these count.",
        low=1,
        high=MOST_STEPS,
        only_if=any_of(differs(".entropy_collapse", "off"), differs(".equal_rewards", "off")),
    )
    limits: dict[str, Any] = key({}, "Bounds of any metric: {max, min, then}, or just a largest value (warn).")
    repeat_every: int = key(
        50,
        "Say the same warning again after so many steps.",
        low=1,
        high=MOST_STEPS,
        only_if=any_of(*(equals(f".{name}", "warn") for name in GATES), is_set(".limits")),
    )


def gate_problems(config: "PPOConfig") -> list[str]:
    """Check the gates: a gate that stops the run must have its data, and limits must be valid."""
    gates = config.trainer.gates
    problems = limit_problems(gates)
    if gates.first_step == "stop" and not config.actor_rollout_ref.rollout.calculate_log_probs:
        problems.append(
            f"trainer.gates.first_step=stop cannot see whether rollout and trainer are the same policy: {ROLLOUT}."
            "calculate_log_probs=false leaves out the log-probs that it compares; set that to true, or the gate to off"
        )
    return problems


def limit_problems(gates: GatesConfig) -> list[str]:
    """Return one message for each invalid entry of `trainer.gates.limits`."""
    return [problem for name, entry in gates.limits.items() if (problem := _limit_problem(str(name), entry))]


def _limit_problem(name: str, entry: Any) -> str | None:
    where = f"trainer.gates.limits.{name}"
    fields = entry if isinstance(entry, dict) else {"max": entry}
    if unknown := sorted(set(fields) - {"max", "min", "then"}):
        return f"{where} has no {', '.join(unknown)}: it has max, min, then"
    bounds = [fields[end] for end in ("min", "max") if fields.get(end) is not None]
    if not bounds or any(isinstance(b, bool) or not isinstance(b, int | float) or math.isnan(b) for b in bounds):
        return f"{where} needs a number as max or min, not {entry!r}"
    if len(bounds) == 2 and bounds[0] > bounds[1]:
        return f"{where}: min ({bounds[0]}) is above max ({bounds[1]})"
    if fields.get("then", "warn") not in ACTIONS[1:]:
        return f"{where}.then must be warn or stop, not {fields['then']!r}"
    return None


TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio", "swanlab")
LOGGERS = ("console", "file", *TRACKERS)
# The names of project and run appear on trackers' pages, and in the run's folder unless that is set.


@dataclass
class DeadlinesConfig:
    start: float = key(600.0, "Seconds the workers may take to start.", low=1, high=LONGEST_WAIT)
    call: float = key(7200.0, "Seconds one call to the workers may take.", low=1, high=LONGEST_WAIT)
    collective: float = key(600.0, "Seconds a collective between workers may take.", low=1, high=LONGEST_WAIT)
    stop: float = key(
        60.0, "Seconds after SIGTERM within which the step is finished and saved.", low=1, high=LONGEST_WAIT
    )


@dataclass
class RunConfig:
    """The `trainer` keys that `meshrl train`, `meshrl sft` and `meshrl prefer` share."""

    nnodes: int = key(1, "Machines; more than one needs backend=ray.", low=1, high=MOST_RANKS)
    n_gpus_per_node: int = key(
        8, "Worker processes per machine, one per GPU if there are GPUs.", low=1, high=MOST_RANKS
    )
    backend: str = key("local", "How workers are started.", choices=("local", "ray"))
    device: str = key("auto", "Where workers compute; auto: cuda if there is one.", choices=("auto", "cpu", "cuda"))
    seed: int = key(1, "Seed of everything random.", low=0, high=LARGEST_SEED)
    total_epochs: int = key(
        30,
        "Passes over the training data.",
        low=1,
        high=MOST_STEPS,
        only_if=equals(".total_training_steps", None),
        noted=True,
    )
    total_training_steps: int | None = key(
        None, "Steps of the run; null: as total_epochs gives.", low=1, high=MOST_STEPS
    )
    test_freq: int = key(-1, "Validate every so many steps; -1: never.", low=-1, high=MOST_STEPS)
    save_freq: int = key(
        -1, "Save a checkpoint every so many steps and after the last; -1: never.", low=-1, high=MOST_STEPS
    )
    resume_mode: str = key(
        "auto",
        "Go on from the newest whole checkpoint in the run's folder, begin anew, or go on from resume_from_path.",
        choices=("auto", "disable", "resume_path"),
    )
    resume_from_path: str | None = key(None, "Checkpoint (global_step_N) to go on from, with resume_mode=resume_path.")
    remote_dir: str | None = key(
        None, "Address (fsspec) that whole checkpoints are copied to and, where there are none here, fetched from."
    )
    max_ckpt_to_keep: int | None = key(None, "Newest checkpoints to keep; null: all.", low=1, high=MOST_STEPS)
    project_name: str = key("meshrl", "Project, as the report and the trackers show it.")
    experiment_name: str = key("run", "Name of this run.")
    default_local_dir: str | None = key(None, "Folder of the run; null: outputs/PROJECT/EXPERIMENT.")
    logger: list[str] = key(["console", "file"], "Where metrics go.", choices=LOGGERS)
    save_final_model: bool = key(
        True, "Write the trained model to model/ in the run's folder, for Hugging Face to load."
    )
    nan_gradient: str = key(
        "skip",
        "When a gradient is not finite: skip that optimizer step and count it, or stop.",
        choices=("skip", "stop"),
    )
    max_nan_steps: int | None = key(
        None,
        "Stop when more optimizer steps than this were skipped for a gradient that is not finite.",
        low=0,
        high=MOST_STEPS,
    )
    max_nan_steps_in_a_row: int | None = key(
        10,
        "Stop when so many steps in a row changed nothing, because no gradient was finite; 0 or null: never.",
        low=0,
        high=MOST_STEPS,
    )
    max_restarts: int = key(
        0,
        "How often a run that infrastructure has ended (a dead worker, a deadline) begins again by itself.",
        low=0,
        high=1_000_000,
    )
    restart_wait: float = key(
        1.0,
        "Seconds before the first restart; before each next one twice as many.",
        low=0,
        high=LONGEST_WAIT,
        only_if=above(".max_restarts", 0),
    )
    memory_copy_freq: int = key(
        -1,
        "Copy the whole state to memory every so many steps, for restarts; with several nodes to two. -1: never.",
        low=-1,
        high=MOST_STEPS,
    )
    stall_timeout: float | None = key(
        1800.0,
        "Seconds without a finished phase after which a report of the stall is written; null: never.",
        low=0.1,
        high=LONGEST_WAIT,
    )
    deadlines: DeadlinesConfig = section(DeadlinesConfig, "How long anything may be waited for.")
    ledger: bool = key(True, "Book every second of every process, as ledger_s/* in the metrics.")
    timeline: bool = key(False, "Write timeline.json.gz, what every process did and when, for Perfetto.")
    timeline_steps: list[int] = key([], "Steps in the timeline; empty: all.", low=1, high=MOST_STEPS)
    peak_tflops: float | None = key(
        None, "TFLOP/s of one device at best, for mfu/*; null: as known for the device's name.", low=0.001, high=1e6
    )

    @property
    def world_size(self) -> int:
        """The number of worker processes over all machines."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def processes(self) -> list[int]:
        """The number of worker processes on each machine, one entry per machine."""
        return [self.n_gpus_per_node] * self.nnodes

    @property
    def checkpoints_to_keep(self) -> int | None:
        """The number of newest checkpoints to keep, or None to keep all."""
        return self.max_ckpt_to_keep

    @property
    def run_dir(self) -> str:
        """The folder to which the run writes: `default_local_dir`, or one from the names of project and run."""
        return self.default_local_dir or f"outputs/{self.project_name}/{self.experiment_name}"


@dataclass
class TrainerConfig(RunConfig):
    val_before_train: bool = key(
        True, "Validate before the first step.", only_if=is_set("data.val_files"), no_request=(False,), noted=True
    )
    val_only: bool = key(False, "Validate and end.")
    critic_warmup: int = key(0, "Steps in which only the critic learns.", low=0, high=MOST_STEPS)
    balance_batch: bool = key(True, "Order samples so that all ranks get about the same number of tokens.")
    max_actor_ckpt_to_keep: int | None = key(None, "Another name of max_ckpt_to_keep.", low=1, high=MOST_STEPS)
    max_critic_ckpt_to_keep: int | None = key(None, "Another name of max_ckpt_to_keep.", low=1, high=MOST_STEPS)
    rollout_data_dir: str | None = key(None, "Folder for all training samples, one jsonl file per step.")
    keep_batches_megabytes: int = key(
        0,
        "Keep the newest training batches in batches/ of the run's folder, up to this size, for meshrl replay.",
        low=0,
        high=MOST_MEGABYTES,
    )
    validation_data_dir: str | None = key(
        None, "Folder for all validation samples, one jsonl file per validation.", only_if=VALIDATES
    )
    gates: GatesConfig = section(GatesConfig, "What is watched while the run goes on.")
    log_val_generations: int = key(
        0,
        "Samples of each validation that are kept for the report; 0: 8.",
        low=0,
        high=MOST_ROWS,
        only_if=VALIDATES,
        noted=True,
    )

    @property
    def checkpoints_to_keep(self) -> int | None:
        """The number of newest checkpoints to keep, or None to keep all. Actor and critic are kept together."""
        return self.max_ckpt_to_keep or self.max_actor_ckpt_to_keep or self.max_critic_ckpt_to_keep


@dataclass
class RayInitConfig:
    address: str | None = key(None, "Ray cluster to join, such as auto; null: start one here.")
    num_cpus: int | None = key(None, "CPUs of a Ray started here.", low=1, high=MOST_RANKS)
    num_gpus: int | None = key(None, "GPUs of a Ray started here.", low=0, high=MOST_RANKS)
    object_store_memory: int | None = key(None, "Bytes of the object store of a Ray started here.", low=1, high=2**50)


@dataclass
class ProfilerConfig:
    tool: str | None = key(
        None,
        "Profiler; torch: traces, torch_memory: snapshots of a GPU's memory, nsys: marks steps for Nsight Systems.",
        choices=("torch", "torch_memory", "nsys"),
    )
    steps: list[int] = key([], "Steps to profile.", low=1, high=MOST_STEPS)
    ranks: list[int] = key([0], "Ranks to profile, of every group of workers; empty: all.", low=0, high=MOST_RANKS)
    save_path: str = key("outputs/profile", "Folder of the profiles.")

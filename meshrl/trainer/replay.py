"""Replay of past steps: kept batches and the checkpoint before them reproduce a step's numbers to the bit.

    replay, show, explain_token   `meshrl replay`: one step of a run again, compared with its record
    TrainOnly, train_only         training without generation, on kept batches
    RolloutOnly, rollout_only     generation without training

Kept batches are the files of `KeptBatches` (run_state.py).
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from meshrl.config.keys import ConfigError, leaves, told_without_traceback
from meshrl.config.load import load_config
from meshrl.config.rl import PPOConfig
from meshrl.config.validate import ensure_runnable
from meshrl.data.batch import DataProto, scored_rows
from meshrl.models.loading import run_tokenizer
from meshrl.telemetry.run_folder import RunFiles
from meshrl.trainer.checkpoints import FOLDER, Found, open_checkpoint, problems_of, step_folders
from meshrl.trainer.launch import train
from meshrl.trainer.rl_trainer import PPOTrainer
from meshrl.trainer.run_state import batch_files, load_batch

DUMPED = "batch.dataproto"
# Metrics that differ between any two runs: clocks, memory and traffic between processes.
CLOCKS = ("timing_s/", "time", "perf/", "ledger_s/", "ledger/", "mfu/", "memory/", "weight_sync/")
OWN = (*CLOCKS, "data/", "val-", "step", "training/nonfinite_metrics")


@dataclass(frozen=True)
class Replayed:
    """A replayed step: (recorded, replayed) of every number that both runs have."""

    step: int
    numbers: dict[str, tuple[float, float]]
    batch: DataProto
    metrics: dict[str, float]
    config: PPOConfig

    @property
    def differences(self) -> dict[str, tuple[float, float]]:
        """The numbers that are not the same to the bit."""
        return {n: pair for n, pair in self.numbers.items() if pair[0] != pair[1] and not all(map(math.isnan, pair))}


def replay(run_dir: str | Path, step: int, token: tuple[int, int] | None = None, words: Sequence[str] = ()) -> Replayed:
    """Replay a step of a run from the checkpoint before it and the batches kept since; `words` are config overrides."""
    if not Path(run_dir).is_dir():
        raise ValueError(f"there is no run folder {run_dir}")
    run = RunFiles(run_dir)
    if step < 1:
        steps = [int(row["step"]) for row in run.read_metrics() if "actor/lr" in row]
        raise ValueError(f"there is no step {step}: they count from 1, and {run_dir} has {max(steps, default=0)}")
    recorded = next((row for row in run.read_metrics() if row["step"] == step and "actor/lr" in row), None)
    start, files = starting_point(run, step)
    if token is not None:
        _check_token(load_batch(files[-1])[0], token)
    with tempfile.TemporaryDirectory(prefix="meshrl-replay-") as folder:
        config = replay_config(run, start, folder, words)
        loops: list[TrainOnly] = []

        def make_loop(*parts: Any) -> TrainOnly:
            loops.append(TrainOnly(*parts))
            loops[0].files, loops[0].token, loops[0].first_step = files, token, step + 1 - len(files)
            return loops[0]

        train(config, console=Console(quiet=True), make_loop=make_loop)
        metrics = RunFiles(folder).read_metrics()[-1]
    assert loops[0].last is not None
    names = [name for name in metrics if recorded and name in recorded and not name.startswith(OWN)]
    numbers = {name: (recorded[name], metrics[name]) for name in names} if recorded else {}
    numbers[SCORE_DIFFERENCE] = (0.0, metrics[SCORE_DIFFERENCE])
    return Replayed(step, numbers, loops[0].last, metrics, config)


def _check_token(batch: DataProto, token: tuple[int, int]) -> None:
    samples, tokens = batch.batch["response_mask"].shape
    if token[0] >= samples or token[1] >= tokens:
        raise ValueError(
            f"--token {token[0]},{token[1]} is not in the batch: it has samples 0 to {samples - 1} with tokens 0 to "
            f"{tokens - 1}"
        )


def starting_point(run: RunFiles, step: int) -> tuple[Found | None, list[Path]]:
    """Return the checkpoint before a step (None: the run's first weights), and the batches from there to the step.

    A dump of the step itself also serves, because skipped optimizer steps have left the weights as they were.
    """
    start = checkpoint_before(run.path, step)
    kept = batch_files(run.batches)
    dump = run.nonfinite / f"global_step_{step}"
    if (dump / DUMPED).is_file():
        kept.setdefault(step, dump / DUMPED)
    first = start.step + 1 if start else 1
    missing = [number for number in range(first, step + 1) if number not in kept]
    if not missing:
        return start, [kept[number] for number in range(first, step + 1)]
    if (dump / DUMPED).is_file():
        return open_checkpoint(dump), [dump / DUMPED]
    raise ValueError(
        f"{run.path} has not kept the batches of steps {missing[:5]}, between the checkpoint before and step {step}: "
        "set trainer.keep_batches_megabytes (and trainer.save_freq) when it runs"
    )


def checkpoint_before(run: Path, step: int) -> Found | None:
    """Return the newest complete checkpoint before a step, or None if there is none."""
    for path in step_folders(run / FOLDER):
        if int(path.name.rpartition("_")[2]) < step and not problems_of(path):
            return open_checkpoint(path)
    return None


def check_whole(run: RunFiles) -> None:
    """Raise if the config's last section is missing: a file that was cut off would still be valid YAML."""
    last = list(leaves(PPOConfig))[-1].partition(".")[0]
    if last not in run.read_config():
        raise ValueError(f"{run.config} cannot be used: it has no section '{last}', as if it was cut off")


def replay_config(run: RunFiles, start: Found | None, folder: str, words: Sequence[str]) -> PPOConfig:
    """Return the run's own config without the settings that do not belong to the step."""
    check_whole(run)
    resume = ["trainer.resume_mode=disable"]
    if start is None and load_config(run.config, []).config.trainer.resume_mode == "resume_path":
        resume = []  # the run's first weights are from the checkpoint in its config
    elif start is not None:
        resume = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={start.path}"]
    config: PPOConfig = load_config(
        run.config,
        [
            f"trainer.default_local_dir={folder}",
            "trainer.logger=[file]",
            "trainer.save_freq=-1",
            "trainer.max_nan_steps=null",
            "trainer.max_nan_steps_in_a_row=0",
            "trainer.nan_gradient=skip",
            "trainer.max_ckpt_to_keep=null",
            "trainer.max_actor_ckpt_to_keep=null",
            "trainer.max_critic_ckpt_to_keep=null",
            *(
                f"{role}.checkpoint.{setting}"
                for role in ("actor_rollout_ref.actor", "critic")
                for setting in ("async_save=false", "save_contents=[model,optimizer,extra]", "load_contents=null")
            ),
            "trainer.remote_dir=null",
            "trainer.save_final_model=false",
            "trainer.test_freq=-1",
            "trainer.val_before_train=false",
            "trainer.keep_batches_megabytes=0",
            "trainer.rollout_data_dir=null",
            "data.val_files=[]",
            *resume,
            *words,
        ],
    ).config
    ensure_runnable(config)
    return config


def show(replayed: Replayed, token: tuple[int, int] | None, console: Console) -> None:
    """Print the recorded and replayed numbers, and the explanation of a token if one is given."""
    table = Table(title=f"step {replayed.step}: recorded and replayed")
    for heading in ("number", "recorded", "replayed", ""):
        table.add_column(heading)
    for name, (before, now) in sorted(replayed.numbers.items()):
        table.add_row(name, f"{before:.9g}", f"{now:.9g}", "" if name not in replayed.differences else "differs")
    console.print(table)
    same = len(replayed.numbers) - len(replayed.differences)
    console.print(f"{same} of {len(replayed.numbers)} numbers are the same to the bit")
    if len(replayed.numbers) == 1:
        console.print("the run has no record of this step: it ended before its metrics were written")
    if token is not None:
        for line in explain_token(replayed, token):
            console.print(line, highlight=False)


def explain_token(replayed: Replayed, token: tuple[int, int]) -> Iterator[str]:
    """Yield lines that describe a token's origin and its part in the loss."""
    row, column = token
    tensors, actor = replayed.batch.batch, replayed.config.actor_rollout_ref.actor
    if not tensors["response_mask"][row, column]:
        yield f"token {row},{column} is padding, a tool's output or was dropped: it trains nothing"
        return
    model = replayed.config.actor_rollout_ref.model
    tokenizer = run_tokenizer(model)
    number = int(tensors["responses"][row, column])
    yield f"sample {row}, token {column} of its answer: {tokenizer.decode([number])!r} (id {number})"
    yield f"  sampled with version   {int(tensors['versions'][row, column])}"
    names = {
        "rollout_log_probs": "log-prob, rollout",
        "old_log_probs": "log-prob, old policy",
        "ref_log_prob": "log-prob, reference",
        "values": "value before it",
        "token_level_scores": "score on it",
        "advantages": "advantage",
        "returns": "return",
        "rollout_is_weights": "importance weight",
    }
    for name, words in names.items():
        if name in tensors.keys():
            yield f"  {words:<22} {float(tensors[name][row, column]):.9g}"
    if not replayed.metrics.get("watched/seen"):
        yield "  the update left this sample out: its advantage is zero"
        return
    new = replayed.metrics["watched/log_prob"] / replayed.metrics["watched/seen"]
    old = float(tensors["old_log_probs"][row, column]) if "old_log_probs" in tensors.keys() else new
    ratio = math.exp(new - old)
    advantage = float(tensors["advantages"][row, column])
    low, high = 1 - (actor.clip_ratio_low or 0.0), 1 + (actor.clip_ratio_high or 0.0)
    clipped = ratio > high if advantage > 0 else ratio < low
    yield f"  log-prob in the update {new:.9g}"
    yield f"  ratio                  {ratio:.9g}, bounds [{low:g}, {high:g}]: {'clipped' if clipped else 'not clipped'}"


# Partial runs: generation without training, and training without generation.

BATCHES = "RUN/batches/step_N.dataproto"
SCORE_DIFFERENCE = "replay/score_difference"


class TrainOnly(PPOTrainer):
    """A trainer on batches from files, one a step, which generates nothing."""

    files: Sequence[Path] = ()
    # The step of the first file; by default the step after the checkpoint's.
    first_step: int | None = None
    token: tuple[int, int] | None = None
    last: DataProto | None = None

    def fit(self) -> None:
        """Train one step on the batch in each file."""
        self.gates = None  # a replay must not stop at the step that it is to show
        self.sync_weights()
        if self.first_step is not None:
            self.step = self.first_step - 1
        for file in self.files:
            self.step += 1
            self.begin_step()
            batch, metrics = load_batch(file)
            metrics[SCORE_DIFFERENCE] = self.score_difference(batch)
            if self.token is not None and file == self.files[-1]:
                watched = torch.zeros_like(batch.batch["response_mask"])
                watched[self.token] = 1
                batch.batch["watched"] = watched
            self.last = batch
            metrics |= self.train_step(batch)
            metrics |= self.keeper.after_step(self, metrics)
            self.tracker.log(metrics | self.time_metrics(metrics), self.step)
            self.keeper.after_log(self)

    def score_difference(self, batch: DataProto) -> float:
        """Return the largest difference between rewards computed again and the rewards kept with the batch."""
        again = copy.copy(batch)
        with self.phase("reward"):
            again.batch["token_level_scores"] = self.reward.score(batch, again=True).token_level
            self.add_model_scores(again, self.begin_model_scores(again))
        kept = batch.batch["response_mask"].any(1)  # dropped samples have no score to compare
        difference = (again.batch["token_level_scores"] - batch.batch["token_level_scores"])[kept]
        return float(difference.abs().max()) if len(difference) else 0.0

    def sync_weights(self) -> dict[str, float]:
        """Only increment the version: without generation no weights are sent."""
        self.version += 1
        return {}

    def add_advantages(self, batch: DataProto) -> dict[str, float]:
        """Add the advantages as usual, and keep the batch with all its columns for inspection."""
        metrics = super().add_advantages(batch)
        self.last = batch
        return metrics


class RolloutOnly(PPOTrainer):
    """A trainer that generates, scores and keeps the batches of every step; its weights do not change."""

    def train_step(self, batch: DataProto) -> dict[str, Any]:
        """Log the samples and return their statistics, without training."""
        tensors = batch.batch
        scored = torch.from_numpy(scored_rows(batch))
        self.samples.log_training(batch, self.reward.decode, self.step)
        return {
            "training/global_step": self.step,
            "critic/score/mean": float(tensors["token_level_scores"][scored].sum(1).mean()),
            "response_length/mean": float(tensors["response_mask"].sum(1).float().mean()),
            "perf/total_num_tokens": int(tensors["attention_mask"].sum()),
        }


def rollout_only(config: PPOConfig, sources: Mapping[str, str] | None = None, console: Console | None = None) -> Path:
    """Generate the batches of all steps with the weights the run starts from; return the folder of the batches."""
    config.trainer.save_final_model = False
    config.trainer.save_freq = -1  # a checkpoint would claim that these steps were trained

    def make_loop(*parts: Any) -> RolloutOnly:
        loop = RolloutOnly(*parts)
        loop.gates = None
        loop.keeper.saves = False
        loop.keeper.batches.megabytes = None
        return loop

    return RunFiles(train(config, sources, console, make_loop)).batches


def train_only(
    config: PPOConfig, batches: str | Path, sources: Mapping[str, str] | None = None, console: Console | None = None
) -> Path:
    """Train one step on a kept batch, or on each batch of a folder; return the run's folder."""
    path = Path(batches)
    files = list(batch_files(path).values()) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError([f"--train-only: there are no batches at {path}; trainer.keep_batches_megabytes keeps some"])
    with told_without_traceback(f"--train-only needs a batch that a run has kept ({BATCHES})"):
        load_batch(files[0])

    def make_loop(*parts: Any) -> TrainOnly:
        loop = TrainOnly(*parts)
        loop.files = files
        return loop

    return train(config, sources, console, make_loop)

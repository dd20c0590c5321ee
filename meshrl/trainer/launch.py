"""Launch of a run: from a checked config to the finished run.

    train, train_supervised   a run with restarts; `train_once` and `train_supervised_once` are one attempt each
    ppo_pools, Pool           the workers of a run and the devices that they share
    worker_groups             the worker processes, started and with their models loaded
    open_run, make_keeper     the run's folder; its checkpoints, kept batches and dumps
    check_machine             checks of this machine before any worker starts
    GroupAsk                  requests to the LLM judge's workers
    slow_types                notes about data types that this machine's processor is slow at

The parts are made here and put together. The training loops are in rl_trainer.py and supervised_trainers.py.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase as Tokenizer

from meshrl.agents.toolbox import tool_schemas
from meshrl.algorithms import estimator_takes
from meshrl.config.actor_critic import uses_critic
from meshrl.config.batch_sizes import BatchUnits, SupervisedBatchUnits, used_engines
from meshrl.config.engine import EngineConfig
from meshrl.config.keys import ROLLOUT, ConfigError, count, told_without_traceback
from meshrl.config.rl import SECTIONS, PPOConfig, correction_of, places, uses_reference
from meshrl.config.show import as_recipe
from meshrl.config.supervised import PreferenceConfig, SupervisedConfig
from meshrl.config.trainer import RayInitConfig, RunConfig
from meshrl.config.validate import gpu_generation_problems
from meshrl.config.validate_algorithm import bypass_loss, import_external_libs, with_absolute_files
from meshrl.config.validate_model import gpu_problems
from meshrl.controller import (
    ClassWithInitArgs,
    Deadlines,
    ResourcePool,
    WorkerGroup,
    create_colocated_worker_cls,
    create_worker_group,
)
from meshrl.controller.peer_memory import start_shelves
from meshrl.data.batch import DataProto, object_array
from meshrl.models.loading import run_tokenizer, stop_token_ids, torch_dtype
from meshrl.models.saving import copy_processor, new_folder
from meshrl.rewards.from_config import load_reward_manager, sandbox_notes
from meshrl.telemetry.console import PREFERENCE_COLUMNS, SFT_COLUMNS, Column, StepConsole
from meshrl.telemetry.report import write_report
from meshrl.telemetry.run_folder import RunFiles, RunFolder, check_unheld
from meshrl.telemetry.samples import SampleLog
from meshrl.telemetry.time_ledger import PhaseTimer
from meshrl.telemetry.trackers import Tracking
from meshrl.trainer.checkpoints import (
    FOLDER,
    MANIFEST,
    STATE,
    Checkpoints,
    Found,
    Mirror,
    Part,
    set_later_ones_aside,
    step_folders,
)
from meshrl.trainer.datasets import run_prompts, run_rows
from meshrl.trainer.fault_tolerance import Restarts, StallWatch, surviving
from meshrl.trainer.health_checks import Gates, NonFiniteSteps
from meshrl.trainer.memory_checkpoints import MemoryCopies, copies_folder, fetch_shelved, held_copies, state_to_resume
from meshrl.trainer.rl_trainer import PPOTrainer
from meshrl.trainer.rollout_source import RolloutCare, total_steps
from meshrl.trainer.run_state import Keeper, KeptBatches, StopRequest
from meshrl.trainer.supervised_trainers import (
    JudgedTrainer,
    PreferenceTrainer,
    SFTTrainer,
    epochs_in_steps,
    total_supervised_steps,
)
from meshrl.trainer.time_accounting import bookkeeping, step_profiler
from meshrl.trainer.validation import Validator
from meshrl.workers.actor import ActorRolloutRefWorker, ReferenceWorker
from meshrl.workers.generation import RolloutWorker
from meshrl.workers.scoring import CriticWorker, JudgeWorker, RewardModelWorker
from meshrl.workers.setup import WorkerSettings
from meshrl.workers.supervised_worker import JudgedWorker, PreferenceWorker, SFTWorker

logger = logging.getLogger(__name__)


def train(
    config: PPOConfig,
    sources: Mapping[str, str] | None = None,
    console: Console | None = None,
    make_loop: Callable[..., PPOTrainer] = PPOTrainer,
) -> Path:
    """Train a policy as `config` says; return the run's folder. `make_loop` may make another form of the trainer.

    After an infrastructure failure the run restarts from its newest checkpoint, up to `trainer.max_restarts` times.
    """
    restarts = Restarts.of(config.trainer)
    if make_loop is not PPOTrainer:
        restarts.limit, config.trainer.memory_copy_freq = 0, -1
    with told_without_traceback("trainer.default_local_dir"):
        check_unheld(config.trainer.run_dir)
    with held_copies(config.trainer), saying_what_is_kept(config.trainer):
        return surviving(lambda: train_once(config, restarts, sources, console, make_loop), restarts)


@contextmanager
def saying_what_is_kept(trainer: RunConfig) -> Iterator[None]:
    """Add to a `KeyboardInterrupt` from which checkpoint the run can be resumed."""
    try:
        yield
    except KeyboardInterrupt as error:
        whole = [path for path in step_folders(Path(trainer.run_dir) / FOLDER) if (path / MANIFEST).is_file()]
        kept = (
            f"the same command goes on from {whole[0].name}" if whole else "no checkpoint was kept (trainer.save_freq)"
        )
        raise KeyboardInterrupt(f"{kept}; a run that gets SIGTERM saves its last step") from error


def train_once(
    config: PPOConfig,
    restarts: Restarts,
    sources: Mapping[str, str] | None,
    console: Console | None,
    make_loop: Callable[..., PPOTrainer],
) -> Path:
    """Run one attempt of an RL run, which resumes from the state that an earlier attempt left in the run's folder."""
    model, trainer = config.actor_rollout_ref.model, config.trainer
    units = BatchUnits.from_config(config)
    with told_without_traceback():
        import_external_libs(config)
        tokenizer = run_tokenizer(model)
    judge = GroupAsk()
    reward = load_reward_manager(config, tokenizer, judge)
    with told_without_traceback():
        notes = sandbox_notes(reward.specs)
    tools = tool_schemas(config.actor_rollout_ref.rollout.multi_turn)
    train_data, order, val_data = run_prompts(config, tokenizer, tools, console)
    steps = total_steps(config, len(train_data))
    pools = ppo_pools(config, units, steps)
    check_machine(config, pools)
    notes += slow_types(config)
    fetch_shelved(trainer, config.ray_init, notes.append, restarts.opened)
    found = state_to_resume(trainer, notes.append, restarts.opened)
    first_step = found.step if found else 0
    with (
        open_run(trainer, found, restarts, model.path) as run,
        StepConsole(steps, console, first_step=first_step) as screen,
        as_it_was(run, restarts, screen.message),
    ):
        start_run(run, screen, config, sources, notes + units.lines())
        if is_finished(found, steps, run, trainer, screen):
            return run.path
        reward.say = screen.message
        for words, data in (("training", train_data), ("validation", val_data)):
            if data is not None and data.dropped + data.truncated:
                screen.message(f"{words} prompts: {data.dropped} dropped, {data.truncated} truncated, {len(data)} left")
        samples = SampleLog(
            run,
            validation_samples=trainer.log_val_generations or 8,
            rollout_data_dir=trainer.rollout_data_dir,
            validation_data_dir=trainer.validation_data_dir,
            decode_tokens=lambda ids: str(tokenizer.decode(ids)),
            stops=stop_token_ids(model.path or "", tokenizer),
        )
        with (
            reward,
            tracking(config, run, screen) as tracker,
            worker_groups(pools, trainer, config.ray_init) as groups,
            StallWatch(trainer.stall_timeout, run, groups, screen.message) as watch,
        ):
            actor, judge.group = groups["actor_rollout_ref"], groups.get("judge")
            tracker.constants |= {
                "data/dropped_prompts": train_data.dropped,
                "data/truncated_prompts": train_data.truncated,
            }
            rollouts = groups.get("rollout", actor)
            validator = Validator(config, rollouts, val_data, reward, samples) if val_data else None
            timer = phase_timer(screen, watch)
            bypasses = config.algorithm.rollout_correction.bypass_mode
            gates = Gates(trainer.gates, run.path, say=screen.message, old_is_trainers=not bypasses)
            keeper = make_keeper(config, ppo_parts(config, groups), run, steps, screen)
            parts = (config, groups, train_data, order, reward, validator, tracker, samples, timer, keeper, gates)
            loop = make_loop(*parts)
            watch.step = lambda: loop.step
            watch.waits.append(reward.waits)
            if "rollout" in groups:
                loop.rollout_care = RolloutCare(actor, rollouts, restarts)
            keeper.restore(loop, found)
            note_restart(restarts, found, tracker)
            with (
                bookkeeping(trainer, groups, run, first_step) as loop.books,
                step_profiler(config, groups, screen) as loop.profiler,
            ):
                keeper.fit(loop)
            if trainer.save_final_model and not trainer.val_only:
                screen.message(f"model: {save_model(actor, run, tokenizer, model.path)}")
        report_run(run, screen)
        return run.path


def ppo_pools(config: PPOConfig, units: BatchUnits, steps: int) -> list[Pool]:
    """Return the device pools of an RL run: the policy's with its colocated roles, and one per separate role."""
    config, trainer = with_absolute_files(config), config.trainer
    settings = WorkerSettings(
        device=trainer.device,
        collective_deadline=trainer.deadlines.collective,
        mini_batches=units.mini_batches_per_epoch,
        # The policy's learning-rate schedule does not advance during the critic's warm-up.
        total_optimizer_steps=max(1, steps - trainer.critic_warmup) * units.optimizer_steps_per_step,
        with_reference=uses_reference(config) and not config.actor_rollout_ref.ref.has_own_devices,
        seed=trainer.seed,
        with_rollout=config.actor_rollout_ref.hybrid_engine,
        with_sum_pi_squared=estimator_takes(config.algorithm.adv_estimator, "sum_pi_squared"),
        bypass=correction_of(config) if bypass_loss(config) else None,
        template_kwargs=config.data.apply_chat_template_kwargs,
    )
    workers = {"actor_rollout_ref": ClassWithInitArgs(ActorRolloutRefWorker, config.actor_rollout_ref, settings)}
    if config.actor_rollout_ref.ref.has_own_devices:
        workers["ref"] = ClassWithInitArgs(ReferenceWorker, config.actor_rollout_ref, settings)
    if uses_critic(config.critic, config.algorithm.adv_estimator):
        workers["critic"] = critic_worker(config, settings, units, steps)
    if config.reward_model.enable:
        workers["reward_model"] = ClassWithInitArgs(RewardModelWorker, config.reward_model, settings)
    if config.reward.judge.path is not None:
        workers["judge"] = ClassWithInitArgs(JudgeWorker, config.reward.judge, settings)
    pools = []
    if not config.actor_rollout_ref.hybrid_engine:
        rollout = config.actor_rollout_ref.rollout
        worker = ClassWithInitArgs(RolloutWorker, config.actor_rollout_ref, settings)
        pools.append(Pool([rollout.n_gpus_per_node] * rollout.nnodes, {"rollout": worker}, ROLLOUT))
    for role, place in places(config).items():
        if role in workers and place.has_own_devices:
            pools.append(Pool(place.processes, {role: workers.pop(role)}, SECTIONS[role]))
    return [Pool(trainer.processes, workers), *pools]


def critic_worker(config: PPOConfig, settings: WorkerSettings, units: BatchUnits, steps: int) -> ClassWithInitArgs:
    """Return the critic's worker class with its settings; without a model path the critic starts from the policy."""
    critic = copy.deepcopy(config.critic)
    if critic.model.path is None:
        critic.model.path = config.actor_rollout_ref.model.path
        critic.model.trust_remote_code = config.actor_rollout_ref.model.trust_remote_code
    own = replace(
        settings,
        mini_batches=units.critic_mini_batches_per_epoch,
        total_optimizer_steps=steps * units.critic_steps_per_step,
    )
    return ClassWithInitArgs(CriticWorker, critic, own)


def train_supervised(
    config: SupervisedConfig, sources: Mapping[str, str] | None = None, console: Console | None = None
) -> Path:
    """Fine-tune a model on demonstrations or preferences; return the run's folder, which has the model in `model/`."""
    restarts = Restarts.of(config.trainer)
    with told_without_traceback("trainer.default_local_dir"):
        check_unheld(config.trainer.run_dir)
    with held_copies(config.trainer), saying_what_is_kept(config.trainer):
        return surviving(lambda: train_supervised_once(config, restarts, sources, console), restarts)


def train_supervised_once(
    config: SupervisedConfig, restarts: Restarts, sources: Mapping[str, str] | None, console: Console | None
) -> Path:
    """Run one attempt of a supervised run, see `train_once`."""
    trainer = config.trainer
    units = SupervisedBatchUnits.from_config(config)
    path = config.model.path or ""
    with told_without_traceback():
        import_external_libs(config)
        tokenizer = run_tokenizer(config.model)
    train_data, order, val_data = run_rows(config, tokenizer)
    epochs_in_steps(trainer, len(train_data) // config.data.train_batch_size)
    steps = total_supervised_steps(config, len(train_data))
    role, worker_class, trainer_class, columns = supervised_parts(config)
    worker = ClassWithInitArgs(worker_class, with_absolute_files(config), steps)
    pools = [Pool(trainer.processes, {role: worker})]
    check_devices(pools, trainer)
    check_rounding(config)
    notes = slow_types(config)
    fetch_shelved(trainer, config.ray_init, notes.append, restarts.opened)
    found = state_to_resume(trainer, notes.append, restarts.opened)
    first_step = found.step if found else 0
    with (
        open_run(trainer, found, restarts, path) as run,
        StepConsole(steps, console, columns=columns, first_step=first_step) as screen,
        as_it_was(run, restarts, screen.message),
    ):
        start_run(run, screen, config, sources, notes + units.lines())
        if is_finished(found, steps, run, trainer, screen):
            return run.path
        for words, data in (("training", train_data), ("validation", val_data)):
            for remark in [] if data is None else data.remarks():
                screen.message(f"{words}: {remark}")
        with (
            tracking(config, run, screen) as tracker,
            worker_groups(pools, trainer, config.ray_init) as groups,
            StallWatch(trainer.stall_timeout, run, groups, screen.message) as watch,
        ):
            group = groups[role]
            tracker.constants["data/truncated_sequences"] = train_data.truncated
            timer = phase_timer(screen, watch)
            how = config.checkpoint
            parts = {"model": Part(group, how.save_contents, how.load_contents, how.async_save)}
            keeper = make_keeper(config, parts, run, steps, screen)
            loop = trainer_class(config, group, train_data, order, val_data, tracker, timer, steps, keeper)
            watch.step = lambda: loop.step
            keeper.restore(loop, found)
            note_restart(restarts, found, tracker)
            with bookkeeping(trainer, groups, run, first_step) as loop.books:
                keeper.fit(loop)
            if trainer.save_final_model:
                screen.message(f"model: {save_model(group, run, tokenizer, path)}")
        report_run(run, screen)
        return run.path


def supervised_parts(
    config: SupervisedConfig,
) -> tuple[str, type[SFTWorker], type[SFTTrainer], Sequence[Column]]:
    """Return the role, worker class, trainer class and console columns for SFT, pair preferences or KTO."""
    if not isinstance(config, PreferenceConfig):
        return "sft", SFTWorker, SFTTrainer, SFT_COLUMNS
    if config.is_judged:
        return "prefer", JudgedWorker, JudgedTrainer, PREFERENCE_COLUMNS
    return "prefer", PreferenceWorker, PreferenceTrainer, PREFERENCE_COLUMNS


def phase_timer(screen: StepConsole, watch: StallWatch) -> PhaseTimer:
    """Return the timer of the steps, which notifies the console and the stall watch of every phase."""

    def tell(phase: str) -> None:
        screen.show_phase(phase)
        watch.moved(phase)

    return PhaseTimer(on_change=tell)


def note_restart(restarts: Restarts, found: Found | None, tracker: Tracking) -> None:
    """Record what a restart has cost, now that the work begins again."""
    restarts.tell = tracker.constants.update
    if restarts.used:
        kept_at = (found.path / STATE).stat().st_mtime if found else restarts.since
        restarts.resumed(found.step if found else 0, kept_at)
    tracker.constants |= restarts.metrics()


def open_run(trainer: RunConfig, found: Found | None, restarts: Restarts, model_path: str | None = None) -> RunFolder:
    """Open the run's folder, and resume its files if the checkpoint to resume from belongs to this run.

    Otherwise the files of an earlier run in the folder are moved aside.
    """
    again, restarts.opened = restarts.opened or restarts.is_since(RunFiles(trainer.run_dir).config), True
    folder = Path(trainer.run_dir).resolve() / FOLDER
    if found is None or found.path.resolve().parent not in (folder, copies_folder(trainer.run_dir)):
        # Records of an earlier attempt without a checkpoint are discarded: its steps are taken again.
        with told_without_traceback("trainer.default_local_dir"):
            if not again and Path(model_path or "").resolve() == (own := RunFiles(trainer.run_dir).model):
                raise ValueError(
                    f"a new run would move the model that it is to start from, {own}, to previous-N/ with the files "
                    "of the run that made it: choose another folder for this run"
                )
            return RunFolder(trainer.run_dir, resume=again, last_step=-1 if again else None)
    with told_without_traceback("trainer.default_local_dir"):
        run = RunFolder(trainer.run_dir, resume=True, last_step=found.step)
    set_later_ones_aside(folder, found.step)
    return run


@contextmanager
def as_it_was(run: RunFolder, restarts: Restarts, say: Callable[[str], None]) -> Iterator[None]:
    """Restore the earlier run's files in the folder if this run fails before it has kept anything."""
    try:
        yield
    except BaseException:
        if run.put_back():
            restarts.opened = False
            say(f"the earlier run's files are back in {run.path}; the log of this start is {run.failed_log.name}")
        raise


def is_finished(found: Found | None, steps: int, run: RunFolder, trainer: RunConfig, screen: StepConsole) -> bool:
    """Return whether all steps of the run are done, and print so.

    False if the final model is still to be saved or `val_only` is set.
    """
    if found is None or found.step < steps or getattr(trainer, "val_only", False):
        return False
    screen.message(f"the run is finished: {found.path} is after step {found.step} of {steps}, nothing is left to train")
    if trainer.save_final_model and not _is_newer(run.model, than=found.path / STATE):
        return False  # missing, or of an earlier end: the run was extended and then lost after its last checkpoint
    if not run.report.exists():
        report_run(run, screen)
    return True


def _is_newer(path: Path, than: Path) -> bool:
    return path.exists() and path.stat().st_mtime >= than.stat().st_mtime


def report_run(run: RunFolder, screen: StepConsole) -> None:
    """Draw the run's report; a report that cannot be drawn is only a warning, because the run has done its work."""
    try:
        said = f"report: {write_report(run.path)}"
    except Exception as error:
        logger.warning("the report could not be drawn", exc_info=True)
        said = (
            f"warning: the report could not be drawn: {type(error).__name__}: {error}; {run.log} has the traceback, "
            f"meshrl report {run.path} tries again"
        )
    screen.message(said)


def ppo_parts(config: PPOConfig, groups: Mapping[str, WorkerGroup]) -> dict[str, Part]:
    """Return the roles that a checkpoint of an RL run holds: the policy and, if one is trained, the critic."""
    roles = {"actor": (groups["actor_rollout_ref"], config.actor_rollout_ref.actor.checkpoint)}
    if "critic" in groups:
        roles["critic"] = (groups["critic"], config.critic.checkpoint)
    return {
        role: Part(group, how.save_contents, how.load_contents, how.async_save) for role, (group, how) in roles.items()
    }


def make_keeper(
    config: PPOConfig | SupervisedConfig, parts: Mapping[str, Part], run: RunFolder, steps: int, screen: StepConsole
) -> Keeper:
    """Make the run's `Keeper` as configured: checkpoints, kept batches, dumps, stop requests, in-memory checkpoints."""
    trainer = config.trainer
    how: dict[str, Any] = {"last_step": steps, "config": asdict(config), "say": screen.message}
    mirror = Mirror(trainer.remote_dir, screen.message) if trainer.remote_dir and trainer.save_freq > 0 else None
    checkpoints = Checkpoints(
        run.checkpoints, parts, every=trainer.save_freq, keep=trainer.checkpoints_to_keep, mirror=mirror, **how
    )
    contents = ("model", "optimizer", "extra")
    dumped = {role: replace(part, save_contents=contents, background=False) for role, part in parts.items()}
    dumps = Checkpoints(run.nonfinite, dumped, every=-1, **how)
    limit = 0 if trainer.nan_gradient == "stop" else trainer.max_nan_steps
    megabytes = getattr(trainer, "keep_batches_megabytes", 0)
    memory = copies_folder(run.path) if trainer.memory_copy_freq > 0 else None
    copied = {role: replace(part, save_contents=contents) for role, part in parts.items()}
    copies = Checkpoints(memory, copied, every=trainer.memory_copy_freq, keep=1, **how) if memory else None
    shelves = partial(start_shelves, memory.name, trainer.deadlines.call) if memory and trainer.nnodes > 1 else None
    return Keeper(
        checkpoints,
        KeptBatches(run.batches, megabytes),
        NonFiniteSteps(limit, trainer.max_nan_steps_in_a_row, dumps, screen.message),
        StopRequest(trainer.deadlines.stop),
        MemoryCopies(copies, screen.message, shelves),
    )


def tracking(config: PPOConfig | SupervisedConfig, run: RunFolder, screen: StepConsole) -> Tracking:
    """Open the configured loggers before any worker starts, so that a logger that cannot be used fails at once."""
    names = config.trainer.logger, run, config.trainer.project_name, config.trainer.experiment_name
    with told_without_traceback():
        return Tracking(*names, asdict(config), console=screen)


def save_model(group: WorkerGroup, run: RunFolder, tokenizer: Tokenizer, source: str | None) -> Path:
    """Write the trained model with its tokenizer and image processor to `model/` in the run's folder."""
    with new_folder(run.model) as aside:
        group.save_model(str(aside.absolute()))
        tokenizer.save_pretrained(aside)
        copy_processor(source or "", aside)
    return run.model


def start_run(
    run: RunFolder,
    screen: StepConsole,
    config: PPOConfig | SupervisedConfig,
    sources: Mapping[str, str] | None,
    units: list[str],
) -> None:
    """Start the run's log, write its config, and print notes and batch sizes on the terminal."""
    run.start_log()
    # As a recipe: keys that are derived from other keys stay null, so that the file can be run with overrides.
    run.write_config(as_recipe(config), sources)
    if run.moved_to is not None:
        screen.message(f"an earlier run's files are now in {run.moved_to}")
    for line in units:
        screen.message(line)
        logger.info(line)


@dataclass(frozen=True)
class Pool:
    """A set of devices and the worker roles that share them.

    `processes` is the number of processes on each machine. `key` is the config section that sets this number.
    """

    processes: list[int]
    workers: Mapping[str, ClassWithInitArgs]
    key: str = "trainer"


@contextmanager
def worker_groups(
    pools: Sequence[Pool], trainer: RunConfig, ray_init: RayInitConfig
) -> Iterator[dict[str, WorkerGroup]]:
    """Start the workers of a run, load their models, and yield the worker groups by role; end the workers in any case.

    A single worker of the first pool runs in this process, which is cheapest. Workers of other pools always have their
    own processes, because they compute concurrently with the first pool.
    """
    if trainer.backend == "ray":
        from meshrl.controller.ray import init_ray

        init_ray(**asdict(ray_init))
    deadlines = Deadlines(start=trainer.deadlines.start, call=trainer.deadlines.call)
    groups: dict[str, WorkerGroup] = {}
    first_device = 0
    with ExitStack() as stack:
        for number, pool in enumerate(pools):
            devices = ResourcePool(pool.processes, use_gpu=uses_gpu(trainer))
            devices.first_device, first_device = first_device, first_device + pool.processes[0]
            role, worker = "+".join(pool.workers), next(iter(pool.workers.values()))
            if len(pool.workers) > 1:
                worker = create_colocated_worker_cls(pool.workers)
            started = create_worker_group(
                devices,
                worker,
                backend=trainer.backend,
                role=role,
                deadlines=deadlines,
                in_process=False if number else None,
            )
            group = stack.enter_context(started)
            logger.info("workers of '%s': pids %s", role, group.pids())
            groups |= group.spawn() if len(pool.workers) > 1 else {role: group}
        for view in groups.values():
            view.init_model()
        yield groups


def uses_gpu(trainer: RunConfig) -> bool:
    """Return whether each worker process gets a GPU."""
    if trainer.device != "auto":
        return trainer.device == "cuda"
    import torch

    return torch.cuda.is_available()


def check_machine(config: PPOConfig, pools: Sequence[Pool]) -> None:
    """Check that this machine can run the config, before an earlier run's files are moved aside."""
    check_devices(pools, config.trainer)
    check_rounding(config)
    if uses_gpu(config.trainer) and (problems := gpu_generation_problems(config)):
        raise ConfigError(problems)
    if (
        config.actor_rollout_ref.expandable_segments
        and config.trainer.backend == "local"
        and not uses_gpu(config.trainer)
    ):
        raise ConfigError(
            ["actor_rollout_ref.expandable_segments=true is for GPUs, and torch sees none here: set it to false"]
        )
    kind = config.actor_rollout_ref.rollout.kv_cache_dtype
    if kind != "auto" and config.trainer.backend == "local" and not uses_gpu(config.trainer):
        raise ConfigError(
            [f"actor_rollout_ref.rollout.kv_cache_dtype={kind} is for GPUs, and torch sees none here: set it to auto"]
        )


def check_rounding(config: PPOConfig | SupervisedConfig) -> None:
    """Check that the GPUs support the configured FP8 training, which workers would otherwise refuse later."""
    if uses_gpu(config.trainer) and (problems := gpu_problems(config)):
        raise ConfigError(problems)


def check_devices(pools: Sequence[Pool], trainer: RunConfig) -> None:
    """Check that this machine has a GPU for each local process, before any worker starts.

    With Ray nothing is checked here, because Ray manages the devices of its cluster.
    """
    if trainer.backend != "local" or not uses_gpu(trainer):
        return
    import torch

    processes = sum(pool.processes[0] for pool in pools)
    if (found := torch.cuda.device_count()) < processes:
        own = ", ".join(f"{pool.key}.n_gpus_per_node={pool.processes[0]}" for pool in pools)
        raise ConfigError(
            [
                f"the run needs {count(processes, 'GPU')} ({own}), but torch sees {found} on this machine: change "
                "these keys, or set trainer.device=cpu; meshrl doctor says what is there"
            ]
        )


# Requests to the LLM judge's workers.


class GroupAsk:
    """A callable that sends texts to the judge's worker group.

    The reward functions are made before the group starts, so `group` is set later.
    """

    def __init__(self) -> None:
        self.group: WorkerGroup | None = None

    def __call__(self, texts: Sequence[str]) -> list[str | Exception]:
        """Return the judge's reply to each text, or an exception for a text that failed."""
        if self.group is None:
            raise RuntimeError("the judge's workers have not started yet")
        answers = self.group.reply(DataProto(None, {"text": object_array(list(texts))}, {})).non_tensor_batch
        pairs = zip(answers["reply"], answers["error"], strict=True)
        return [reply if error is None else RuntimeError(error) for reply, error in pairs]


# Notes about data types for which this machine's processor has no fast matmul.

# A note is given from this ratio to float32's time on; a type that is only somewhat slower gets no note.
SLOW = 10.0
# Rollout engines that compute with torch in the worker processes; other engines choose their own kernels.
OWN_ROLLOUTS = ("embedded", "hf")


def slow_types(config: PPOConfig | SupervisedConfig) -> list[str]:
    """Return a note for each data type of the config that this processor is slow at, with the keys to change.

    Only runs on local CPUs have such notes.
    """
    device = config.trainer.device
    is_here = config.trainer.backend == "local"  # with Ray, the workers may run on other machines
    if not is_here or device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return []
    asked: dict[torch.dtype, list[str]] = {}
    for key, name in _keys(config).items():
        asked.setdefault(torch_dtype(name), []).append(key)
    return [
        f"products of {str(dtype).removeprefix('torch.')} take {ratio:.0f} times as long as float32's on this "
        f"processor; for float32 set {' '.join(f'{key}=float32' for key in keys)}"
        for dtype, keys in asked.items()
        if (ratio := times_slower(dtype)) >= SLOW
    ]


def times_slower(dtype: torch.dtype) -> float:
    """Return how many times longer a small CPU matmul takes than in float32, without mkldnn as in the workers."""
    if dtype == torch.float32:
        return 1.0
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
    try:
        return _product_seconds(dtype) / _product_seconds(torch.float32)
    finally:
        torch.backends.mkldnn.enabled = before


def _product_seconds(dtype: torch.dtype) -> float:
    x, weight = torch.ones(64, 128, dtype=dtype), torch.ones(128, 128, dtype=dtype)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        _ = x @ weight
        best = min(best, time.perf_counter() - started)
    return best


def _keys(config: PPOConfig | SupervisedConfig) -> dict[str, str]:
    """Return the data types that the run's own models compute with, by config key."""
    found = dict(_engine_type(prefix, engine) for prefix, engine in used_engines(config).items())
    if isinstance(config, PPOConfig) and config.actor_rollout_ref.rollout.name in OWN_ROLLOUTS:
        found[f"{ROLLOUT}.dtype"] = config.actor_rollout_ref.rollout.dtype
    return found


def _engine_type(prefix: str, engine: EngineConfig) -> tuple[str, str]:
    if engine.strategy == "megatron":
        return f"{prefix}.megatron.dtype", engine.megatron.dtype
    return f"{prefix}.fsdp_config.mixed_precision.param_dtype", engine.fsdp_config.mixed_precision.param_dtype

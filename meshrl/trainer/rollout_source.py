"""The rollout pipeline: prompts → generate → reward, on rollouts that always have the actor's newest weights.

    SampleSource             yields one scored batch a step and syncs weights to the rollout
    Schedule, Begun          how many batches are generated ahead of training, and a batch in flight
    generate_beside_scoring  computes rewards of finished samples while other samples are still generated
    add_greedy_baselines     the baselines of ReMax
    join_pools, both         connection between trainers and rollouts on different devices
    HeardUpdates             feedback to an adaptive order of the data since the last checkpointed position
    RolloutCare              restart of rollout workers that died
    reward_components        the single rewards of a sample, for GDPO

If a rollout dies, its workers are restarted and the batches in flight are requested again.
"""

from __future__ import annotations

import copy
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from meshrl.agents.agent_rollout import SAMPLE_COLUMNS, agent_metrics
from meshrl.balance import order_for_data_parallel
from meshrl.config.batch_sizes import BatchUnits
from meshrl.config.keys import count
from meshrl.config.rl import AlgorithmConfig, PPOConfig
from meshrl.config.trainer import RunConfig
from meshrl.controller import ControllerError, Future, WorkerGroup
from meshrl.controller.dispatch import check_mesh
from meshrl.data.batch import DataProto, columns_of, scored_rows
from meshrl.data.images import IMAGES
from meshrl.data.prompts import PromptDataset, PromptStream
from meshrl.data.sampling import RowOrder
from meshrl.rewards.manager import RewardManager, ScoredParts, drop_samples
from meshrl.rewards.results import RewardError
from meshrl.rewards.reward_calls import RewardFunctionSpec
from meshrl.rollout.base import TRAINING, sample_seeds
from meshrl.telemetry.time_ledger import PhaseTimer
from meshrl.trainer.dynamic_sampling import Scored
from meshrl.trainer.fault_tolerance import Restarts, kind_of
from meshrl.trainer.time_accounting import Bookkeeper, StepProfiler
from meshrl.weights.colocated import over_ranks
from meshrl.weights.disaggregated import MeetingPoint

T = TypeVar("T")
# A function that waits for a result.
Answer = Callable[[], DataProto]
logger = logging.getLogger(__name__)
# The run fails after this many batches in a row of which no sample is left to train on.
MOST_EMPTY = 8


class SampleSource:
    """The source of scored batches, one a step, which also syncs the actor's weights to the rollouts."""

    def __init__(
        self,
        config: PPOConfig,
        groups: Mapping[str, WorkerGroup],
        train_data: PromptDataset | PromptStream,
        order: RowOrder,
        reward: RewardManager,
        timer: PhaseTimer,
    ):
        self.config, self.train_data, self.order = config, train_data, order
        self.reward, self.timer = reward, timer
        self.actor = groups["actor_rollout_ref"]
        # If the rollout has no devices of its own, the actor's workers generate.
        self.rollout = groups.get("rollout", self.actor)
        self.reward_model = groups.get("reward_model")
        # Set if dead rollout workers can be restarted.
        self.rollout_care: RolloutCare | None = None
        # Set if the time of all processes is recorded, or if steps are profiled.
        self.books: Bookkeeper | None = None
        self.profiler: StepProfiler | None = None
        self.units = BatchUnits.from_config(config)
        self.total_steps = total_steps(config, len(train_data))
        self.step = 0
        self.version = -1
        self.batches_begun = 0
        self.schedule = Schedule.of(config)
        self.begun = deque[Begun]()
        self.meeting: MeetingPoint | None = None  # of the two pools; kept alive as long as they communicate
        # The data position after the last trained batch: a resumed run generates the batches after it again.
        self.place = {"batches": 0, **order.state_dict()}
        # The batches that an adaptive order has learned from since then: a resumed run passes them to it again.
        self.updates = HeardUpdates(order)
        self._prompts = self.prompts()

    def prompts(self) -> Iterator[DataProto]:
        """Yield batches of prompts in the order of the data's epochs."""
        last = None if self.config.trainer.total_training_steps is not None else self.config.trainer.total_epochs
        place = {} if last is None else copy.deepcopy(self.order.state_dict())
        for rows in self.order:
            if last is not None and self.order.epoch >= last:
                self.order.load_state_dict(place)  # leave these rows to a run that is resumed with more epochs
                return
            yield self.train_data.batch(rows)
            place = {} if last is None else copy.deepcopy(self.order.state_dict())

    def next_batch(self) -> Scored | None:
        """Return the oldest batch in flight, generated and scored, or None if the prompts are used up.

        Samples that are too old are dropped and counted. Batches of which no sample is left are skipped.
        """
        dropped, empty = 0.0, 0
        lost = dict.fromkeys(("reward/errors", "reward/dropped"), 0.0)  # of batches that are skipped
        while True:
            self.begin_batches()
            if not self.begun:
                return None
            batch, metrics = self.finish(self.begun[0])
            begun = self.begun.popleft()
            self.place = {"batches": begun.number, **begun.data}
            self.updates.forget_before(begun.heard)
            ages = self.schedule.drop_stale(batch, self.version)
            dropped += ages["training/stale_dropped"]
            if batch.batch["response_mask"].any():
                news = {"training/stale_dropped": dropped, "training/epoch": begun.epoch}
                if empty:
                    metrics |= {name: metrics.get(name, 0.0) + count for name, count in lost.items()}
                return batch, metrics | ages | news | {"training/empty_batches": float(empty)}
            if not ages["training/stale_dropped"]:
                empty += 1
                lost = {name: count + metrics.get(name, 0.0) for name, count in lost.items()}
                logger.warning("no sample of batch %d is left to train on: it is passed over", begun.number)
            if empty == MOST_EMPTY:
                raise RewardError(
                    f"no sample of {empty} batches in a row is left to train on: look at what fails in the reward "
                    "(reward.on_error says what happens then)"
                )

    def begin_batches(self) -> None:
        """Begin this step's batch and as many later batches as the schedule allows."""
        wanted = min(1 + self.schedule.batches_ahead, self.total_steps - self.step + 1)
        while len(self.begun) < wanted and (prompts := next(self._prompts, None)) is not None:
            self.begun.append(self.begin(prompts))

    def begin(self, prompts: DataProto) -> Begun:
        """Request `rollout.n` responses to every prompt of a batch.

        If scoring overlaps with generation, nothing is requested yet: `finish` does both.
        """
        self.batches_begun += 1
        prompts.meta_info[NUMBER] = self.batches_begun
        request, columns = self.request(prompts, self.config.actor_rollout_ref.rollout.n)
        answers = None
        if not self.scores_beside_generation:
            begin = self.actor.generate_sequences if self.rollout is self.actor else self.rollout.begin_sequences
            with self.phase("gen"):
                answers = self.with_rollout(lambda: begin(request))
        data = copy.deepcopy(self.order.state_dict())  # a user-defined sampler may still modify its state
        heard = self.updates.count
        return Begun(self.batches_begun, self.order.epoch, data, prompts, request, columns, answers, heard=heard)

    @property
    def scores_beside_generation(self) -> bool:
        """True if each sample is scored as soon as it is generated.

        Never true for batches begun ahead: such a batch is scored while the next ones are generated.
        """
        return self.config.reward_manager.overlap and self.schedule.batches_ahead == 0

    def finish(self, begun: Begun) -> Scored:
        """Wait for a batch's responses and add their rewards."""
        if begun.answers is None:
            batch, metrics = self.generate_beside_scoring(begun)
        else:
            with self.phase("gen"):
                # After a restart of the rollout, `begun[0]` holds the new request for this batch.
                batch = self.with_rollout(lambda: self.begun[0].finish() if self.begun else begun.finish())
            with self.phase("reward"):
                metrics = self.score(batch)
        metrics |= agent_metrics(batch)
        if self.config.algorithm.adv_estimator == "remax":
            with self.phase("gen_max"):
                n = self.config.actor_rollout_ref.rollout.n
                metrics |= add_greedy_baselines(batch, begun.prompts, n, self.generate, self.score)
        return batch, metrics

    def generate_beside_scoring(self, begun: Begun) -> Scored:
        """Generate the responses of a batch, and score finished samples while other samples are still generated."""
        deadline = self.config.trainer.deadlines.call
        with self.phase("gen"):
            asked = self.rollout, begun.request, begun.columns, self.reward, deadline
            batch, parts, metrics = self.with_rollout(lambda: generate_beside_scoring(*asked))
        with self.phase("reward"):
            model_scores = self.begin_model_scores(batch)
            metrics |= parts.add_scores(batch, deadline)
            return batch, metrics | self.add_model_scores(batch, model_scores)

    def generate(self, prompts: DataProto, n: int = 1) -> DataProto:
        """Generate `n` responses to every prompt and wait for them."""
        request, columns = self.request(prompts, n)
        answers = self.with_rollout(lambda: self.rollout.generate_sequences(request))
        return DataProto(answers.batch, {**columns, **answers.non_tensor_batch}, answers.meta_info)

    def request(self, prompts: DataProto, n: int) -> tuple[DataProto, dict[str, np.ndarray]]:
        """Repeat every prompt `n` times, each copy with its own seed.

        Return the request for the rollout, and the remaining columns of the repeated prompts.
        """
        repeated = prompts.repeat(n, interleave=True)
        number = prompts.meta_info[NUMBER]
        repeated.batch["seeds"] = sample_seeds(self.config.trainer.seed, TRAINING, number, len(repeated))
        request = repeated.pop(batch_keys=["input_ids", "attention_mask", "seeds"])
        request.meta_info[GREEDY] = prompts.meta_info.get(GREEDY, False)
        if self.config.actor_rollout_ref.rollout.multi_turn.enable:
            request.non_tensor_batch = {name: repeated.non_tensor_batch[name] for name in SAMPLE_COLUMNS}
        request.non_tensor_batch |= columns_of(repeated, [IMAGES])
        return request, repeated.non_tensor_batch

    def score(self, batch: DataProto) -> dict[str, float]:
        """Add `token_level_scores` `[B, T]` and the extra columns that the reward function returned; return metrics."""
        model_scores = self.begin_model_scores(batch)
        return self.reward.add_scores(batch) | self.add_model_scores(batch, model_scores)

    def begin_model_scores(self, batch: DataProto) -> Answer | None:
        """Request the reward model's scores, or return None if there is no reward model.

        A reward model on its own devices computes concurrently with the reward functions.
        """
        if self.reward_model is None:
            return None
        is_apart, dp_size = self.config.reward_model.has_own_devices, self.units.reward_model_dp_size
        return self.begin_balanced(self.reward_model, "compute_rm_score", batch, dp_size, is_apart)

    def add_model_scores(self, batch: DataProto, answer: Answer | None) -> dict[str, float]:
        """Add a reward model's weighted scores to the scores of the reward functions."""
        metrics: dict[str, float] = {}
        if answer is not None:
            # The reward functions may have dropped samples in the meantime: their mask is 0 and so is their score.
            rm_scores = answer().batch["rm_scores"] * batch.batch["response_mask"]
            if (scored := scored_rows(batch)).any():
                metrics["reward/rm_score_mean"] = float(rm_scores[torch.from_numpy(scored)].sum(1).mean())
            batch.batch["token_level_scores"] += self.config.reward_model.weight * rm_scores
            batch.non_tensor_batch[RM_SCORE] = rm_scores.sum(1).double().numpy()
        return metrics

    def call_balanced(self, method: Any, batch: DataProto, columns: Sequence[str] = ()) -> DataProto:
        """Call a per-sample method with the samples ordered so that all ranks get about the same number of tokens.

        The method also gets those of `columns` that the batch has.
        """
        request, order = self.balanced_request(batch, self.units.dp_size, columns)
        return in_order(method(request), order)

    def begin_balanced(self, group: WorkerGroup, method: str, batch: DataProto, dp_size: int, is_apart: bool) -> Answer:
        """Begin a per-sample method with balanced tokens on the ranks; return a function that waits for the result."""
        request, order = self.balanced_request(batch, dp_size)
        answer = self.begin_call(group, method, request, is_apart)
        return lambda: in_order(answer(), order)

    def begin_call(self, group: WorkerGroup, method: str, data: DataProto, is_apart: bool) -> Callable[[], Any]:
        """Call a method and return a function that waits for its result.

        A group on its own devices (`is_apart`) computes concurrently with the caller. Otherwise the call blocks here.
        """
        if is_apart:
            begun = group.begin(method, data)
            return lambda: begun.get()
        answer = getattr(group, method)(data)
        return lambda: answer

    def balanced_request(
        self, batch: DataProto, dp_size: int, columns: Sequence[str] = ()
    ) -> tuple[DataProto, np.ndarray]:
        """Return the columns that a per-sample method needs, and the order that its rows are in.

        The order balances tokens over the ranks.
        """
        order = np.arange(len(batch))
        if len(batch) % dp_size == 0:  # otherwise the dispatch pads the batch
            lengths = batch.batch["attention_mask"].sum(1).numpy()
            order = self.balanced_order(lengths, 1, dp_size, kin_of(batch, self.config))
        tensors = batch.batch.select("input_ids", "attention_mask", "response_mask")
        request = DataProto(tensors, columns_of(batch, [*columns, IMAGES]), {})
        request.reorder(order)
        return request, order

    def balanced_order(self, work: np.ndarray, mini_batches: int, dp_size: int, kin: int = 1) -> np.ndarray:
        """Return the order in which samples go to the ranks; see `order_for_data_parallel`.

        `work` `[B]` is the number of tokens to compute for each sample.
        """
        if self.config.trainer.balance_batch:
            return order_for_data_parallel(work, dp_size, mini_batches, group_size=kin)
        by_mini_batch_and_rank = np.arange(len(work)).reshape(mini_batches, dp_size, -1)
        return by_mini_batch_and_rank.swapaxes(0, 1).ravel()

    def sync_weights(self) -> dict[str, float]:
        """Sync the actor's weights to the rollout as the next version; return the sync's metrics."""
        self.version += 1
        if self.rollout is self.actor:
            return over_ranks(self.actor.sync_weights(self.version))
        try:
            return self.move_weights()
        except Exception as error:
            return self.heal_rollout(error)

    def move_weights(self) -> dict[str, float]:
        """Send the actor's weights to rollouts on devices of their own."""
        if self.meeting is None:
            # Connect only after a checkpoint is loaded: with LoRA the base weights, which never change, are sent here.
            self.meeting = join_pools(self.actor, self.rollout, self.config.trainer)
        if not self.config.async_training.partial_rollout:
            self.rollout.finish_answers()
        sent = self.actor.send_weights(self.version)
        return over_ranks([*both(lambda: self.rollout.receive_weights(self.version), sent), *sent.get()])

    def with_rollout(self, ask: Callable[[], T]) -> T:
        """Return `ask()`; repeat the call after a restart of the rollout if the rollout died."""
        while True:
            try:
                return ask()
            except Exception as error:
                self.heal_rollout(error)

    def heal_rollout(self, error: Exception) -> dict[str, float]:
        """Restart a dead rollout with the current weights, and request the batches in flight again with the same seeds.

        Raise the error again if the rollout is alive or may not be restarted.
        """
        if self.rollout_care is None or not self.rollout_care.replace(error):
            raise error
        asked_at = min((begun.begun_at for begun in self.begun), default=time.time())
        self.meeting = None
        metrics = self.move_weights()
        for place, begun in enumerate(self.begun):
            if begun.answers is not None:
                self.begun[place] = replace(begun, answers=self.rollout.begin_sequences(begun.request))
        self.rollout_care.resumed(self.step, asked_at)
        return metrics

    def begin_step(self) -> None:
        """Reset the step's timer, and start the profiler if this step is to be profiled."""
        if self.profiler is not None:
            self.profiler.begin(self.step)
        self.timer.reset()

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context that charges the time of its block to a phase of the step."""
        return self.timer.phase(name)


def kin_of(batch: DataProto, config: PPOConfig) -> int:
    """Return how many neighbouring rows should stay on one rank.

    Responses to the same prompt with images stay together, because their rank then encodes these images only once.
    """
    return config.actor_rollout_ref.rollout.n if IMAGES in batch.non_tensor_batch else 1


def in_order(answer: DataProto, order: np.ndarray) -> DataProto:
    """Return results for samples that were sent in `order` in the batch's own order."""
    return answer.select_idxs(np.argsort(order))


def total_steps(config: PPOConfig, rows: int) -> int:
    """Return the number of steps of the run: as configured, or computed from the epochs over the data."""
    data, trainer = config.data, config.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    # With dynamic sampling one batch may combine groups of two epochs.
    filters = config.algorithm.filter_groups.enable
    epochs = trainer.total_epochs
    steps = rows * epochs // data.train_batch_size if filters else rows // data.train_batch_size * epochs
    if steps == 0:
        raise ValueError(
            f"{count(rows, 'row')} in {count(epochs, 'epoch')} make no batch of data.train_batch_size "
            f"({data.train_batch_size}) prompts: set trainer.total_training_steps, more trainer.total_epochs or "
            "a smaller batch"
        )
    return steps


# How far generation runs ahead of training: the only difference between synchronous and asynchronous runs.
#
#     batches begun:   1 2 │ 3 │ 4 │ ...          batches_ahead = 1: while batch 1 trains, batch 2 is generated
#     batches trained:     │ 1 │ 2 │ 3 ...        with the weights that batch 1 is about to change
#
# Batches are trained in the order in which they were begun, whichever responses end first. So every step has the same
# prompts as in a synchronous run, long responses are not postponed, and no sample is more than `batches_ahead`
# versions old.

# The key in the prompts' meta_info of the batch number, from which the samples' seeds are derived.
NUMBER = "number"


@dataclass(frozen=True)
class Schedule:
    """How far generation may run ahead of training.

    `batches_ahead` batches are begun before the one that is trained. Samples with a token older than `max_staleness`
    versions are dropped.
    """

    batches_ahead: int = 0
    max_staleness: int = 0

    @classmethod
    def of(cls, config: PPOConfig) -> Schedule:
        """Return the schedule that the config asks for."""
        how = config.async_training
        return cls(how.num_ahead, how.max_staleness)

    def drop_stale(self, batch: DataProto, version: int) -> dict[str, float]:
        """Remove samples with a token that is too old from `response_mask`; return metrics of the batch's staleness."""
        versions, mask = batch.batch["versions"], batch.batch["response_mask"]
        there = mask.bool()
        age = torch.where(there, version - versions, 0)
        oldest, newest = age.amax(1), torch.where(there, age, age.amax(1, keepdim=True)).amin(1)
        dropped = oldest > self.max_staleness
        mask[dropped] = 0
        return {
            "training/staleness_mean": float(age.sum() / there.sum().clamp(min=1)),
            "training/staleness_max": float(age.max()),
            "training/partial_share": float((newest < oldest).float().mean()),
            "training/stale_dropped": float(dropped.sum()),
        }


@dataclass(frozen=True)
class Begun:
    """A batch in flight: its prompts, the request to the rollout, and the data position (`data`) after its prompts.

    `columns` are the other columns of the repeated prompts. `answers` is None if generation was not requested yet.
    `heard` counts the batches that an adaptive order had learned from when this batch began.
    """

    number: int
    epoch: int
    data: dict[str, Any]
    prompts: DataProto
    request: DataProto
    columns: dict[str, np.ndarray]
    answers: Future[DataProto] | DataProto | None
    begun_at: float = field(default_factory=time.time)
    heard: int = 0

    def finish(self) -> DataProto:
        """Wait for the generated responses and join `columns` to them."""
        answers = self.answers.get() if isinstance(self.answers, Future) else self.answers
        assert answers is not None
        return DataProto(answers.batch, {**self.columns, **answers.non_tensor_batch}, answers.meta_info)


# Scoring overlapped with generation: a sample's reward is computed while other samples are still generated.

# Seconds that a worker waits for a first sample before it returns None.
POLL_SECONDS = 0.1


def generate_beside_scoring(
    actor: WorkerGroup, request: DataProto, columns: dict[str, np.ndarray], reward: RewardManager, deadline: float
) -> tuple[DataProto, ScoredParts, dict[str, float]]:
    """Generate responses to a request, and score each sample as soon as it ends.

    Return the batch with `columns` joined to its rows, its scores (collect them with `add_scores`), and metrics. Batch
    and scores are the same as when scoring follows generation. `deadline` limits the generation, in seconds.
    """
    until = time.monotonic() + deadline
    actor.start_generation(request)
    # Every rollout gets `share` rows, the last ones fewer. One rank of each rollout returns the responses.
    num_rollouts, answering = check_mesh("rollout", actor.mesh_entries("rollout"))
    share = -(-len(request) // num_rollouts)
    scored, parts, places = ScoredParts(reward), [], []
    left = len(request)
    while left:
        if time.monotonic() > until:
            raise TimeoutError(f"{left} of {len(request)} samples were not generated within {deadline:.0f} s")
        taken = actor.take_generated(POLL_SECONDS)
        for number, rank in enumerate(answering):
            found = taken[rank]
            if found is None:
                continue
            rows = found[0] + number * share
            part = DataProto(found[1].batch, _columns_of(rows, columns) | found[1].non_tensor_batch, {})
            scored.add(part, rows)
            parts.append(part)
            places.append(rows)
            left -= len(rows)
    batch = DataProto.concat(parts)
    batch.reorder(np.argsort(np.concatenate(places), kind="stable"))
    return batch, scored, {"reward/overlapped_share": 1 - len(places[-1]) / len(batch)}


def _columns_of(rows: np.ndarray, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: column[rows] for name, column in columns.items()}


# ReMax's baseline: the reward of the policy's greedy response to the same prompt.

GREEDY = "greedy"


def add_greedy_baselines(
    batch: DataProto,
    prompts: DataProto,
    samples_per_prompt: int,
    generate: Callable[[DataProto], DataProto],
    score: Callable[[DataProto], dict[str, float]],
) -> dict[str, float]:
    """Add `reward_baselines` `[B]`, and drop the samples of prompts whose greedy response cannot be scored.

    `generate` returns one response to every prompt, greedily decoded because `meta_info["greedy"]` is set.
    """
    asked = DataProto(prompts.batch, dict(prompts.non_tensor_batch), {**prompts.meta_info, GREEDY: True})
    answers = generate(asked)
    found = score(answers)
    baselines, scored = answers.batch["token_level_scores"].sum(1), scored_rows(answers)
    batch.batch["reward_baselines"] = baselines.repeat_interleave(samples_per_prompt)
    drop_samples(batch, np.repeat(~scored, samples_per_prompt))
    metrics = {"reward/baseline/errors": found.get("reward/errors", 0.0)}
    if scored.any():
        metrics["reward/baseline/mean"] = float(baselines[torch.from_numpy(scored)].mean())
    return metrics


# Trainers and rollouts on different devices: rendezvous, and the choice of error if both sides fail.

# Seconds to wait for the trainers' own error after the rollouts failed.
GRACE_SECONDS = 5.0


def join_pools(actor: WorkerGroup, rollout: WorkerGroup, trainer: RunConfig) -> MeetingPoint:
    """Connect trainers and rollouts for weight syncs; return the rendezvous.

    The caller keeps the rendezvous alive as long as trainers and rollouts communicate.
    """
    point = MeetingPoint("127.0.0.1" if trainer.backend == "local" else own_address())
    joined = actor.join_pool(point.address, rollout.world_size)
    both(lambda: rollout.join_pool(point.address, actor.world_size), joined)
    joined.get()
    return point


def both(call: Callable[[], T], other: Future[object]) -> T:
    """Call the rollouts while the trainers work.

    If both fail, raise the trainers' error, because it explains the rollouts' error.
    """
    try:
        return call()
    except ControllerError as error:
        try:
            other.get(GRACE_SECONDS)
        except TimeoutError:
            raise error from None
        except ControllerError as cause:
            raise cause from error
        raise


def own_address() -> str:
    """Return an address of this machine that other machines can reach."""
    import ray

    return str(ray.util.get_node_ip_address())


# Feedback given to an adaptive order since the last checkpointed data position.
#
# With batches begun ahead, that position is the one at which the last trained batch was begun. The order has learned
# from batches that were trained after that. A resumed run passes these batches to the order again.

NAME = "heard_"


class HeardUpdates:
    """The feedback to an adaptive order: every trained batch, kept until the checkpointed data position includes it."""

    def __init__(self, order: RowOrder):
        self.order = order
        self.count = 0
        self._kept = deque[DataProto]()

    def update(self, batch: DataProto) -> None:
        """Pass a trained batch to the order, and keep the batch if the order learns from it."""
        self.order.update(batch)
        if self.order.learns:
            self.count += 1
            self._kept.append(batch)

    def forget_before(self, count: int) -> None:
        """Forget the first `count` batches, which the order had seen at the new data position."""
        while self._kept and self.count - len(self._kept) < count:
            self._kept.popleft()

    def state_dict(self) -> dict[str, DataProto]:
        """Return the kept batches, under names that sort by age."""
        return {f"{NAME}{number:04d}": batch for number, batch in enumerate(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Pass the kept batches to the order again, after the order was set to the checkpointed data position."""
        for name in sorted(name for name in state if name.startswith(NAME)):
            self.update(state[name])


# Restart of dead rollout workers in separate processes, while the trainers keep their state.


class RolloutCare:
    """The restart of all rollout workers if one of them is lost.

    The caller connects the new workers with the actor's workers.
    """

    def __init__(self, actor: WorkerGroup, rollout: WorkerGroup, restarts: Restarts):
        self.actor, self.rollout, self.restarts = actor, rollout, restarts

    def replace(self, error: BaseException) -> bool:
        """Restart the rollout if its workers were lost and the restart budget allows it; return whether it restarted.

        New workers have no weights yet.
        """
        if self.rollout.is_alive() or not self.actor.is_alive() or not kind_of(error).may_be_tried_again:
            return False
        if not self.restarts.failed(f"{type(error).__name__}: {error}", "rollout"):
            return False
        self.rollout.restart()
        logger.info("workers of 'rollout': pids %s", self.rollout.pids())
        self.rollout.init_model()
        return True

    def resumed(self, step: int, asked_at: float) -> None:
        """Record that the rollout generates the batches again that were first requested at unix time `asked_at`."""
        self.restarts.resumed(step, asked_at)


# The single rewards of a sample, for an estimator that does not use their sum (GDPO).

# The column of a reward model's unweighted scores.
RM_SCORE = "rm_score"
Components = tuple[dict[str, np.ndarray], list[float]]


def reward_components(
    batch: DataProto, config: AlgorithmConfig, functions: Sequence[RewardFunctionSpec], rm_weight: float
) -> Components | None:
    """Return the rewards by name and their weights, or None if there is only one reward.

    The rewards are the columns in `gdpo_reward_keys`, or else each reward function's own score and the reward model's.
    """
    columns, keys = batch.non_tensor_batch, list(config.gdpo_reward_keys)
    if keys:
        missing = [name for name in keys if name not in columns]
        if missing:
            raise ValueError(
                f"algorithm.gdpo_reward_keys names {', '.join(missing)}, which no reward function returned; there are "
                f"{', '.join(sorted(columns))}"
            )
        weights = list(config.gdpo_reward_weights) or [1.0] * len(keys)
        return {name: _numbers(name, columns[name]) for name in keys}, weights
    if len(functions) > 1:
        found = {spec.label: _numbers(spec.label, columns[f"{spec.label}/score"]) for spec in functions}
        weights = [spec.weight for spec in functions]
    elif RM_SCORE in columns:
        whole = batch.batch["token_level_scores"].sum(1).double().numpy()
        found, weights = {functions[0].label: whole - rm_weight * columns[RM_SCORE]}, [1.0]
    else:
        return None
    if RM_SCORE in columns:
        found[RM_SCORE], weights = columns[RM_SCORE], [*weights, rm_weight]
    return found, weights


def _numbers(name: str, column: np.ndarray) -> np.ndarray:
    """Convert a column to floats; a sample whose reward failed has no value and counts as 0."""
    if all(value is None for value in column):
        raise ValueError(f"algorithm.gdpo_reward_keys: no sample has a value of {name}")
    try:
        return np.array([0.0 if value is None else float(value) for value in column])
    except (TypeError, ValueError) as error:
        raise ValueError(f"algorithm.gdpo_reward_keys: {name} must be a number of each sample: {error}") from error

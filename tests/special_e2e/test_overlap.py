"""Scoring beside generation: the same run as scoring afterwards, begun before the last sample ends."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_algorithms_by_hand import DENSE, REWARD, TWO_MICRO_BATCHES
from test_layouts import SHORT
from transformers import AutoModelForCausalLM, AutoTokenizer

from meshrl.controller import ClassWithInitArgs, ResourcePool, create_worker_group
from meshrl.data.batch import DataProto
from meshrl.rewards.manager import RewardManager
from meshrl.rewards.reward_calls import RewardFunctionSpec
from meshrl.trainer.rollout_source import generate_beside_scoring
from meshrl.workers.actor import ActorRolloutRefWorker
from meshrl.workers.setup import WorkerSettings

OPTIONS = (
    *SHORT,
    *DENSE,
    TWO_MICRO_BATCHES[0],
    "actor_rollout_ref.rollout.temperature=1.3",
    "trainer.total_training_steps=2",
)
PRIME = ("reward_manager.name=prime", "reward_manager.num_processes=2")


@pytest.mark.parametrize("more", [(), PRIME, ("trainer.n_gpus_per_node=2", "data.train_batch_size=6")])
def test_a_run_that_overlaps_is_the_same_run(task, tmp_path, more):
    if "trainer.n_gpus_per_node=2" in more:
        more = (*more, "actor_rollout_ref.rollout.n=3")  # 9 samples for each rank
    after = task.train(tmp_path / "after", *OPTIONS, *more)
    beside = task.train(tmp_path / "beside", *OPTIONS, *more, "reward_manager.overlap=true")
    for ours, theirs in zip(after.metrics, beside.metrics, strict=True):
        # The same tokens; log-probs to rounding, since a whole batch is computed in other pieces.
        assert theirs["critic/score/mean"] == pytest.approx(ours["critic/score/mean"], abs=1e-6)
        assert theirs["response_length/mean"] == ours["response_length/mean"]
        assert 0 < theirs["reward/overlapped_share"] < 1
        assert "reward/overlapped_share" not in ours
    for name, weight in after.weights.items():
        torch.testing.assert_close(beside.weights[name], weight, rtol=1e-4, atol=1e-5)


class Noting(RewardManager):
    """Notes how many samples were generated when each part's scoring began."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.parts = []

    def submit(self, data):
        self.parts.append(len(data))
        return super().submit(data)


@pytest.fixture
def worker(task, tmp_path):
    config = task.config(tmp_path, *OPTIONS).actor_rollout_ref
    group = create_worker_group(
        ResourcePool([1], use_gpu=False),
        ClassWithInitArgs(ActorRolloutRefWorker, config, WorkerSettings("cpu", 60.0, 1, 10, False)),
    )
    group.init_model()
    group.sync_weights(0)
    return group


def request_of(task, count):
    tokenizer = AutoTokenizer.from_pretrained(task.model)
    texts = [f"{n:06d}>" for n in range(100003, 100003 + count)]
    ids = torch.tensor([tokenizer(text)["input_ids"] for text in texts])
    seeds = torch.arange(count) * 977
    request = DataProto.from_dict({"input_ids": ids, "attention_mask": torch.ones_like(ids), "seeds": seeds})
    columns = {
        "uid": np.array([f"u{n}" for n in range(count)], dtype=object),
        "data_source": np.array(["sort"] * count, dtype=object),
        "ground_truth": np.full(count, None, dtype=object),
        "extra_info": np.array([{"digits": text[:-1]} for text in texts], dtype=object),
    }
    return tokenizer, request, columns


def test_parts_come_while_others_are_generated(task, worker):
    tokenizer, request, columns = request_of(task, 37)
    manager = Noting([RewardFunctionSpec("dense", name="compute_score", path=str(REWARD))], tokenizer)
    batch, parts, metrics = generate_beside_scoring(worker, request, columns, manager, 60.0)
    assert sum(manager.parts) == 37
    assert len(manager.parts) > 1
    assert metrics["reward/overlapped_share"] == pytest.approx(1 - manager.parts[-1] / 37)
    parts.add_scores(batch, 60.0)
    whole = worker.generate_sequences(request)
    for name in ("responses", "response_mask", "input_ids", "attention_mask", "position_ids", "versions"):
        assert torch.equal(batch.batch[name], whole.batch[name]), name
    torch.testing.assert_close(batch.batch["rollout_log_probs"], whole.batch["rollout_log_probs"], rtol=0, atol=1e-5)
    whole.non_tensor_batch = dict(columns)
    assert torch.equal(manager(whole)[0], batch.batch["token_level_scores"])


def test_a_worker_that_fails_is_heard(task, worker):
    tokenizer, request, columns = request_of(task, 3)
    request.batch["attention_mask"][1] = 0
    manager = Noting([RewardFunctionSpec("exact_match")], tokenizer)
    with pytest.raises(Exception, match="prompt 1 of the batch is empty"):
        generate_beside_scoring(worker, request, columns, manager, 60.0)


def judged(task):
    """The judge is the demo's own model: asked to sort an answer's digits, it is graded by the first it writes."""
    return (
        "reward.name=null",
        "reward.functions.judge={weight: 1.0, kwargs: {template: '{solution_str}>', pattern: '^([0-9])', high: 9}}",
        f"reward.functions.dense={{weight: 0.0, name: compute_score, path: {REWARD}}}",
        f"reward.judge.path={task.model}",
        "reward.judge.max_tokens=2",
        "reward.on_error=zero",
    )


@pytest.mark.parametrize("more", [(), PRIME, ("trainer.n_gpus_per_node=2",)])
def test_a_judge_on_the_workers_grades(task, tmp_path, more):
    run = task.train(
        tmp_path / "run",
        *SHORT,
        *more,
        *judged(task),
        f"trainer.rollout_data_dir={tmp_path / 'samples'}",
    )
    samples = [json.loads(line) for line in Path(tmp_path, "samples", "1.jsonl").read_text().splitlines()]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(task.model), AutoTokenizer.from_pretrained(task.model)
    for sample in samples[::5]:
        ids = torch.tensor([tokenizer(sample["response"] + ">")["input_ids"]])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert sample["score"] == (float(text[0]) if text and text[0].isdigit() else 0.0)
    assert run.metrics[-1]["reward/judge/mean"] == pytest.approx(np.mean([s["score"] for s in samples]), abs=1e-5)
    assert len({s["score"] for s in samples}) > 2

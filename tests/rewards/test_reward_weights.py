"""Several functions with weights, overlong shaping, dropped samples, and parts scored beside other work."""

import copy
import threading

import numpy as np
import pytest
import torch
from reward_samples import each

from meshrl.data.batch import DataProto, scored_rows
from meshrl.rewards.manager import OverlongBuffer, RewardManager, ScoredParts
from meshrl.rewards.results import RewardError
from meshrl.rewards.reward_calls import RewardFunctionSpec
from meshrl.trainer.rollout_source import add_greedy_baselines


def specs(**functions):
    return [RewardFunctionSpec(label, weight, function=f) for label, (weight, f) in functions.items()]


def test_the_score_is_the_weighted_sum_and_each_part_is_kept(data, tokenizer):
    right = each([1, {"score": 0, "acc": 0.5, "why": "no"}, 1, 0])
    steps = each([[0.5, -1], 0, [1, 2, 3, 4], {"score": 2, "acc": 0.25}])
    manager = RewardManager(specs(right=(2.0, right), steps=(-0.5, steps)), tokenizer)
    scores, extra, metrics = manager(data)
    assert scores.tolist() == [[-0.25, 2.5, 0, 0], [0, 0, 0, 0], [-0.5, -1, -1.5, 0], [-1, 0, 0, 0]]
    assert extra["right/score"].tolist() == [1, 0, 1, 0]
    assert extra["steps/score"].tolist() == [-0.5, 0, 10, 2]
    assert extra["acc"].tolist() == [None, 0.5, None, 0.25]
    assert extra["right/why"].tolist() == [None, "no", None, None]
    assert metrics == {
        "reward/errors": 0.0,
        "reward/right/mean": 0.5,
        "reward/steps/mean": 11.5 / 4,
        "reward_extra/acc/mean": 0.375,
        "reward_extra/right/acc/mean": 0.5,
        "reward_extra/steps/acc/mean": 0.25,
    }


def test_a_function_that_fails_takes_only_its_own_part(data, tokenizer):
    functions = specs(good=(1.0, each([1, 2, 3, 4])), bad=(1.0, each([10, KeyError("x"), 10, None])))
    scores, _, metrics = RewardManager(functions, tokenizer, on_error="zero")(data)
    assert scores.sum(1).tolist() == [11, 2, 13, 4]
    assert metrics["reward/errors"] == 2
    assert (metrics["reward/errors/raised"], metrics["reward/errors/invalid"]) == (1, 1)


def test_a_function_of_batches_keeps_its_way_in_every_manager(data, tokenizer):
    def many(solution_strs, **_):
        return [len(text) if text else ValueError("empty") for text in solution_strs]

    many.per_batch = True
    functions = specs(one=(1.0, each([1, 1, 1, 1])), many=(10.0, many))
    scores, _, metrics = RewardManager(functions, tokenizer, on_error="zero")(data)
    assert scores.sum(1).tolist() == [21, 11, 41, 1]
    assert metrics["reward/errors/raised"] == 1


def test_a_sum_that_float32_cannot_hold_is_a_failure(data, tokenizer):
    functions = specs(a=(1.0, each([3e38, 0, 0, 1])), b=(1.0, each([3e38, 0, 0, 1])))
    scores, _, metrics = RewardManager(functions, tokenizer, on_error="zero")(data)
    assert scores.sum(1).tolist() == [0, 0, 0, 2]
    assert metrics["reward/errors/nan"] == 1
    with pytest.raises(RewardError, match="sample 0"):
        RewardManager(functions, tokenizer)(data)


def test_labels_must_differ(tokenizer):
    with pytest.raises(ValueError, match=r"different labels, got \['a', 'a'\]"):
        RewardManager([RewardFunctionSpec("a", function=each([]))] * 2, tokenizer)


def test_overlong_answers_lose_in_a_straight_line():
    buffer = OverlongBuffer(max_length=10, length=4, penalty_factor=2.0)
    wanted = [min(-(n - (10 - 4)) / 4 * 2.0, 0) for n in range(11)]
    assert buffer.penalties(torch.arange(11)).tolist() == wanted
    assert wanted[6:] == [0, -0.5, -1, -1.5, -2]


def test_dapo_adds_the_penalty_to_the_last_token(data, tokenizer):
    buffer = OverlongBuffer(max_length=4, length=3)
    manager = RewardManager(each([1, 1, 1, 1]), tokenizer, name="dapo", overlong=buffer, log_overlong=True)
    scores, extra, metrics = manager(data)
    torch.testing.assert_close(scores.sum(1), torch.tensor([1 - 1 / 3, 1, 0, 1]))
    assert extra["overlong"].tolist() == [True, False, True, False]
    assert metrics["reward_extra/overlong/mean"] == 0.5


def test_dropped_samples_leave_batch_and_group(data, tokenizer):
    manager = RewardManager(each([1, KeyError("x"), [1.0], 2]), tokenizer, on_error="drop")
    before, texts = data.batch["response_mask"].clone(), manager.decode(data)
    metrics = manager.add_scores(data)
    assert manager.decode(data) == texts  # what could not be scored is what one wants to read
    assert data.batch["token_level_scores"].tolist() == [[0, 1, 0, 0], [0] * 4, [0] * 4, [2, 0, 0, 0]]
    assert data.batch["response_mask"].sum(1).tolist() == [2, 0, 0, 0]
    assert data.batch["response_mask"][0].equal(before[0])
    assert data.non_tensor_batch["reward_dropped"].tolist() == [False, True, True, False]
    assert data.non_tensor_batch["uid"].tolist() == ["u0", "u1/dropped1", "u2/dropped2", "u3"]
    assert metrics["reward/dropped"] == 2
    assert metrics["reward/errors"] == 2


def test_means_are_of_the_samples_that_are_kept(data, tokenizer):
    functions = specs(good=(1.0, each([1, 2, 3, 6])), bad=(1.0, each([10, KeyError("x"), 20, None])))
    metrics = RewardManager(functions, tokenizer, on_error="drop").add_scores(data)
    assert (metrics["reward/good/mean"], metrics["reward/bad/mean"]) == (2.0, 15.0)
    assert scored_rows(data).tolist() == [True, False, True, False]


def test_a_baselines_mean_is_of_the_prompts_whose_answer_has_a_score(data, tokenizer):
    """A prompt's samples are dropped with its greedy answer."""
    manager = RewardManager(each([1, KeyError("x"), 2, 6]), tokenizer, on_error="drop")
    metrics = add_greedy_baselines(data, data, 1, copy.deepcopy, manager.add_scores)
    assert metrics == {"reward/baseline/mean": 3.0, "reward/baseline/errors": 1.0}
    assert data.batch["response_mask"].any(1).tolist() == [True, False, True, False]  # the last answer is empty


def test_add_scores_leaves_a_good_batch_as_it_was(data, tokenizer):
    uids, mask = data.non_tensor_batch["uid"].tolist(), data.batch["response_mask"].clone()
    for policy in ("stop", "zero"):
        RewardManager(each([1, 2, 3, 4]), tokenizer, on_error=policy).add_scores(data)
        assert data.non_tensor_batch["uid"].tolist() == uids
        assert data.batch["response_mask"].equal(mask)
        assert data.batch["token_level_scores"].sum(1).tolist() == [1, 2, 3, 4]


VALUES = [{"score": 1, "acc": 1}, KeyError("x"), {"score": [1.0] * 4, "note": "n"}, 4]


@pytest.mark.parametrize("cut", [[[0, 1], [2, 3]], [[3], [1, 0], [2]], [[0, 1, 2, 3]]])
def test_parts_give_what_the_whole_batch_gives(data, tokenizer, cut):
    manager = RewardManager(each(VALUES), tokenizer, on_error="drop")
    whole = manager.score(data)
    parts = ScoredParts(manager)
    for rows in cut:
        parts.add(data[np.array(rows)], rows)
    found = parts.collect(timeout=60)
    assert found.token_level.equal(whole.token_level)
    assert {k: v.tolist() for k, v in found.infos.items()} == {k: v.tolist() for k, v in whole.infos.items()}
    assert found.metrics() == whole.metrics()
    batch = DataProto(data.batch.clone(), dict(data.non_tensor_batch), {})
    assert parts.add_scores(batch) == whole.metrics()
    assert batch.non_tensor_batch["uid"][1] == "u1/dropped1"


def test_adding_returns_at_once_and_collecting_waits(data, tokenizer):
    release = threading.Event()

    def waits(extra_info, **_):
        assert release.wait(60)
        return extra_info["n"]

    parts = ScoredParts(RewardManager(waits, tokenizer))
    for part in data.split(2):
        parts.add(part)
    with pytest.raises(TimeoutError, match="2 of 2 parts were not scored"):
        parts.collect(timeout=0.05)
    release.set()
    assert parts.collect(timeout=60).token_level.sum(1).tolist() == [0, 1, 2, 3]


def test_a_stop_in_a_part_reaches_who_collects(data, tokenizer):
    parts = ScoredParts(RewardManager(each(VALUES), tokenizer))
    for part in data.split(1):
        parts.add(part)
    with pytest.raises(RewardError, match=r"sample 0 \(u1"):
        parts.collect(timeout=60)


def test_rows_must_make_a_whole(data, tokenizer):
    parts = ScoredParts(RewardManager(each([1, 2, 3, 4]), tokenizer))
    with pytest.raises(ValueError, match="no parts"):
        parts.collect()
    with pytest.raises(ValueError, match="4 samples came with 1 row"):
        parts.add(data, [0])
    parts.add(data[np.array([0, 1])], [0, 2])
    with pytest.raises(ValueError, match="each once; got"):
        parts.collect()

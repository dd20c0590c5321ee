"""The single rewards of samples: by key, by function, with a reward model beside."""

import numpy as np
import pytest
import torch

from meshrl.config.rl import AlgorithmConfig
from meshrl.data.batch import DataProto, object_array
from meshrl.rewards.reward_calls import RewardFunctionSpec
from meshrl.trainer.rollout_source import reward_components

ONE = [RewardFunctionSpec("right")]
TWO = [RewardFunctionSpec("right", 2.0), RewardFunctionSpec("form", 0.5)]


def batch_of(**columns):
    scores = torch.tensor([[0.0, 1.0], [0.5, 0.0], [0.0, 0.25]])
    return DataProto.from_dict({"token_level_scores": scores}, {n: object_array(c) for n, c in columns.items()})


def test_the_named_keys_count_and_failures_are_zero():
    config = AlgorithmConfig(gdpo_reward_keys=["b", "a"], gdpo_reward_weights=[3.0, 1.0])
    found, weights = reward_components(batch_of(a=[1, None, True], b=[0.5, 2, -1]), config, TWO, 1.0)
    assert list(found) == ["b", "a"]
    assert found["a"].tolist() == [1, 0, 1]
    assert found["b"].tolist() == [0.5, 2, -1]
    assert weights == [3.0, 1.0]


def test_without_keys_each_function_is_one():
    batch = batch_of(**{"right/score": [1, 0, 1], "form/score": [0, 1, 1]})
    found, weights = reward_components(batch, AlgorithmConfig(), TWO, 1.0)
    assert {name: column.tolist() for name, column in found.items()} == {"right": [1, 0, 1], "form": [0, 1, 1]}
    assert weights == [2.0, 0.5]
    assert reward_components(batch_of(), AlgorithmConfig(), ONE, 1.0) is None


def test_a_reward_model_is_one_more():
    batch = batch_of()
    batch.non_tensor_batch["rm_score"] = np.array([0.5, -0.5, 0.25])
    found, weights = reward_components(batch, AlgorithmConfig(), ONE, 2.0)
    assert found["right"].tolist() == [0.0, 1.5, -0.25]
    assert found["rm_score"].tolist() == [0.5, -0.5, 0.25]
    assert weights == [1.0, 2.0]


@pytest.mark.parametrize(
    ("keys", "words"), [(["c"], "no reward function returned; there are a"), (["a"], "must be a number")]
)
def test_what_is_not_there_is_said(keys, words):
    with pytest.raises(ValueError, match=words):
        reward_components(batch_of(a=["x", 1, 2]), AlgorithmConfig(gdpo_reward_keys=keys), ONE, 1.0)

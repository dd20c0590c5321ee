"""How many steps a run has, and samples that do not divide by the ranks they are spread over."""

from types import SimpleNamespace

import pytest
import torch

from meshrl.config.rl import PPOConfig
from meshrl.data.batch import DataProto, object_array
from meshrl.data.sampling import BatchOrder
from meshrl.trainer.rollout_source import SampleSource, total_steps


def steps(rows: int, batch: int, epochs: int, filters: bool, given: int | None = None) -> int:
    config = PPOConfig()
    config.data.train_batch_size, config.trainer.total_epochs = batch, epochs
    config.algorithm.filter_groups.enable, config.trainer.total_training_steps = filters, given
    return total_steps(config, rows)


def test_steps_by_epochs():
    assert steps(100, 30, 4, filters=False) == 12
    assert steps(100, 30, 4, filters=True) == 13
    assert steps(100, 128, 30, filters=True) == 23
    assert steps(100, 128, 1, filters=False, given=5) == 5


@pytest.mark.parametrize("filters", [False, True])
def test_a_run_without_a_step_is_refused_with_the_numbers(filters):
    with pytest.raises(ValueError, match=r"100 rows in 1 epoch make no batch of data\.train_batch_size \(128\)"):
        steps(100, 128, 1, filters)


def test_a_run_with_more_epochs_goes_on_where_the_epochs_ended():
    data = SimpleNamespace(batch=list)

    def asked(epochs, state=None):
        order = BatchOrder(7, 3, shuffle=True, seed=1)
        if state:
            order.load_state_dict(state)
        trainer = SimpleNamespace(total_training_steps=None, total_epochs=epochs)
        source = SimpleNamespace(config=SimpleNamespace(trainer=trainer), order=order, train_data=data)
        return list(SampleSource.prompts(source)), order.state_dict()

    first, state = asked(1)
    rest, _ = asked(3, state)
    assert first + rest == asked(3)[0]
    assert len(first) == 2


def test_a_reward_models_mean_is_of_the_samples_that_have_a_score():
    """Also where the reward functions have dropped a sample after the model was asked for it."""
    scores = DataProto.from_dict({"rm_scores": torch.tensor([[0.0, 4.0], [0.0, 2.0], [0.0, 9.0]])})
    batch = DataProto.from_dict(
        {"token_level_scores": torch.zeros(3, 2), "response_mask": torch.tensor([[1, 1], [1, 1], [0, 0]])},
        {"reward_dropped": object_array([False, False, True])},
    )
    source = SimpleNamespace(config=PPOConfig())
    assert SampleSource.add_model_scores(source, batch, lambda: scores) == {"reward/rm_score_mean": 3.0}
    assert batch.batch["token_level_scores"].sum(1).tolist() == [4.0, 2.0, 0.0]


@pytest.mark.parametrize(("samples", "ranks"), [(8, 4), (6, 4), (3, 8)])
def test_samples_that_do_not_divide_by_the_ranks_are_answered_in_their_order(samples, ranks):
    lengths = torch.arange(samples, 0, -1)
    mask = (torch.arange(samples) < lengths[:, None]).long()
    batch = DataProto.from_dict({"input_ids": mask * lengths[:, None], "attention_mask": mask, "response_mask": mask})
    source = object.__new__(SampleSource)
    source.units, source.balanced_order = SimpleNamespace(dp_size=ranks), lambda work, *_: work.argsort()
    source.config = None
    asked = []

    def method(request: DataProto) -> DataProto:
        asked.append(request.batch["attention_mask"].sum(1).tolist())
        return DataProto.from_dict({"found": request.batch["input_ids"][:, 0].clone()})

    answer = SampleSource.call_balanced(source, method, batch)
    assert answer.batch["found"].tolist() == lengths.tolist()
    assert (asked[0] == lengths.tolist()) == (samples % ranks != 0)
    for is_apart in (False, True):
        group = SimpleNamespace(found=method, begin=lambda name, request: SimpleNamespace(get=lambda: method(request)))
        later = source.begin_balanced(group, "found", batch, ranks, is_apart)
        assert len(asked) == 2  # on the policy's devices at once, elsewhere when it is wanted
        assert later().batch["found"].tolist() == lengths.tolist()

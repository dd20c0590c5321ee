"""Dynamic sampling against a plain account of which groups differ, over rounds, steps and epochs."""

import itertools

import numpy as np
import pytest
import torch

from meshrl.config.rl import FilterGroupsConfig
from meshrl.data.batch import DataProto, concat_samples, object_array
from meshrl.data.sampling import BatchOrder
from meshrl.trainer.dynamic_sampling import DynamicSampling, informative_groups, metric_values

PAD, N, ROWS = 9, 3, 23


def prompts_of(rows):
    """Prompt `row` has as many tokens as its number's digits, so that widths differ between rounds."""
    width = max(len(str(row)) for row in rows)
    ids = torch.full((len(rows), width), PAD)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for at, row in enumerate(rows):
        digits = [int(d) for d in str(row)]
        ids[at, width - len(digits) :] = torch.tensor(digits)
        mask[at, width - len(digits) :] = 1
    uids = object_array([f"row-{row}-{at}" for at, row in enumerate(rows)])
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask}, {"uid": uids, "row": object_array(list(rows))}
    )


def differs(row):
    return row % 3 != 0


class Source:
    """Answers whose scores differ within the groups of every prompt that is no multiple of three."""

    def __init__(self, differs=differs, extra=True):
        self.differs, self.extra, self.asked = differs, extra, []

    def __call__(self, prompts):
        rows = list(prompts.non_tensor_batch["row"])
        self.asked.append(rows)
        data = prompts.repeat(N, interleave=True)
        ids, mask = data.batch["input_ids"], data.batch["attention_mask"]
        answers, inside = torch.full((len(data), 2), 5), torch.ones(len(data), 2, dtype=torch.long)
        scores = torch.zeros(len(data), 2)
        for at, row in enumerate(data.non_tensor_batch["row"]):
            scores[at, 1] = float(self.differs(row) and at % N == 0)
        attention = torch.cat([mask, inside], 1)
        tensors = {
            "prompts": ids,
            "responses": answers,
            "input_ids": torch.cat([ids, answers], 1),
            "attention_mask": attention,
            "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
            "response_mask": inside,
            "token_level_scores": scores,
        }
        columns = dict(data.non_tensor_batch)
        if self.extra and len(self.asked) % 2:
            columns["note"] = object_array(["said"] * len(data))
        metrics = {"reward/errors": 2.0, "agent/turns/mean": float(len(self.asked)), "training/epoch": len(self.asked)}
        return DataProto.from_dict(tensors, columns), metrics


def sampling(source, *, groups=5, size=4, most=6, limit=0, metric=None, epochs=None, order=None):
    order = order or BatchOrder(ROWS, size, True, seed=1)

    def prompts():
        for rows in order:
            if epochs is not None and order.epoch >= epochs:
                return
            yield prompts_of(rows.tolist())

    scored = (source(batch) for batch in prompts())
    config = FilterGroupsConfig(enable=True, metric=metric, max_num_gen_batches=limit)
    return DynamicSampling(
        config,
        groups_per_step=groups,
        samples_per_group=N,
        most_rounds=most,
        pad_token_id=PAD,
        next_batch=lambda: next(scored, None),
    )


def test_batches_hold_all_that_differ_in_the_order_asked_and_nothing_else():
    source = Source()
    sampler = sampling(source)
    taken, rounds_before = [], 0
    for _ in range(9):
        batch, metrics = sampler.next_batch()
        assert len(batch) == 5 * N
        rows = batch.non_tensor_batch["row"].reshape(-1, N)
        assert (rows == rows[:, :1]).all()
        taken += rows[:, 0].tolist()
        asked = list(itertools.chain(*source.asked))
        kept = [row for row in asked if differs(row)]
        assert taken == kept[: len(taken)]
        waiting = len(kept) - len(taken)
        new = source.asked[rounds_before:]
        assert metrics["filter_groups/rounds"] == len(new)
        assert metrics["filter_groups/generated_groups"] == sum(map(len, new))
        assert metrics["filter_groups/dropped_groups"] == sum(not differs(row) for part in new for row in part)
        assert metrics["filter_groups/surplus_groups"] == waiting
        assert metrics["reward/errors"] == 2.0 * len(new)
        if new:
            assert metrics["training/epoch"] == len(source.asked)
            assert metrics["agent/turns/mean"] == np.mean(range(rounds_before + 1, len(source.asked) + 1))
        rounds_before = len(source.asked)
    # No prompt is asked for twice in an epoch: five rounds of four are one.
    for epoch in range(2):
        seen = list(itertools.chain(*source.asked[5 * epoch : 5 * epoch + 5]))
        assert len(set(seen)) == len(seen)


def test_a_round_is_not_asked_for_while_the_surplus_is_enough():
    source = Source(differs=lambda row: True)
    sampler = sampling(source, groups=2, size=6)
    for expected in (1, 1, 1, 2):
        _, metrics = sampler.next_batch()
        assert len(source.asked) == expected
    assert metrics["filter_groups/rounds"] == 1
    assert metrics["filter_groups/score_before/mean"] == pytest.approx(1 / N)


def test_groups_of_one_prompt_from_two_epochs_stay_apart():
    sampler = sampling(Source(differs=lambda row: True), groups=30, size=20, most=9)
    batch, _ = sampler.next_batch()
    rows, uids = batch.non_tensor_batch["row"], batch.non_tensor_batch["uid"]
    assert len(set(rows)) < 30 == len(set(uids))


def test_prompts_of_other_widths_are_padded_on_the_left():
    batch, _ = sampling(Source(), groups=8, size=2, most=20).next_batch()
    for at in range(len(batch)):
        item = batch[at]
        inside = item.batch["attention_mask"].bool()
        digits = [int(d) for d in str(item.non_tensor_batch["row"])]
        assert item.batch["input_ids"][inside].tolist() == [*digits, 5, 5]
        assert item.batch["position_ids"][inside].tolist() == list(range(len(digits) + 2))
        assert item.batch["prompts"].tolist() == item.batch["input_ids"].tolist()[:-2]
        assert not inside[: -len(digits) - 2].any()
    assert None in batch.non_tensor_batch["note"].tolist()
    assert "said" in batch.non_tensor_batch["note"].tolist()


def test_it_goes_on_from_a_saved_state():
    source = Source()
    whole = sampling(source, order=BatchOrder(ROWS, 4, True, seed=1))
    expected = [whole.next_batch()[0].non_tensor_batch["uid"].tolist() for _ in range(4)]
    order = BatchOrder(ROWS, 4, True, seed=1)
    first = sampling(Source(), order=order)
    got = [first.next_batch()[0].non_tensor_batch["uid"].tolist() for _ in range(2)]
    state = first.state_dict()
    assert state["surplus"] is not None
    later = sampling(Source(), order=BatchOrder(ROWS, 4, True, 1, epoch=order.epoch, position=order.position))
    later.load_state_dict(state)
    got += [later.next_batch()[0].non_tensor_batch["uid"].tolist() for _ in range(2)]
    assert got == expected


def test_too_few_groups_stop_with_the_numbers():
    hopeless = Source(differs=lambda row: row == 7)
    with pytest.raises(ValueError, match=r"1 of the 5 groups .* after 6 rounds with 24 groups \(a whole epoch"):
        sampling(hopeless).next_batch()
    with pytest.raises(ValueError, match=r"after 2 rounds .*max_num_gen_batches=2.*raise the limit"):
        sampling(Source(), limit=2, groups=8).next_batch()


def test_the_end_of_the_data_ends_the_run():
    source = Source()
    sampler = sampling(source, groups=9, epochs=1)
    first, _ = sampler.next_batch()
    assert sampler.next_batch() is None
    # What was found beyond the first step waits for a run that goes on.
    waiting = sampler.state_dict()["surplus"].non_tensor_batch["row"].tolist()
    kept = [row for row in itertools.chain(*source.asked) if differs(row)]
    assert [*first.non_tensor_batch["row"], *waiting] == list(np.repeat(kept, N))
    assert waiting
    later = sampling(Source(), groups=len(waiting) // N)
    later.load_state_dict(sampler.state_dict())
    batch, metrics = later.next_batch()
    assert batch.non_tensor_batch["row"].tolist() == waiting
    assert metrics["filter_groups/rounds"] == 0


def test_what_counts_over_rounds_is_added_up_and_dropped_samples_have_no_score():
    def answers(batches):
        for number, batch in enumerate(batches):
            batch.non_tensor_batch["reward_dropped"] = object_array([number == 0] * len(batch))
            batch.batch["token_level_scores"] += 1.0
            yield batch, {"training/empty_batches": 2.0, "reward/baseline/errors": 1.0, "other": 3.0}

    source = Source(differs=lambda row: True)
    scored = answers(source(prompts_of(rows))[0] for rows in ([1, 2], [4, 5]))
    sampler = sampling(source, groups=2)
    sampler.more = lambda: next(scored)
    _, metrics = sampler.next_batch()
    assert (metrics["training/empty_batches"], metrics["reward/baseline/errors"], metrics["other"]) == (4.0, 2.0, 3.0)
    assert metrics["filter_groups/rounds"] == 2
    assert metrics["filter_groups/score_before/mean"] == pytest.approx(2 + 1 / N)


def test_which_groups_differ():
    scores = torch.zeros(12, 2)
    scores[[0, 4, 9, 10, 11], 1] = 1.0
    tensors = {"token_level_scores": scores, "response_mask": torch.ones(12, 2, dtype=torch.long)}
    batch = DataProto.from_dict(tensors, {"acc": object_array([0, 1, None] + [0] * 9)})
    assert informative_groups(batch, "seq_reward", 3).tolist() == [True, True, False, False]
    assert informative_groups(batch, None, 3).tolist() == [True, False, False, False]
    assert metric_values(batch, "acc").tolist() == [0, 1, 0] + [0] * 9
    batch.non_tensor_batch["reward_dropped"] = object_array([True] + [False] * 11)
    assert informative_groups(batch, "seq_reward", 3).tolist() == [False, True, False, False]
    batch.non_tensor_batch["reward_dropped"] = object_array([False] * 4 + [False, True, True] + [False] * 5)
    assert informative_groups(batch, "seq_reward", 3).tolist() == [True, True, False, False]
    batch.batch["response_mask"][4] = 0  # too old, and the only one of its group that was right
    assert informative_groups(batch, "seq_reward", 3).tolist() == [True, False, False, False]
    with pytest.raises(ValueError, match="does not return it; there are acc"):
        informative_groups(batch, "accuracy", 3)
    batch.non_tensor_batch["word"] = object_array(["x"] * 12)
    with pytest.raises(ValueError, match="must be a number"):
        metric_values(batch, "word")


def test_joining_keeps_rows_apart():
    parts = [Source()(prompts_of(rows))[0] for rows in ([3], [12, 5], [115])]
    whole = concat_samples(parts, PAD)
    assert whole.batch["prompts"].shape == (12, 3)
    assert np.array_equal(whole.non_tensor_batch["row"], [3] * 3 + [12] * 3 + [5] * 3 + [115] * 3)

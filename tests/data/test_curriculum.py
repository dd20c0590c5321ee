"""A sampler of the user's own: the rows it yields, what it hears, where it goes on, and how it fails."""

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from meshrl.config.data import DataConfig, SamplerConfig
from meshrl.data.batch import DataProto
from meshrl.data.curriculum import SamplerOrder

SAMPLERS = '''
import torch


class Backwards:
    def __init__(self, data_source, data_config):
        self.count = len(data_source)

    def __iter__(self):
        return iter(range(self.count - 1, -1, -1))


class Harder(Backwards):
    """Starts with the easy rows; moves on by one for each batch it hears of."""

    level = 0

    def __iter__(self):
        while self.level < self.count:
            yield self.level

    def update(self, batch):
        self.level += batch["solved"]

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


class Remembering(Backwards):
    """Goes on within a pass where its state says."""

    taken = 0

    def __iter__(self):
        while self.taken < self.count:
            self.taken += 1
            yield self.taken - 1
        self.taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


class Says(Backwards):
    def state_dict(self):
        return {"count": self.count}


class Loads(Backwards):
    def load_state_dict(self, state):
        raise AssertionError


class Scores(Remembering):
    """Its state is of kinds that JSON has not."""

    scores = {3: torch.tensor([0.5]), (0, 1): None}

    def state_dict(self):
        return {"taken": self.taken, "scores": self.scores}

    def load_state_dict(self, state):
        self.taken, self.scores = state["taken"], state["scores"]


class Generates(Remembering):
    def state_dict(self):
        return {"rows": (row for row in range(3))}


class AtOnce(Remembering):
    """Begins the next pass at once where its state is the end of one."""

    def __iter__(self):
        self.taken = self.taken % self.count
        while self.taken < self.count:
            self.taken += 1
            yield self.taken - 1


class Wrong(Backwards):
    def __iter__(self):
        return iter([0, self.count, 1, 2])


class Short(Backwards):
    def __iter__(self):
        return iter([0])
'''


@dataclass
class Data:
    """As much of a data set as a sampler sees."""

    rows: list[dict[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)


@pytest.fixture
def make(tmp_path: Path):
    (tmp_path / "samplers.py").write_text(SAMPLERS)

    def order(name, rows=7):
        config = DataConfig(sampler=SamplerConfig(str(tmp_path / "samplers.py"), name))
        return SamplerOrder([None] * rows, config, batch_size=3)

    return order


def take(order, count):
    return [batch.tolist() for batch in itertools.islice(iter(order), count)]


def test_rows_come_as_the_sampler_says_epoch_by_epoch(make):
    order = make("Backwards")
    assert take(order, 3) == [[6, 5, 4], [3, 2, 1], [6, 5, 4]]
    assert (order.epoch, order.position) == (1, 3)
    order.update({"solved": 1})


@pytest.mark.parametrize("name", ["Backwards", "Says", "Loads"])
def test_without_a_state_it_passes_over_what_was_taken(make, name):
    """A sampler has a state if it can both say and load it."""
    whole = take(make(name), 5)
    for done in range(5):
        first = make(name)
        take(first, done)
        later = make(name)
        later.load_state_dict(first.state_dict())
        assert take(later, 5 - done) == whole[done:]


def test_it_learns_from_what_was_trained_on(make):
    order = make("Harder")
    batches = iter(order)
    seen = []
    for _ in range(4):
        seen.append(next(batches).tolist())
        order.update({"solved": 2})
    assert seen == [[0, 0, 0], [2, 2, 2], [4, 4, 4], [6, 6, 6]]
    later = make("Harder")
    later.load_state_dict({"epoch": 0, "position": 6, "sampler": {"level": 5}})
    assert next(iter(later)).tolist() == [5, 5, 5]


def test_a_sampler_that_goes_wrong_is_named(make):
    with pytest.raises(ValueError, match="Wrong yielded 7, no row of 0 to 6"):
        take(make("Wrong"), 1)
    with pytest.raises(ValueError, match="Short yielded fewer than 3 rows"):
        take(make("Short"), 1)
    with pytest.raises(ValueError, match="has no function 'Missing'"):
        make("Missing")


def test_the_documented_example_goes_from_easy_to_hard_and_on_from_its_state(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "data.md"
    (code,) = re.findall(r"```python\n(# curriculum.py.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "curriculum.py").write_text(code)
    data = Data([{"extra_info": {"level": n % 9}} for n in range(900)])
    config = DataConfig(sampler=SamplerConfig(str(tmp_path / "curriculum.py"), "EasyFirst"))
    solved = DataProto.from_dict({"token_level_scores": torch.ones(10, 2)})

    def go_on(order, batches, count):
        found = []
        for _ in range(count):
            found.append(next(batches).tolist())
            if len(found) == 20:
                order.update(solved)
        return found

    order = SamplerOrder(data, config, 10)
    whole = go_on(order, iter(order), 100)
    levels = [sum(n % 9 for n in batch) / 10 for batch in whole]
    assert max(levels[:5]) < 1
    assert levels[25] > levels[19] + 0.5  # further ahead, once enough is solved
    assert sorted(itertools.chain(*whole[:90])) == list(range(900))
    first = SamplerOrder(data, config, 10)
    go_on(first, iter(first), 33)
    later = SamplerOrder(data, config, 10)
    later.load_state_dict(first.state_dict())
    assert [next(batch).tolist() for batch in [iter(later)] * 57] == whole[33:90]


def test_a_sampler_with_a_state_goes_on_when_less_than_a_batch_is_left(make):
    whole = take(make("Remembering"), 5)
    for done in range(1, 5):
        first = make("Remembering")
        assert take(first, done) == whole[:done]
        second = make("Remembering")
        second.load_state_dict(first.state_dict())
        assert take(second, 5 - done) == whole[done:]
        assert second.epoch == 2


def test_a_state_comes_back_from_json_as_it_was(make):
    first, later = make("Scores"), make("Scores")
    take(first, 1)
    later.sampler.scores = None
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert later.sampler.scores == {3: torch.tensor([0.5]), (0, 1): None}
    assert take(later, 1) == [[3, 4, 5]]
    with pytest.raises(ValueError, match=r"Generates.state_dict\(\)\['rows'\] is a builtins.generator"):
        make("Generates").state_dict()


@pytest.mark.parametrize("name", ["Remembering", "AtOnce"])
@pytest.mark.parametrize("rows", [6, 7])
def test_epochs_are_counted_alike_after_a_stop_at_an_epochs_end(make, name, rows):
    whole = make(name, rows)
    expected = [(batch.tolist(), whole.epoch, whole.position) for batch in itertools.islice(whole, 5)]
    for done in range(5):
        first, later = make(name, rows), make(name, rows)
        take(first, done)
        later.load_state_dict(first.state_dict())
        found = [(batch.tolist(), later.epoch, later.position) for batch in itertools.islice(later, 5 - done)]
        assert found == expected[done:]

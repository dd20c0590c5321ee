"""Steps that change nothing, counted in a row: what ends a run, and what a checkpoint remembers of them."""

from types import SimpleNamespace

import pytest

from meshrl.config.supervised import SFTConfig
from meshrl.config.trainer import TrainerConfig
from meshrl.telemetry.metrics import count_steps
from meshrl.trainer.health_checks import NonFiniteError, NonFiniteSteps


@pytest.fixture
def make(tmp_path):
    """Counters whose dumps are full already."""
    for number in range(3):
        (tmp_path / f"global_step_{number}").mkdir()
    return lambda in_a_row=3, limit=None: NonFiniteSteps(limit, in_a_row, SimpleNamespace(folder=tmp_path), print)


def steps(role, *skipped, of=2):
    """The metrics of an update for each step: so many of its optimizer steps were skipped."""
    return [count_steps(role, {f"{role}/skipped_steps": [1.0] * n + [0.0] * (of - n)}) for n in skipped]


def ends_after(counter, found):
    """The step that ends a run with these metrics; None if it runs on."""
    for number, metrics in enumerate(found, 1):
        counter.check(SimpleNamespace(step=number), metrics, None)
        try:
            counter.enforce(number)
        except NonFiniteError as error:
            return number, str(error)
    return None


def test_only_steps_in_a_row_that_change_nothing_end_a_run(make):
    for role in ("actor", "critic"):
        assert ends_after(make(), steps(role, 2, 2, 0, 2, 2, 1, 2, 2, 1)) is None
        assert ends_after(make(), steps(role, 0, 2, 2, 2, 2))[0] == 4
    supervised = [{"train/skipped_steps": number} for number in (1.0, 1.0, 0.0, 1.0, 1.0, 1.0)]
    assert ends_after(make(), supervised)[0] == 6
    assert ends_after(make(in_a_row=None), supervised * 9) is None
    assert ends_after(make(in_a_row=0), supervised * 9) is None


def test_an_actor_that_is_nan_is_seen_beside_a_critic_that_learns(make):
    both = [a | c for a, c in zip(steps("actor", 2, 2, 2), steps("critic", 0, 0, 0), strict=True)]
    number, message = ends_after(make(), both)
    assert number == 3
    for words in (
        "3 steps in a row changed nothing",
        "every gradient of the actor was NaN",
        "max_nan_steps_in_a_row=3",
    ):
        assert words in message
    assert "Look at step 1 (actor/grad_norm" in message
    assert "checkpoints of step 0 and earlier" in message


def test_steps_without_an_update_neither_count_nor_forgive(make):
    """While the critic warms up the actor has no update."""
    found = [*steps("actor", 2, 2), *steps("critic", 0, 0), *steps("actor", 2)]
    assert ends_after(make(), found)[0] == 5


def test_the_count_goes_on_after_a_restart(make):
    first, found = make(), steps("actor", 2, 2)
    assert ends_after(first, found) is None
    second = make()
    second.load_state_dict(first.state_dict())
    assert second.count == 4
    assert ends_after(second, steps("actor", 2))[0] == 1
    forgiven = make()
    forgiven.load_state_dict(first.state_dict())
    assert ends_after(forgiven, steps("actor", 1, 2, 2)) is None
    old = make()
    old.load_state_dict({"nonfinite_steps": 4})  # as written by earlier versions
    assert old.count == 4
    assert old.rows == {}


def test_the_limit_over_the_whole_run_is_still_there(make):
    assert ends_after(make(in_a_row=9, limit=3), steps("actor", 1, 0, 1, 0, 1, 1))[0] == 6


def test_ten_by_default_in_every_kind_of_run():
    assert TrainerConfig().max_nan_steps_in_a_row == SFTConfig().trainer.max_nan_steps_in_a_row == 10

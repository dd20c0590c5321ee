"""Estimators, losses and libraries of the user's own: accepted where they can be called, refused with what is wrong."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.config import ConfigError, PPOConfig, SFTConfig, check_config, load_config
from meshrl.config.validate_algorithm import with_absolute_files
from meshrl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS

TABLES = (ADVANTAGE_ESTIMATORS, POLICY_LOSSES, REWARD_MANAGERS)
MakePPO = Callable[..., PPOConfig]
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
LIB = "actor_rollout_ref.model.external_lib"
CODE = """
def loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, stats):
    ...

def loose(log_prob, **others): ...

def without_stats(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights): ...

def demanding(log_prob, temperature, **others): ...

def positional(log_prob, /, **others): ...

def estimate(token_level_rewards, response_mask, index, power=1.0): ...

def with_values(token_level_rewards, response_mask, values): ...

def may_have_values(token_level_rewards, response_mask, values=None): ...

def with_baselines(token_level_rewards, response_mask, reward_baselines): ...

def with_squares(token_level_rewards, response_mask, sum_pi_squared): ...

number = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(CODE)
    return path


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    """A library that registers by meshrl's tables, as register_policy_loss and register_adv_est do."""
    path = tmp_path / "lib.py"
    body = CODE.replace("def loss(", '@POLICY_LOSSES.register("mine")\ndef loss(')
    body = body.replace("def estimate(", '@ADVANTAGE_ESTIMATORS.register("my_estimate")\ndef estimate(')
    path.write_text(f"from meshrl.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES\n{body}")
    return path


@pytest.fixture(autouse=True)
def tables_as_before() -> object:
    before = [(table, dict(table._functions)) for table in TABLES]
    yield
    for table, functions in before:
        table._functions = functions


@pytest.mark.parametrize("function", ["loss", "loose"])
def test_a_loss_by_its_file(fine: MakePPO, code: Path, function: str) -> None:
    assert check_config(fine(f"{LOSS}={code}:{function}")) == []
    # What is not known of it is not held against the keys that it may read.
    assert check_config(fine(f"{LOSS}={code}:{function}", "actor_rollout_ref.actor.policy_loss.tau_pos=2")) == []


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("losss", "has no function 'losss'; it has loss, loose"),
        ("number", "is a int, not a function"),
        ("without_stats", "it takes no argument stats: it is called by name with old_log_prob, log_prob"),
        ("demanding", "it needs temperature; what it can be given by name is old_log_prob, "),
        ("positional", "it needs log_prob; what it can be given by name"),
    ],
)
def test_a_loss_that_cannot_be_called(fine: MakePPO, code: Path, function: str, words: str) -> None:
    (problem,) = check_config(fine(f"{LOSS}={code}:{function}"))
    assert problem.startswith(LOSS)
    assert words in problem
    assert check_config(fine(f"{LOSS}={code}:{function}"), check_files=False) == []


def test_keyword_arguments_of_ones_own(fine: MakePPO, code: Path) -> None:
    own = f"{LOSS}={code}:demanding"
    kwargs = "actor_rollout_ref.actor.policy_loss.loss_kwargs.temperature=2"
    assert check_config(fine(own, kwargs)) == []
    (problem,) = check_config(fine(f"{LOSS}={code}:loss", kwargs))
    assert "it takes no argument temperature" in problem
    (problem,) = check_config(fine(kwargs))
    assert problem.endswith("loss_kwargs is for a loss of your own, not for vanilla")
    estimator = f"algorithm.adv_estimator={code}:estimate"
    assert check_config(fine(estimator, "algorithm.adv_kwargs.power=2")) == []
    (problem,) = check_config(fine(estimator, "algorithm.adv_kwargs.height=2"))
    assert "it takes no argument height" in problem
    (problem,) = check_config(fine("algorithm.adv_kwargs.power=2"))
    assert problem == "algorithm.adv_kwargs is for an estimator of your own, not for grpo"


def test_an_estimator_and_what_it_is_given(fine: MakePPO, code: Path) -> None:
    def problems(function: str, *more: str) -> list[str]:
        return check_config(fine(f"algorithm.adv_estimator={code}:{function}", *more))

    assert problems("estimate") == problems("estimate", "algorithm.gamma=0.9", "actor_rollout_ref.rollout.n=1") == []
    assert problems("with_squares") == problems("may_have_values") == []
    assert problems("with_values", "critic.enable=true") == problems("may_have_values", "critic.enable=true") == []
    (problem,) = problems("with_values")
    assert problem.endswith("with_values needs values, which a critic gives: set critic.enable=true")
    (problem,) = problems("estimate", "critic.enable=true")
    assert problem.startswith("critic.enable=true has no effect with algorithm.adv_estimator=")
    (problem,) = problems("estimate", "critic.cliprange_value=0.3")
    assert problem.startswith("critic.cliprange_value has no effect with algorithm.adv_estimator=")
    (problem,) = problems("with_baselines")
    assert "it needs reward_baselines; what it can be given by name is token_level_rewards, " in problem
    (problem,) = problems("with_squares", "algorithm.rollout_correction.bypass_mode=true")
    assert "it needs sum_pi_squared" in problem


@pytest.mark.parametrize("as_module", [False, True])
def test_names_that_a_library_registers(
    fine: MakePPO, lib: Path, monkeypatch: pytest.MonkeyPatch, as_module: bool
) -> None:
    monkeypatch.syspath_prepend(str(lib.parent))
    monkeypatch.delitem(sys.modules, "lib", raising=False)
    name = f"{LIB}={'lib' if as_module else lib}"
    names = (f"{LOSS}=mine", "algorithm.adv_estimator=my_estimate")
    assert check_config(fine(name, *names, "trainer.n_gpus_per_node=2")) == []
    (problem,) = check_config(fine(name, f"{LOSS}=mien"))
    assert problem.startswith(f"{LOSS}=mien: did you mean mine? choices are vanilla, ")
    assert ", mine" in problem
    assert problem.endswith(", or file.py:name of your own")
    (problem,) = check_config(fine(name, "algorithm.adv_estimator=gropo"))
    assert "did you mean grpo?" in problem


def test_without_a_library_an_unknown_name_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="did you mean gspo") as error:
        load_config("grpo", [f"{LOSS}=gsop"])
    assert "or file.py:name of your own" in str(error.value)


def test_a_name_of_this_process_alone_is_not_there_in_workers(fine: MakePPO) -> None:
    POLICY_LOSSES.register("here")(lambda **arguments: None)
    assert check_config(fine(f"{LOSS}=here", "trainer.n_gpus_per_node=1")) == []
    (problem,) = check_config(fine(f"{LOSS}=here", "trainer.n_gpus_per_node=2"))
    assert problem == f"{LOSS}=here is registered in this process alone: set {LIB} to the module that does it"


@pytest.mark.parametrize("key", [LIB, "reward_model.model.external_lib"])
def test_a_library_that_cannot_be_imported(fine: MakePPO, tmp_path: Path, key: str, make_model: object) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module_at_all")
    more = ["reward_model.enable=true", f"reward_model.model.path={tmp_path / 'model'}"] if "reward" in key else []
    for path in ("no_such_module_at_all", broken, tmp_path / "missing.py"):
        (problem,) = check_config(fine(f"{key}={path}", *more))
        assert problem.startswith(f"{key}: cannot import {path}: ")
        assert problem.endswith("name a .py file, or a module that is installed or on PYTHONPATH")


def test_sft_imports_its_library_too(fine_sft: Callable[..., SFTConfig], code: Path) -> None:
    assert check_config(fine_sft(f"model.external_lib={code}")) == []
    (problem,) = check_config(fine_sft("model.external_lib=nowhere.py"))
    assert problem.startswith("model.external_lib: cannot import nowhere.py")


def test_workers_get_whole_paths(fine: MakePPO, code: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(code.parent)
    config = fine(f"{LOSS}=own.py:loss", f"{LIB}=own.py")
    told = with_absolute_files(config).actor_rollout_ref
    assert told.actor.policy_loss.loss_mode == f"{code.resolve()}:loss"
    assert told.model.external_lib == str(code.resolve())
    assert config.actor_rollout_ref.model.external_lib == "own.py"
    plain = with_absolute_files(fine(f"{LIB}=package.module")).actor_rollout_ref
    assert (plain.actor.policy_loss.loss_mode, plain.model.external_lib) == ("vanilla", "package.module")


MANAGERS = """
from meshrl.rewards.manager import RewardManager, register_reward_manager

@register_reward_manager("mine")
class Mine(RewardManager): ...

class Other:
    def __init__(self, functions, tokenizer, **how): ...
"""


def test_a_reward_manager(fine: MakePPO, tmp_path: Path) -> None:
    path = tmp_path / "managers.py"
    path.write_text(MANAGERS)
    assert check_config(fine(f"reward_manager.name={path}:Mine")) == []
    assert check_config(fine("reward_manager.name=mine", f"{LIB}={path}")) == []
    (problem,) = check_config(fine(f"reward_manager.name={path}:Other"))
    assert problem.endswith(":Other must be a subclass of meshrl.rewards.manager.RewardManager")
    (problem,) = check_config(fine(f"reward_manager.name={path}:Mien"))
    assert "has no function 'Mien'; it has RewardManager, register_reward_manager, Mine, Other" in problem
    with pytest.raises(ConfigError, match="did you mean prime"):
        load_config("grpo", ["reward_manager.name=pime"])


def test_the_dry_run_ends_with_2(fine: MakePPO, code: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = fine()
    words = ["train", "grpo", f"data.train_files={config.data.train_files}", "reward.name=exact_match"]
    words += [f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path}", "--dry-run"]
    assert main([*words, f"{LOSS}={code}:loss"]) == 0
    assert main([*words, f"{LOSS}={code}:without_stats"]) == 2
    assert "it takes no argument stats" in capsys.readouterr().err
    assert main([*words, f"{LOSS}=nowhere.py:loss"]) == 2
    assert "cannot import nowhere.py: FileNotFoundError" in capsys.readouterr().err

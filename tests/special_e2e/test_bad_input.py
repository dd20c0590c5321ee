"""Bad input ends with a clear message or a counted skip; it never trains on nonsense."""

import json

import pytest
from rich.console import Console

from meshrl.config.load import load_config
from meshrl.config.validate import check_config
from meshrl.rewards.results import RewardError
from meshrl.trainer.launch import train

SHORT = (
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "data.val_files=[]",
    "trainer.test_freq=-1",
)


def own_reward(tmp_path, body):
    file = tmp_path / "reward.py"
    file.write_text(
        f"import math\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
    )
    return (f"custom_reward_function.path={file}", "reward.name=null")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('no such key')", "KeyError: 'no such key'"),
        ("return math.nan", "finite number, got nan"),
        ("return 'good'", "finite number, got 'good'"),
        ("return {'points': 1}", "needs the key 'score'"),
    ],
)
def test_a_failing_reward_stops_with_its_sample(task, tmp_path, body, said):
    with pytest.raises(RewardError, match="failed on all 64 samples, first on sample 0") as caught:
        task.train(tmp_path / "run", *SHORT, *own_reward(tmp_path, body))
    assert said in str(caught.value)


def test_a_reward_that_fails_on_the_whole_first_batch_is_told_at_once(task, tmp_path):
    """With zero it ends the run, which would learn nothing; with drop eight such batches are passed over first."""
    small = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
    own = own_reward(tmp_path, "raise KeyError('no such key')")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("of an earlier run")
    with pytest.raises(
        RewardError, match=r"all 64 samples, first on sample 0 .*KeyError(.|\n)*reward.py:3 in compute_"
    ):
        task.train(tmp_path / "run", *SHORT, *own, "reward.on_error=zero")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "of an earlier run"
    with (
        (tmp_path / "screen.txt").open("w") as out,
        pytest.raises(RewardError, match="no sample of 8 batches in a row is left"),
    ):
        train(task.config(tmp_path / "drop", *SHORT, *small, *own, "reward.on_error=drop"), console=Console(file=out))
    said = (tmp_path / "screen.txt").read_text()
    assert said.count("warning: the reward function failed on all 8 samples, first on sample 0") == 1


def test_a_failing_reward_is_counted_where_asked(task, tmp_path):
    body = "return math.nan if extra_info['digits'][0] < '5' else 1.0"
    run = task.train(tmp_path / "run", *SHORT, *own_reward(tmp_path, body), "reward.on_error=zero")
    for row in run.metrics:
        assert row["reward/errors"] == 64 * (1 - row["critic/score/mean"])
        assert 0 < row["reward/errors"] < 64


def test_a_batch_of_which_nothing_is_left_is_passed_over(task, tmp_path):
    count = tmp_path / "count"
    count.write_text("")
    body = f"open('{count}', 'a').write('.'); assert len(open('{count}').read()) > 64, 'down'; return len(solution_str)"
    drop = (*own_reward(tmp_path, body), "reward.on_error=drop")
    run = task.train(tmp_path / "run", *SHORT, *drop)
    assert [row["training/empty_batches"] for row in run.metrics] == [1, 0]
    assert [row["reward/errors"] for row in run.metrics] == [64, 0]


def test_a_batch_reward_of_the_wrong_length(task, tmp_path):
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return [1.0] * 5\n"
    )
    with pytest.raises(RewardError, match="5 scores for 64 samples"):
        task.train(
            tmp_path / "run",
            *SHORT,
            f"custom_reward_function.path={file}",
            "reward.name=null",
            "reward_manager.name=batch",
        )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "no rows"),
        ('{"prompt": "123456>"}\n{"prompt": \n', "line 2: not valid JSON"),
        ('{"question": "123456>"}\n', "column 'prompt' is missing"),
        ('{"prompt": "123456123456>"}\n' * 16, "max_prompt_length=8"),
        ('{"prompt": "123456>"}\n' * 3, "fewer than one batch of 16"),
    ],
)
def test_bad_data_sets(task, tmp_path, content, said):
    file = tmp_path / "bad.jsonl"
    file.write_text(content)
    config = task.config(tmp_path / "run", *SHORT)
    config.data.train_files = [str(file)]
    with pytest.raises(ValueError, match=said):
        train(config, console=Console(quiet=True))


def test_a_missing_model_is_found_before_anything_starts(task, tmp_path):
    config = load_config("demo_grpo", [f"actor_rollout_ref.model.path={tmp_path / 'nowhere'}"]).config
    assert any("nowhere" in problem for problem in check_config(config))


def test_a_model_without_weights(task, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((task.model / name).read_bytes())
    config = task.config(tmp_path / "run", *SHORT)
    config.actor_rollout_ref.model.path = str(folder)
    with pytest.raises(Exception, match=r"no file named|lacks|weights"):
        train(config, console=Console(quiet=True))


def test_prompts_that_are_too_long_are_dropped_and_counted(task, tmp_path):
    file = tmp_path / "mixed.jsonl"
    rows = [{"prompt": "1" * (6 + 6 * (i % 2)) + ">", "extra_info": {"digits": "111111"}} for i in range(128)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = task.config(
        tmp_path / "run", *SHORT, "data.filter_overlong_prompts=true", "trainer.total_training_steps=1"
    )
    config.data.train_files = [str(file)]
    out = (tmp_path / "screen.txt").open("w")
    train(config, console=Console(file=out, width=160))
    out.close()
    assert "training prompts: 64 dropped, 0 truncated, 64 left" in (tmp_path / "screen.txt").read_text()

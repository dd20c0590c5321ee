"""Ways to read and order data, judges and gates: what they ask of the rest of the config."""

import pytest

from meshrl.config import check_config, load_config, unsupported

STREAM = "data.streaming=true"
STEPS = "trainer.total_training_steps=9"
SAMPLER = ["data.sampler.class_path=a.py", "data.sampler.class_name=B"]
JUDGE = ["reward.name=judge", "reward.judge.path=judge"]


def problems(*overrides):
    config = load_config("grpo", overrides).config
    assert unsupported(config) == []
    return check_config(config, check_files=False)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train_files=[a,b]", "data.train_weights=[1]"], "1 entries for 2"),
        (["data.train_files=[a,b]", "data.train_weights=[0,0]"], "all 0"),
        ([STREAM], "set trainer.total_training_steps"),
        ([STREAM, STEPS, "algorithm.filter_groups.enable=true"], "max_num_gen_batches"),
        ([STREAM, STEPS, "data.filter_overlong_prompts_workers=2"], "has no effect"),
        (["data.shuffle_buffer=5"], "without data.streaming"),
        (SAMPLER[:1], "go together"),
        ([*SAMPLER, STREAM, STEPS], "data.sampler and data.streaming"),
        ([*SAMPLER, "data.train_files=[a]", "data.train_weights=[1]"], "data.sampler and data.train_weights"),
        (["reward.name=judge", "reward.kwargs.url=u"], "set reward.kwargs.model, or reward.judge.path"),
        ([*JUDGE, "reward.kwargs.url=u"], "is for a judge behind a URL"),
        ([*JUDGE, "reward_manager.overlap=true"], "waits until they have generated"),
        (["reward.name=exact_match", "reward.judge.path=judge"], "set reward.name=judge"),
        (["reward.name=exact_match", "reward.judge.max_tokens=9"], "without reward.judge.path"),
        (
            [*JUDGE, "reward.judge.engine=hf", "reward.judge.gpu_memory_utilization=0.3"],
            "only read by reward.judge",
        ),
        (["trainer.gates.limits={a: {most: 1}}"], "has no most"),
    ],
)
def test_what_does_not_go_together_is_said(overrides, words):
    (problem,) = problems(*overrides)
    assert words in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_files=[a,b]", "data.train_weights=[3,1]"],
        [STREAM, STEPS, "data.shuffle_buffer=5", "data.train_files=[a]", "data.train_weights=[3]"],
        SAMPLER,
        ["reward.name=judge", "reward.kwargs.url=u", "reward.kwargs.model=m"],
        [*JUDGE, "reward.kwargs.low=-1"],
        [*JUDGE, "reward.judge.engine=hf"],
        ["reward.functions.judge={weight: 1, kwargs: {high: 9}}", "reward.judge.path=judge"],
        ["trainer.gates.limits={actor/grad_norm: 1, actor/entropy: {min: 0.1, then: stop}}"],
    ],
)
def test_what_goes_together_is_not(overrides):
    assert problems(*overrides) == []

"""Ways to read and order data, judges and gates: what they ask of the rest of the config."""

import pytest

from meshrl.config import check_config, load_config, unsupported

STREAM = "data.streaming=true"
STEPS = "trainer.total_training_steps=9"
CUSTOM = ["data.custom_cls.path=a.py", "data.custom_cls.name=B"]
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
        (CUSTOM[1:], "data.custom_cls.path and name go together"),
        ([*CUSTOM, STREAM, STEPS], "data.streaming must be false"),
        ([*CUSTOM, "data.train_files=[a]", "data.train_weights=[1]"], "are for files that are read here"),
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
        [*CUSTOM, *SAMPLER],
        ["reward.name=judge", "reward.kwargs.url=u", "reward.kwargs.model=m"],
        [*JUDGE, "reward.kwargs.low=-1"],
        [*JUDGE, "reward.judge.engine=hf"],
        ["reward.functions.judge={weight: 1, kwargs: {high: 9}}", "reward.judge.path=judge"],
        ["trainer.gates.limits={actor/grad_norm: 1, actor/entropy: {min: 0.1, then: stop}}"],
    ],
)
def test_what_goes_together_is_not(overrides):
    assert problems(*overrides) == []


CLASSES = """
class Rows:
    def __init__(self, files, tokenizer, config): ...
    def __len__(self): return 1024
    def __getitem__(self, number): return {"prompt": "6 * 7"}

class Short(Rows):
    def __init__(self, files): ...

class NoLength:
    def __init__(self, files, tokenizer, config, **more): ...
    __getitem__ = None

def make(files, tokenizer, config): return Rows(files, tokenizer, config)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Rows", None),
        ("make", None),
        ("Row", "has no function 'Row'; it has Rows, Short"),
        ("Short", "Short cannot be called with (files, tokenizer, config): too many positional arguments"),
        ("NoLength", "NoLength has no __len__"),
    ],
)
def test_a_custom_class_is_looked_at_and_its_files_are_not(fine, tmp_path, name, words):
    (tmp_path / "rows.py").write_text(CLASSES)
    custom = (f"data.custom_cls.path={tmp_path / 'rows.py'}", f"data.custom_cls.name={name}")
    for files in ("[]", "['somewhere://else.csv']"):
        found = check_config(fine(*custom, f"data.train_files={files}"))
        assert [words in problem for problem in found] == ([] if words is None else [True]), found

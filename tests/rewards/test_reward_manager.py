"""Whatever a reward function does, the manager scores the right token, stops with a clear error, or counts."""

import math
import threading
from decimal import Decimal

import failing_functions
import numpy as np
import pytest
import torch
from reward_samples import ANSWERS, TRUTHS, each

from meshrl.rewards.manager import RewardManager
from meshrl.rewards.results import RewardError, as_result
from meshrl.rewards.reward_calls import RewardFunctionSpec


def score(data, tokenizer, function, *, per_batch=False, **options):
    return RewardManager(function, tokenizer, name="batch" if per_batch else "naive", **options)(data)


def test_the_score_lies_on_the_last_token_of_each_answer(data, tokenizer):
    scores, extra, metrics = score(data, tokenizer, each([1.0, -2.0, 0.5, 3.0]))
    assert scores.dtype == torch.float32
    assert scores.tolist() == [[0, 1, 0, 0], [-2, 0, 0, 0], [0, 0, 0, 0.5], [3, 0, 0, 0]]
    assert extra == {}
    assert metrics == {"reward/errors": 0.0}


def test_the_function_sees_what_belongs_to_the_sample(data, tokenizer):
    seen = []

    def function(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return 0

    score(data, tokenizer, function)
    assert seen == [(f"s{i}", ANSWERS[i], TRUTHS[i], {"n": i}) for i in range(4)]


def test_the_batch_manager_asks_once_with_lists(data, tokenizer):
    seen = []

    def function(**columns):
        seen.append(columns)
        return [0.0, 1.0, 2.0, 3.0]

    scores, _, _ = score(data, tokenizer, function, per_batch=True)
    assert seen == [
        {
            "data_sources": ["s0", "s1", "s2", "s3"],
            "solution_strs": ANSWERS,
            "ground_truths": TRUTHS,
            "extra_infos": [{"n": i} for i in range(4)],
        }
    ]
    assert scores.sum(1).tolist() == [0.0, 1.0, 2.0, 3.0]


def test_ends_and_tool_output_are_not_decoded_but_the_score_comes_after_them(data, tokenizer):
    tokens = ["1", "a", "b", tokenizer.eos_token]
    data.batch["responses"][0] = torch.tensor(tokenizer.convert_tokens_to_ids(tokens))
    data.batch["response_mask"][0] = torch.tensor([1, 0, 0, 1])
    data.batch["attention_mask"][0] = 1
    manager = RewardManager(each([5, 0, 0, 0]), tokenizer)
    assert manager.decode(data)[0] == "1"
    assert manager(data)[0][0].tolist() == [0, 0, 0, 5]


@pytest.mark.parametrize("per_batch", [False, True])
def test_numbers_of_every_kind(data, tokenizer, per_batch):
    values = [True, np.float16(0.5), torch.tensor([2.0]), {"score": np.int64(-3)}]
    function = (lambda **_: values) if per_batch else each(values)
    scores, _, metrics = score(data, tokenizer, function, per_batch=per_batch)
    assert scores.sum(1).tolist() == [1.0, 0.5, 2.0, -3.0]
    assert metrics["reward/errors"] == 0


@pytest.mark.parametrize("whole", [np.arange(4), torch.arange(4.0), (0, 1, 2, 3)], ids=["array", "tensor", "tuple"])
def test_the_batch_manager_takes_arrays(data, tokenizer, whole):
    scores, _, _ = score(data, tokenizer, lambda **_: whole, per_batch=True)
    assert scores.sum(1).tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("per_batch", [False, True])
def test_extra_infos_are_columns_with_none_where_they_were_not_given(data, tokenizer, per_batch):
    same = {"score": 1.0, "acc": 1.0, "parts": [1, 2]}
    values = [same, 0.5, same, {"score": 0, "note": "no", "parts": np.ones(2)}]
    function = (lambda **_: values) if per_batch else each(values)
    scores, extra, _ = score(data, tokenizer, function, per_batch=per_batch)
    assert scores.sum(1).tolist() == [1.0, 0.5, 1.0, 0.0]
    assert set(extra) == {"acc", "parts", "note"}
    assert all(column.shape == (4,) and column.dtype == object for column in extra.values())
    assert extra["acc"].tolist() == [1.0, None, 1.0, None]
    assert extra["note"].tolist() == [None, None, None, "no"]
    assert extra["parts"][0] == [1, 2]
    assert same == {"score": 1.0, "acc": 1.0, "parts": [1, 2]}  # the function's own dict is left as it was


def test_extra_infos_that_are_all_lists_stay_one_dimensional(data, tokenizer):
    _, extra, _ = score(data, tokenizer, each([{"score": 0, "pair": [i, i]} for i in range(4)]))
    assert extra["pair"].shape == (4,)
    assert extra["pair"][2] == [2, 2]


BAD = {
    "raises": ("raised", KeyError("digits")),
    "exits": ("raised", SystemExit(0)),
    "nan": ("nan", math.nan),
    "infinite": ("nan", -math.inf),
    "too large for float32": ("nan", 1e39),
    "too large for a float": ("nan", 10**400),
    "none": ("invalid", None),
    "text": ("invalid", "1.0"),
    "two in a list": ("length", [1.0, 2.0]),
    "two numbers": ("length", torch.tensor([1.0, 2.0])),
    "decimal": ("invalid", Decimal(1)),
    "no score": ("invalid", {"reward": 1.0}),
    "nan inside": ("nan", {"score": math.nan, "acc": 1.0}),
    "no number in acc": ("invalid", {"score": 1.0, "acc": "yes"}),
    "nan in acc": ("nan", {"score": 1.0, "acc": math.nan}),
}


# A batch whose function raises fails as a whole: see below.
CASES = [
    (name, per_batch) for name in BAD for per_batch in (False, True) if not (per_batch and name in ("raises", "exits"))
]


@pytest.mark.parametrize(("name", "per_batch"), CASES)
def test_a_bad_answer_stops_or_counts(data, tokenizer, name, per_batch):
    kind, bad = BAD[name]
    values = [1.0, bad, 2.0, bad]
    function = (lambda **_: values) if per_batch else each(values)
    with pytest.raises(RewardError, match=r"sample 1 \(u1, answer '3'\).*reward.on_error=zero") as stopped:
        score(data, tokenizer, function, per_batch=per_batch)
    assert stopped.value.__cause__ is not None
    scores, extra, metrics = score(data, tokenizer, function, per_batch=per_batch, on_error="zero")
    assert scores.sum(1).tolist() == [1.0, 0.0, 2.0, 0.0]
    assert metrics == {"reward/errors": 2.0, f"reward/errors/{kind}": 2.0}
    assert extra == {}


@pytest.mark.parametrize("error", [TimeoutError("the sandbox is down"), SystemExit("the sandbox is down")])
def test_a_batch_that_fails_as_a_whole(data, tokenizer, error):
    def function(**_):
        raise error

    with pytest.raises(RewardError, match=f"failed on a batch: {type(error).__name__}: the sandbox is down"):
        score(data, tokenizer, function, per_batch=True)
    scores, _, metrics = score(data, tokenizer, function, per_batch=True, on_error="zero")
    assert not scores.any()
    assert metrics == {"reward/errors": 4.0, "reward/errors/raised": 4.0}


@pytest.mark.parametrize(
    ("answers", "said"),
    [([1.0] * 3, "3 scores"), ([1.0] * 5, "5 scores"), ([], "0 scores"), (None, "None"), (1.0, "1.0")],
)
def test_the_wrong_number_of_scores_is_never_guessed_at(data, tokenizer, answers, said):
    with pytest.raises(RewardError, match=f"a batch: it returned {said} for 4 samples"):
        score(data, tokenizer, lambda **_: answers, per_batch=True)
    scores, _, metrics = score(data, tokenizer, lambda **_: answers, per_batch=True, on_error="zero")
    assert not scores.any()
    assert metrics == {"reward/errors": 4.0, "reward/errors/length": 4.0}


@pytest.mark.parametrize("name", ["naive", "batch", "prime"])
def test_an_error_shows_where_it_arose_in_the_functions_own_code(data, tokenizer, name):
    """Neither the framework's frames nor those of the libraries that the function calls."""
    function = "failing_on_all" if name == "batch" else "failing"
    spec = RewardFunctionSpec("own", path=failing_functions.__file__, name=function)
    with RewardManager([spec], tokenizer, name=name, num_processes=1) as made, pytest.raises(RewardError) as stopped:
        made(data)
    first, *frames = str(stopped.value).splitlines()
    assert "JSONDecodeError: Expecting value" in first
    line = failing_functions.failing.__code__.co_firstlineno + 1
    assert frames[-1] == f'  {failing_functions.__file__}:{line} in failing: return json.loads("no json")'
    assert len(frames) == (2 if name == "batch" else 1)


def test_a_function_that_fails_on_the_whole_first_batch(data, tokenizer):
    """Zeros for all would teach nothing; once a sample has been scored, the policy holds for whole batches too."""
    said = []

    def made(policy, values):
        manager = RewardManager(each(values), tokenizer, on_error=policy)
        manager.say = said.append
        return manager

    values = [KeyError("no")] * 4
    with pytest.raises(RewardError, match=r"all 4 samples, first on sample 0 \(u0, answer '12'\): KeyError: 'no'\n"):
        made("stop", values)(data)
    with pytest.raises(RewardError, match=r"all 4 samples, first on sample 0(.|\n)*reward.on_error=zero"):
        made("zero", values).add_scores(data[:])
    assert said == []
    manager = made("drop", values)
    assert [manager.add_scores(data[:])["reward/dropped"] for _ in range(2)] == [4, 4]
    assert len(said) == 1
    assert said[0].startswith("warning: the reward function failed on all 4 samples, first on sample 0 (u0")
    manager = made("zero", values)
    manager(data[:])  # validation counts them as wrong, and says so
    assert len(said) == 2
    values[0] = 1.0
    assert manager.add_scores(data[:])["reward/errors"] == 3
    values[0] = KeyError("no")
    assert manager.add_scores(data[:])["reward/errors"] == 4
    # A judge may answer later what it does not answer now.
    judge = RewardManager([RewardFunctionSpec("judge", function=each(values))], tokenizer, on_error="zero")
    judge.say = said.append
    assert judge.add_scores(data[:])["reward/errors"] == 4
    assert len(said) == 3


def test_a_wrong_signature_is_an_error_that_says_so(data, tokenizer):
    with pytest.raises(RewardError, match="TypeError"):
        score(data, tokenizer, lambda text: 1.0)


def test_stopping_by_the_user_is_not_swallowed(data, tokenizer):
    def function(**_):
        raise KeyboardInterrupt

    for per_batch in (False, True):
        with pytest.raises(KeyboardInterrupt):
            score(data, tokenizer, function, per_batch=per_batch, on_error="zero")


def test_the_largest_score_is_that_of_float32():
    assert as_result(3e38)["score"] == 3e38
    with pytest.raises(ValueError, match="finite number"):
        as_result(-4e38)


def test_a_list_lies_on_the_response_tokens_and_adds_to_the_same_mean(data, tokenizer):
    data.batch["response_mask"][2] = torch.tensor([1, 0, 0, 1])  # two tokens of a tool: they have scores too
    values = [[0.25, -1.0], np.array([3.0]), {"score": torch.tensor([1.0, 2.0, 3.0, 4.0]), "acc": 1}, []]
    scores, extra, metrics = score(data, tokenizer, each(values))
    assert scores.tolist() == [[0.25, -1, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]]
    assert extra["acc"].tolist() == [None, None, 1, None]
    assert metrics == {"reward/errors": 0.0, "reward_extra/acc/mean": 1.0}


@pytest.mark.parametrize(("value", "kind"), [([1.0, math.nan], "nan"), ([1.0, "2"], "invalid"), ([1.0] * 3, "length")])
def test_a_list_with_something_wrong(data, tokenizer, value, kind):
    scores, _, metrics = score(data, tokenizer, each([value, 1, 1, 1]), on_error="zero")
    assert scores.sum(1).tolist() == [0, 1, 1, 1]
    assert metrics == {"reward/errors": 1.0, f"reward/errors/{kind}": 1.0}


def test_functions_get_prompt_and_tokens_if_they_name_them(data, tokenizer):
    data.non_tensor_batch["raw_prompt"] = np.array(["p0", "p1", "p2", "p3"], dtype=object)

    def one(data_source, solution_str, ground_truth, extra_info, prompt, response_ids):
        assert tokenizer.decode(response_ids) == solution_str
        return {"score": [1.0] * len(response_ids), "prompt_seen": prompt}

    scores, extra, _ = score(data, tokenizer, one)
    assert scores.sum(1).tolist() == [2, 1, 4, 0]
    assert extra["prompt_seen"].tolist() == ["p0", "p1", "p2", "p3"]

    def many(solution_strs, response_ids, prompts, **_):
        assert prompts == ["p0", "p1", "p2", "p3"]
        return [len(ids) for ids in response_ids]

    assert score(data, tokenizer, many, per_batch=True)[0].sum(1).tolist() == [2, 1, 4, 0]


def test_functions_get_the_rewards_of_turns_if_they_name_them(data, tokenizer):
    def one(data_source, solution_str, ground_truth, extra_info, turn_rewards):
        return float(sum(turn_rewards))

    assert score(data, tokenizer, one)[0].sum(1).tolist() == [0, 0, 0, 0]
    data.non_tensor_batch["turn_rewards"] = np.array([[1.0, 0.5], [], [2.0], [-1.0], None], dtype=object)[:4]
    assert score(data, tokenizer, one)[0].sum(1).tolist() == [1.5, 0, 2, -1]

    def many(turn_rewards, solution_strs, **_):
        return [float(len(found)) for found in turn_rewards]

    assert score(data, tokenizer, many, per_batch=True)[0].sum(1).tolist() == [2, 0, 1, 1]


def test_an_info_that_the_batch_has_already_is_refused(data, tokenizer):
    with pytest.raises(RewardError, match=r"\['uid'\], which the batch has already"):
        score(data, tokenizer, each([{"score": 1, "uid": 3}] * 4))


def test_numbers_said_beside_become_metrics(data, tokenizer):
    values = [{"score": 0, "n": 1, "t": "a"}, {"score": 0, "n": 2.5, "ok": True}, 0, {"score": 0, "n": math.nan}]
    _, extra, metrics = score(data, tokenizer, each(values))
    assert extra["t"].tolist() == ["a", None, None, None]
    assert metrics == {"reward/errors": 0.0, "reward_extra/n/mean": 1.75, "reward_extra/ok/mean": 1.0}
    large = [{"score": 0, "n": 2**70}, {"score": 0, "n": 0}, {"score": 0, "n": 10**400}, 0]
    assert score(data, tokenizer, each(large))[2]["reward_extra/n/mean"] == 2.0**69


@pytest.mark.parametrize("per_batch", [False, True])
def test_a_function_that_hangs_is_left_behind(data, tokenizer, per_batch):
    release = threading.Event()

    def hangs(**columns):
        info = columns.get("extra_info", {"n": 1})
        if info["n"] == 1:
            release.wait(60)
        return 2.0

    with pytest.raises(RewardError, match=r"no answer within 0\.2 s"):
        score(data, tokenizer, hangs, per_batch=per_batch, timeout=0.2)
    scores, _, metrics = score(data, tokenizer, hangs, per_batch=per_batch, timeout=0.2, on_error="zero")
    late = 4 if per_batch else 1
    assert metrics == {"reward/errors": late, "reward/errors/timeout": late}
    assert scores.sum(1).tolist() == ([0, 0, 0, 0] if per_batch else [2, 0, 2, 2])
    release.set()

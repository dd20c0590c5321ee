"""What vLLM's and SGLang's own arguments may say in a run, and what is told before it starts."""

import argparse
import json

import pytest

from meshrl.config import check_config
from meshrl.config.validate_rollout import engine_gpus, server_words

ROLLOUT = "actor_rollout_ref.rollout"
SIZE = f"{ROLLOUT}.tensor_model_parallel_size"
APART = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=1")
ONE = ("trainer.n_gpus_per_node=1",)
# The argument by which each engine is cut.
CUT = {"vllm": "tensor_parallel_size", "sglang": "tp_size"}
engines = pytest.mark.parametrize("name", CUT)


def given(name, **fields):
    words = ", ".join(f"{field}: {value}" for field, value in fields.items())
    return [f"{ROLLOUT}.name={name}", f"{ROLLOUT}.engine_kwargs.{name}={{{words}}}"]


@pytest.mark.parametrize(
    ("name", "field", "key"),
    [
        ("vllm", "dtype", "dtype"),
        ("sglang", "dtype", "dtype"),
        ("vllm", "enable_sleep_mode", "free_cache_engine"),
        ("sglang", "enable_memory_saver", "free_cache_engine"),
    ],
)
def test_what_has_a_key_of_ours_is_set_there(fine, name, field, key):
    (problem,) = check_config(fine(*given(name, **{field: "false"})))
    assert f"engine_kwargs.{name}.{field} cannot be set: set {ROLLOUT}.{key}" in problem


@engines
@pytest.mark.parametrize("quantization", ["fp8", "awq"])
def test_quantized_weights_are_refused(fine, name, quantization):
    (problem,) = check_config(fine(*given(name, quantization=quantization)))
    assert problem.startswith(f"{ROLLOUT}.engine_kwargs.{name}.quantization={quantization}: weights are sent")
    assert check_config(fine(*given(name, quantization="null"))) == []


@engines
def test_ranks_of_an_engine_of_its_own_would_be_on_the_gpus_of_others(fine, name):
    wanted = given(name, **{CUT[name]: 2})
    (problem,) = check_config(fine(*wanted))
    assert f"{CUT[name]}=2 is an engine of 2 GPUs, but each of the 8 ranks has one" in problem
    assert f"set {SIZE}=2 instead" in problem
    (problem,) = check_config(fine(*wanted, *APART))
    assert "each of the 1 ranks has one" in problem
    assert len(check_config(fine(*wanted, *ONE, "trainer.backend=ray"))) == 1


@engines
@pytest.mark.parametrize("room", [ONE, ("trainer.device=cpu",), (*APART, "trainer.device=cpu")], ids=str)
def test_where_nobody_has_those_gpus_they_may_be(fine, name, room):
    assert check_config(fine(*given(name, **{CUT[name]: 2}), *room)) == []


@engines
def test_the_two_ways_to_cut_an_engine_are_not_mixed(fine, make_model, name):
    config = fine(*given(name, **{CUT[name]: 2}), f"{SIZE}=2", "trainer.device=cpu")
    make_model(model_type="qwen3", num_key_value_heads=4, intermediate_size=96, vocab_size=64)
    (problem,) = check_config(config)
    assert f"{CUT[name]}=2 does not go with {SIZE}=2" in problem


@engines
def test_a_judge_is_held_to_the_same(fine, name, tmp_path):
    judge = (
        "reward.name=judge", f"reward.judge.path={tmp_path / 'model'}", f"reward.judge.engine={name}",
        f"reward.judge.engine_kwargs={{{CUT[name]}: 4, quantization: fp8}}",
    )  # fmt: skip
    problems = [line for line in check_config(fine(*judge)) if "engine_kwargs" in line]
    assert len(problems) == 2, problems
    assert f"reward.judge.engine_kwargs.{CUT[name]}=4: each of the 8 ranks has one GPU" in problems[0]
    assert "reward.judge.engine_kwargs.quantization=fp8" in problems[1]


@pytest.mark.parametrize(
    ("name", "arguments", "gpus"),
    [
        ("vllm", {}, 1),
        ("vllm", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}, 8),
        ("sglang", {"tp_size": 4, "dp_size": 2}, 8),
        ("sglang", {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}, 4),
        ("sglang", {"tp_size": None}, 1),
    ],
)
def test_gpus_are_counted(name, arguments, gpus):
    assert engine_gpus(name, arguments) == gpus


def test_vllm_has_no_room_for_adapters_of_any_rank(fine):
    wide = [f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.lora_rank=600"]
    (problem,) = check_config(fine(*wide))
    assert "lora_rank (600) is above 512" in problem
    assert f"{ROLLOUT}.update_weights_adapters=merged" in problem
    assert check_config(fine(*wide, f"{ROLLOUT}.update_weights_adapters=merged")) == []


# Every kind of value that YAML has, and how a server's parser is told of it: how it is read, and what is found.
VALUES = {
    "true": (True, {"flag": True}, True),
    "false": (False, {"flag": True}, False),
    "null": (None, {}, "the default"),
    "whole": (7, {"type": int}, 7),
    "negative": (-1, {"type": int}, -1),
    "real": (0.5, {"type": float}, 0.5),
    "text": ("fcfs", {}, "fcfs"),
    "words": ("two words 'and' a \"quote\"", {}, "two words 'and' a \"quote\""),
    "dashes": ("--enforce-eager", {}, "--enforce-eager"),
    "nothing": ("", {}, ""),
    "equals": ("a=b", {}, "a=b"),
    "mapping": ({"a": {"b": [1, None, True]}}, {"type": json.loads}, {"a": {"b": [1, None, True]}}),
    "no_entries": ({}, {"type": json.loads}, {}),
    "numbers": ([1, 2, -3], {"type": int, "nargs": "+"}, [1, 2, -3]),
    "texts": (["one name", "another"], {"nargs": "+"}, ["one name", "another"]),
    "pair": ((1, 2), {"type": int, "nargs": "+"}, [1, 2]),
    "mappings": ([{"name": "a b"}], {"type": json.loads, "nargs": "+"}, [{"name": "a b"}]),
}
VALUES_ALONE = {"whole": 7}
REFUSED = {
    "empty": ([], "empty is an empty list, which has no form on a server's command line: leave it out"),
    "nothing_in_it": ((), "nothing_in_it is an empty list"),
    "options": (["a", "--tp"], "options holds '--tp', which a server takes for the name of another argument"),
    "flags": ([True], "flags holds True, which has no form on a server's command line"),
    "holes": ([1, None], "holes holds None"),
    "a_set": ({1}, r"a_set holds \{1\}"),
}


@engines
def test_every_kind_of_value_reaches_a_server_as_it_is(name):
    """All in one command line, so that none may swallow a part of its neighbour."""
    parser = argparse.ArgumentParser()
    for field, (_, how, _) in VALUES.items():
        option = f"--{field.replace('_', '-')}"
        if "flag" not in how:
            parser.add_argument(option, default="the default", **how)
        elif name == "vllm":
            parser.add_argument(option, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(option, action="store_true")
    words = server_words(name, {field: value for field, (value, _, _) in VALUES.items()})
    assert vars(parser.parse_args(words)) == {field: found for field, (_, _, found) in VALUES.items()}


@engines
@pytest.mark.parametrize("field", REFUSED)
def test_what_a_server_cannot_be_told_is_refused(name, field):
    value, why = REFUSED[field]
    with pytest.raises(ValueError, match=why):
        server_words(name, VALUES_ALONE | {field: value})
    assert server_words(name, VALUES_ALONE) == ["--whole=7"]


@engines
def test_a_config_is_told_before_a_server_starts(fine, name):
    server = f"{ROLLOUT}.as_server=true"
    (problem,) = check_config(fine(*given(name, allowed_origins="[]"), server))
    assert problem.startswith(f"{ROLLOUT}.engine_kwargs.{name}.allowed_origins is an empty list")
    assert check_config(fine(*given(name, allowed_origins="[]"), f"{ROLLOUT}.as_server=false")) == []
    # Left to itself only SGLang is a server.
    assert len(check_config(fine(*given(name, allowed_origins="[]")))) == (name == "sglang")


@engines
def test_names_as_on_a_command_line_pass_no_check_unseen(fine, name):
    """A server would take `tensor-parallel-size`, and no check of ours would see it."""
    (problem,) = check_config(fine(f"{ROLLOUT}.name={name}", f"{ROLLOUT}.engine_kwargs.{name}={{max-num-foo: 2}}"))
    assert (
        problem == f"{ROLLOUT}.engine_kwargs.{name}.max-num-foo: write it with underscores, max_num_foo, as Python does"
    )


def test_a_judge_is_told_as_well(fine):
    judge = ["reward.judge.path=/judge", "reward.judge.engine=sglang", "reward.judge.engine_kwargs={a: []}"]
    assert any("reward.judge.engine_kwargs.a is an empty list" in problem for problem in check_config(fine(*judge)))

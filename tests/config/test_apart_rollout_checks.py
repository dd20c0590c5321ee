"""Which engines may have devices of their own, and with what."""

import pytest

from meshrl.config import check_config, unsupported

ROLLOUT = "actor_rollout_ref.rollout"
APART = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=4")
AHEAD = "async_training.max_staleness=2"


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ROLLOUT}.name=vllm"],
        [f"{ROLLOUT}.name=vllm", AHEAD],
        [f"{ROLLOUT}.name=vllm", AHEAD, "async_training.partial_rollout=false", f"{ROLLOUT}.as_server=true"],
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2"],
        [f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.lora_rank=4"],
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.update_weights_verify=false"],
        [f"{ROLLOUT}.name=sglang", AHEAD],
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.tensor_model_parallel_size=2", AHEAD],
        [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.as_server=true", f"{ROLLOUT}.tensor_model_parallel_size=2", AHEAD],
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.as_server=false", f"{ROLLOUT}.update_weights_verify=false"],
        [f"{ROLLOUT}.name=hf", AHEAD],
    ],
    ids=str,
)
def test_every_engine_may_have_devices_of_its_own(fine, overrides):
    config = fine(*APART, *overrides)
    assert unsupported(config) + check_config(config) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=3"],
            ["n_gpus_per_node (4)", "_parallel_size (3)"],
        ),
        (
            [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=2", AHEAD],
            ["does not go with async_training (max_staleness 2", f"set {ROLLOUT}.as_server=true"],
        ),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.update_weights_delta=true"], ["delta", "embedded or hf"]),
        (
            [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.update_weights_adapters=merged"],
            ["adapters", "hf or vllm"],
        ),
        (["actor_rollout_ref.expandable_segments=true"], ["expandable_segments", "share", "PYTORCH_ALLOC_CONF"]),
        (
            [f"{ROLLOUT}.name=vllm", "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.strategy=fsdp"],
            ["cannot feed rollouts on other devices", "fsdp2"],
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_said_in_one_line(fine, overrides, words):
    problems = check_config(fine(*APART, *overrides))
    assert len(problems) == 1, problems
    assert all(word in problems[0] for word in words), problems


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_sums_can_be_turned_off_for_every_engine(fine, name):
    assert check_config(fine(f"{ROLLOUT}.name={name}", f"{ROLLOUT}.update_weights_verify=false")) == []

"""A policy that sees images: what it can and cannot have, told before anything starts."""

import pytest

from meshrl.config import SFTConfig, load_config
from meshrl.config.validate import check_config
from meshrl.config.validate_model import seeing_problems

ROOT = "actor_rollout_ref"


@pytest.fixture
def seeing(seeing_folder, tmp_path):
    """A config whose policy sees, plus overrides."""
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "6 * 7"}\n' * 1024)

    def make(*overrides, family="qwen3_vl"):
        own = [
            f"data.train_files={data}",
            "data.max_prompt_length=32",
            "data.max_response_length=16",
            f"{ROOT}.model.path={seeing_folder(family)}",
            "reward.name=exact_match",
        ]
        return load_config("grpo", [*own, *overrides]).config

    return make


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl"])
def test_a_policy_that_sees_is_fine(seeing, family):
    assert check_config(seeing(family=family)) == []
    assert check_config(seeing(f"{ROOT}.actor.freeze_vision_tower=true", family=family)) == []


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (f"{ROOT}.actor.strategy=megatron", "actor.strategy=megatron (use fsdp2)"),
        (f"{ROOT}.rollout.name=sglang", "rollout.name=sglang (use embedded or vllm)"),
        (f"{ROOT}.rollout.name=hf", "rollout.name=hf (use embedded or vllm)"),
        (f"{ROOT}.model.use_remove_padding=false", "use_remove_padding=false"),
        ("algorithm.adv_estimator=gae", "a critic (algorithm.adv_estimator=gae)"),
        ("reward_model.enable=true", "reward_model.enable=true"),
    ],
)
def test_what_it_cannot_have_yet_is_named(seeing, override, words):
    found = seeing_problems(seeing(override))
    assert [problem for problem in found if words in problem] == [
        f"not supported yet: a model that sees images (qwen3_vl) with {problem}"
        for problem in [found[0].split(" with ", 1)[1]]
    ]
    assert set(found) <= set(check_config(seeing(override)))


def test_a_rollout_over_several_ranks(seeing):
    two = (f"{ROOT}.rollout.tensor_model_parallel_size=2", "trainer.n_gpus_per_node=2")
    assert check_config(seeing(*two)) == []
    (problem,) = seeing_problems(seeing(*two, f"{ROOT}.rollout.name=vllm"))
    assert "name=vllm in the processes of 2 ranks (use actor_rollout_ref.rollout.as_server=true)" in problem
    assert seeing_problems(seeing(*two, f"{ROOT}.rollout.name=vllm", f"{ROOT}.rollout.as_server=true")) == []
    (problem,) = check_config(seeing(*two, family="qwen3_vl_moe"))
    assert "a qwen3_vl_moe model cannot be cut" in problem


def test_adapters_go_to_vllm_merged(seeing):
    own = (f"{ROOT}.rollout.name=vllm", f"{ROOT}.model.lora_rank=4")
    (problem,) = seeing_problems(seeing(*own))
    assert "adapters sent to vllm alone (use actor_rollout_ref.rollout.update_weights_adapters=merged)" in problem
    assert seeing_problems(seeing(*own, f"{ROOT}.rollout.update_weights_adapters=merged")) == []
    assert seeing_problems(seeing(*own, f"{ROOT}.hybrid_engine=false", f"{ROOT}.rollout.nnodes=1")) == []
    from_a_path = (f"{ROOT}.rollout.name=vllm", f"{ROOT}.model.lora_adapter_path=adapter")
    assert seeing_problems(seeing(*from_a_path)) == [problem]


def test_it_must_say_how_images_are_read(seeing, seeing_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in seeing_folder("qwen3_vl").iterdir():
        if "processor" not in file.name:
            (folder / file.name).symlink_to(file)
    config = seeing(f"{ROOT}.model.path={folder}")
    (problem,) = seeing_problems(config)
    assert "has no preprocessor_config.json or processor_config.json that says how" in problem
    (folder / "processor_config.json").write_text("{}")
    assert seeing_problems(config) == []


def test_a_tower_can_only_be_frozen_where_there_is_one(fine):
    (problem,) = check_config(fine(f"{ROOT}.actor.freeze_vision_tower=true"))
    assert "actor.freeze_vision_tower=true has no effect: the model sees no images" in problem
    assert check_config(fine()) == []


def test_fine_tuning_with_images(seeing_folder, tmp_path):
    data = tmp_path / "demos.jsonl"
    data.write_text('{"prompt": "6 * 7", "response": "42"}\n' * 256)

    def make(*overrides):
        own = [f"data.train_files={data}", "data.max_length=64", f"model.path={seeing_folder('qwen3_vl')}"]
        return load_config(None, [*own, *overrides], SFTConfig).config

    assert check_config(make()) == []
    assert check_config(make("engine.freeze_vision_tower=true")) == []
    for override in ("engine.strategy=megatron", "model.use_remove_padding=false"):
        assert any(f"(qwen3_vl) with {override}" in problem for problem in check_config(make(override)))


def test_a_reference_must_see_too_and_no_other_role_may(seeing, seeing_folder, tiny_model_folder):
    path = f"{ROOT}.ref.model.path"
    kl = f"{ROOT}.actor.use_kl_loss=true"
    (problem,) = seeing_problems(seeing(f"{path}={tiny_model_folder}", kl))
    assert "(qwen3) does not see the images of the policy's prompts" in problem
    assert seeing_problems(seeing(f"{path}={seeing_folder('qwen2_vl')}", kl)) == []
    (problem,) = seeing_problems(seeing("critic.freeze_vision_tower=true"))
    assert "critic.freeze_vision_tower=true has no effect" in problem

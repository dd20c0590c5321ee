"""Keys of verl's supervised trainers, as `meshrl sft` understands them."""

import pytest

from meshrl.config import ConfigError, SFTConfig, check_config, load_config
from meshrl.config.keys import get_value


def value_after(name: str, *overrides: str) -> object:
    return get_value(load_config(None, list(overrides), SFTConfig).config, name)


def problems_of(*overrides: str) -> list[str]:
    try:
        return check_config(load_config(None, list(overrides), SFTConfig).config, check_files=False)
    except ConfigError as error:
        return error.problems


@pytest.mark.parametrize(
    ("overrides", "name", "value"),
    [
        (["model.partial_pretrain=M"], "model.path", "M"),
        (
            ["data.chat_template={% if a %}{{ a }}{% endif %}"],
            "model.custom_chat_template",
            "{% if a %}{{ a }}{% endif %}",
        ),
        (["data.prompt_dict_keys=['question']"], "data.prompt_dict_keys", ["question"]),
        (["+data.response_dict_keys=null"], "data.response_dict_keys", []),
        (["data.multiturn.enable=true"], "data.messages_key", "messages"),
        (["data.multiturn.enable=true", "data.multiturn.messages_key=chat"], "data.messages_key", "chat"),
        (["data.multiturn.messages_key=chat", "data.multiturn.enable=true"], "data.messages_key", "chat"),
        (["data.multiturn.messages_key=chat", "data.multiturn.enable=false"], "data.messages_key", None),
        (["data.multiturn.enable=false", "data.multiturn.messages_key=chat"], "data.messages_key", None),
        (["data.multiturn.tools_key=functions"], "data.tools_key", "functions"),
        (["data.multiturn.enable_thinking_key=thinks"], "data.enable_thinking_key", "thinks"),
        (["use_remove_padding=false"], "model.use_remove_padding", False),
        (["ulysses_sequence_parallel_size=2"], "engine.ulysses_sequence_parallel_size", 2),
        (["engine=megatron"], "engine.strategy", "megatron"),
        (["engine.strategy=fsdp", "engine=megatron"], "engine.strategy", "fsdp"),
        (["engine=fsdp"], "engine.strategy", "fsdp2"),
        (["engine.fsdp_size=2"], "engine.fsdp_config.fsdp_size", 2),
        (["engine.model_dtype=bf16"], "engine.fsdp_config.model_dtype", "bf16"),
        (["engine.dtype=bfloat16"], "engine.fsdp_config.mixed_precision.param_dtype", "bfloat16"),
        (["engine.tensor_model_parallel_size=2"], "engine.megatron.tensor_model_parallel_size", 2),
        (["engine.override_ddp_config.overlap_grad_reduce=true"], "engine.megatron.overlap_grad_reduce", True),
        (["model.strategy=fsdp"], "engine.strategy", "fsdp"),
        (["model.fsdp_config.cpu_offload=true"], "engine.fsdp_config.offload_policy", True),
        (["model.fsdp_config.model_dtype=bf16"], "engine.fsdp_config.model_dtype", "bf16"),
        (["optim.lr_scheduler=cosine"], "optim.lr_scheduler_type", "cosine"),
        (["optim.clip_grad=2"], "engine.grad_clip", 2.0),
        (["trainer.checkpoint.save_contents=[model]"], "checkpoint.save_contents", ["model"]),
        (["trainer.test_freq=after_each_epoch"], "trainer.test_after_epoch", True),
        (["trainer.save_freq=after_each_epoch"], "trainer.save_after_epoch", True),
        (["trainer.test_freq=3"], "trainer.test_freq", 3),
    ],
)
def test_what_is_read_has_its_effect(overrides: list[str], name: str, value: object) -> None:
    assert value_after(name, *overrides) == value


@pytest.mark.parametrize(
    "override",
    ["data.pad_mode=no_padding", "data.pad_mode=right", "data.use_dynamic_bsz=true", "data.balance_dp_token=true",
     "optim=fsdp", "engine=fsdp", "engine.use_mbridge=true", "data.micro_batch_size=4", "data.use_shm=true"],
)  # fmt: skip
def test_what_is_so_anyway_is_noted(override: str) -> None:
    loaded = load_config(None, [override], SFTConfig)
    assert loaded.config == load_config(None, [], SFTConfig).config
    assert len(loaded.notes) == 1


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["engine=veomni"], "engines are engine.strategy=fsdp2, fsdp and megatron"),
        (["data.use_dynamic_bsz=false"], "set data.micro_batch_size_per_gpu"),
        (["data.chat_template=x"], "must be a Jinja template"),
        (["data.custom_cls.path=x.py"], "unknown key data.custom_cls.path"),
        (["data.ignore_input_ids_mismatch=true"], "rendered whole"),
        (["trainer.test_after_epoch=true", "trainer.test_freq=2"], "both say when: choose one"),
        (["trainer.save_after_epoch=true", "trainer.save_freq=2"], "both say when: choose one"),
        (
            ["data.messages_key=m", "data.prompt_as_message=true"],
            "prompt_as_message has no effect",
        ),
        (["data.messages_key=m", "data.prompt_dict_keys=[a]"], "prompt_dict_keys has no effect"),
        (["profiler.enable=true"], "no profiler"),
    ],
)
def test_what_cannot_be_had_is_refused(overrides: list[str], words: str) -> None:
    (problem,) = problems_of("data.train_batch_size=8", *overrides)
    assert words in problem


def test_saving_after_each_epoch_is_saving() -> None:
    """What only checkpoints read has an effect."""
    name = "checkpoint.async_save=true"
    assert any("without trainer.save_freq" in line for line in problems_of(name))
    assert problems_of(name, "trainer.save_after_epoch=true") == []

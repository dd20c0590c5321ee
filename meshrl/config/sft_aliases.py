"""Keys of verl's supervised trainers (`fsdp_sft_trainer`, `sft_trainer`) onto those of `meshrl sft`."""

from dataclasses import fields

from meshrl.config.alias_rules import Alias, fixed, idle, read, unset
from meshrl.config.engine import FSDPConfig, MegatronConfig

FSDP, MEGATRON = "engine.fsdp_config", "engine.megatron"
WHOLE = "micro-batches are packed rows without padding"
# Keys that verl's two kinds of engine share in name: they are FSDP's here, unless engine.megatron is said.
SHARED = tuple(field.name for field in fields(FSDPConfig))
MEGATRON_ONLY = tuple(
    field.name for field in fields(MegatronConfig) if field.name not in (*SHARED, "context_parallel_size", "dtype")
)

SFT: tuple[Alias, ...] = (
    read("model.partial_pretrain", "model.path"),
    read("model.strategy", "engine.strategy"),
    *(read(f"model.fsdp_config.{name}", f"{FSDP}.offload_policy") for name in ("cpu_offload", "offload_params")),
    read("model.fsdp_config", FSDP),
    read("use_remove_padding", "model.use_remove_padding"),
    *(read(name, f"engine.{name}") for name in ("ulysses_sequence_parallel_size",)),
    # Groups of Hydra: which of verl's files the section comes from.
    read("engine", "engine.strategy", {}, "megatron", itself=True, weak=1),
    idle(
        "engine", "engine.strategy says it", "fsdp", "fsdp2", itself=True,
        instead="engines are engine.strategy=fsdp2, fsdp and megatron",
    ),
    idle(
        "optim", "there is one kind of optimizer sections", "fsdp", "megatron", itself=True,
        instead="there is one kind of optimizer sections; leave it out",
    ),
    *(read(f"engine.{name}", f"{FSDP}.{name}") for name in SHARED),
    read("engine.dtype", f"{FSDP}.mixed_precision.param_dtype"),
    *(read(f"engine.{name}", f"{MEGATRON}.{name}") for name in MEGATRON_ONLY),
    *(idle(f"engine.{name}", "weights go from and to Hugging Face files directly")
      for name in ("use_mbridge", "vanilla_mbridge")),
    *(idle(f"engine.dist_checkpointing_{name}", "weights are read from the model's Hugging Face folder",
           needs=(f"{MEGATRON}.use_dist_checkpointing", (False,)), instead="leave it out")
      for name in ("path", "prefix")),
    read("engine.override_ddp_config", f"{MEGATRON}.override_ddp_config"),
    idle("engine.override_mcore_model_config", "there is nothing in it", {}, instead="use override_transformer_config"),
    idle("engine.seed", "trainer.seed is the seed of everything", 42, instead="set trainer.seed"),
    fixed("engine.full_determinism", "kernels are chosen for speed", False),
    fixed("engine.forward_only", "the model is trained", False),
    *(read(f"trainer.checkpoint.{name}", f"checkpoint.{name}") for name in ("save_contents", "load_contents")),
    # Rows.
    read("data.multiturn.enable", "data.messages_key", {True: "messages"}, True, weak=2),
    read("data.multiturn.enable", "data.messages_key", {False: None}, False),
    read("data.multiturn.messages_key", "data.messages_key", weak=1),
    read("data.multiturn.tools_key", "data.tools_key"),
    read("data.multiturn.enable_thinking_key", "data.enable_thinking_key"),
    idle("data.pad_mode", WHOLE),
    idle("data.use_dynamic_bsz", "micro-batches are cut by tokens while micro_batch_size_per_gpu is null", True,
         instead="set data.micro_batch_size_per_gpu"),
    idle("data.balance_dp_token", "rows are always balanced over ranks by tokens"),
    read("data.chat_template", "model.custom_chat_template"),
    *(idle(f"data.custom_cls.{name}", "null names no class", None) for name in ("path", "name")),
    fixed("data.ignore_input_ids_mismatch", "a conversation is rendered whole, and its turns are found in it", False),
    idle("data.micro_batch_size", "verl's trainer does not read it; data.micro_batch_size_per_gpu does what it says"),
    *(unset(f"data.{name}_dict_keys", []) for name in ("prompt", "response")),
    idle("trainer.profile_interval", "nothing is profiled", instead="meshrl sft has no profiler"),
    fixed("profiler.enable", "meshrl sft has no profiler", False),
    idle("profiler", "nothing is profiled"),
)  # fmt: skip

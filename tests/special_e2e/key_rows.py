"""For each key of the three commands: a config in which it counts, and another value of it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    Qwen3MoeConfig,
)

from meshrl.config.keys import Leaf, get_value, leaves
from meshrl.config.load import ROOTS
from meshrl.models.tiny import char_tokenizer, make_tiny_model, make_tiny_seeing_model
from meshrl.trainer.demo import ALPHABET

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"
# Not in a plain run: it would start processes, or Ray.
STARTS_PROCESSES = re.compile(r"trainer\.(nnodes|n_gpus_per_node|backend)|actor_rollout_ref\.hybrid_engine")
KEPT = "{folder}/kept/{root}/global_step_1"
Bases = dict[str, tuple[str, str, list[str]]]

OWN_CODE = """
import asyncio

import torch

from meshrl.agents.environments import Environment, Step


def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0):
    wanted = "".join(sorted(extra_info["digits"]))
    return sum(a == b for a, b in zip(solution_str, wanted)) / 6 - 0.05 * len(solution_str) + bonus


def other(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))


def parts(data_source, solution_str, ground_truth, extra_info):
    found = {name: float(digit in solution_str) for name, digit in (("first", "1"), ("second", "2"))}
    return {"score": float(len(solution_str)), **found}


async def later(data_source, solution_str, ground_truth, extra_info):
    return float(len(solution_str))


def loss(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, rollout_is_weights, stats, scale=1.0
):
    from meshrl.algorithms import agg_loss

    value = agg_loss(-scale * advantages * log_prob, response_mask, loss_agg_mode, stats=stats)
    return value, {"actor/ppo_kl": 0.0}


def estimator(token_level_rewards, response_mask, values=None, scale=1.0):
    scores = scale * (token_level_rewards.sum(1, keepdim=True) * response_mask)
    return scores, scores


class Backwards:
    def __init__(self, data_source, data_config):
        self.rows = list(range(len(data_source)))[::-1]

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


class Forwards(Backwards):
    def __init__(self, data_source, data_config):
        self.rows = list(range(len(data_source)))


class Rows:
    digits = "123456"

    def __init__(self, files, tokenizer, config):
        self.rows = [
            {"prompt": f"{self.digits}>", "data_source": "x", "extra_info": {"digits": self.digits}} for _ in range(8)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, number):
        return self.rows[number]


class OtherRows(Rows):
    digits = "654321"


def add(a: int, b: int) -> str:
    \"\"\"Add two numbers.

    Args:
        a: One number.
        b: Another number.
    \"\"\"
    return str(a + b)


class Game(Environment):
    def __init__(self, secret=1):
        self.secret = secret

    def reset(self, sample):
        return None

    def step(self, text):
        return Step("no", done=False)


class OtherGame(Game):
    pass
"""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}{% if loud %}!{% endif %}"
)
# It says which tools there are, and whether to think.
TELLING = "{% if tools %}{{ tools[0].function.name }}{% endif %}{% if enable_thinking %}1{% endif %}" + TEMPLATE


@dataclass(frozen=True)
class Row:
    """Keys by a pattern, the base in which they count, a value (None: any other), and what else is set with it."""

    pattern: str
    base: str
    value: str | None = None
    beside: tuple[str, ...] = ()
    fails: bool = False  # it asks for what is not there: that it fails shows that it is read


def write_files(folder: Path) -> None:
    """The data, models and functions that bases name."""
    digits = [f"{i * 7919 % 1000000:06d}" for i in range(1, 17)]
    rows = [
        {
            "prompt": f"{d}>", "question": f"{d[::-1]}>", "response": "".join(sorted(d)), "answer": d[::-1],
            "chosen": "".join(sorted(d)), "rejected": d, "label": i % 2 == 0, "good": i % 3 == 0,
            "data_source": "x", "kind": "y", "extra_info": {"digits": d}, "reward_model": {"ground_truth": "x"},
            "messages": [{"role": "user", "content": d}, {"role": "assistant", "content": d[::-1]}],
            "turns": [{"role": "user", "content": d}, {"role": "assistant", "content": d}],
        }
        for i, d in enumerate(digits)
    ]  # fmt: skip
    mixed = [row | {"prompt": row["prompt"][i % 2 * 3 :]} for i, row in enumerate(rows)]
    chats = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows]
    tool = {"type": "function", "function": {"name": "add"}}
    nested = [
        row | {"nested": {"ask": row["prompt"], "other": row["question"], "say": row["response"], "no": row["answer"]},
               "functions": [tool], "thinks": True}
        for row in rows
    ]  # fmt: skip
    files = {"rows": rows, "more": rows[::-1], "mixed": mixed, "chats": chats, "nested": nested}
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 32}
    model = make_tiny_model(folder / "model", ALPHABET, **small)
    make_tiny_model(folder / "deep", ALPHABET, **small | {"num_hidden_layers": 4})
    char_tokenizer(ALPHABET[::-1]).save_pretrained(folder / "tokens")
    chat = char_tokenizer(ALPHABET + '!abcdefghijklmnopqrstuvwxyz .,:_{}"\n')
    chat.add_special_tokens({"additional_special_tokens": ["<system>", "<user>", "<assistant>", "<tool>"]})
    chat.chat_template = TEMPLATE
    make_tiny_model(folder / "chat", ALPHABET, **small, vocab_size=len(chat), max_position_embeddings=256)
    chat.save_pretrained(folder / "chat")
    make_tiny_seeing_model(folder / "seeing", ALPHABET)
    _write_experts(folder / "experts", folder / "model")
    _write_scorer(folder / "scorer", folder / "deep")
    _write_scorer(folder / "expert scorer", folder / "experts")
    _write_adapter(folder / "adapter", model)
    _write_adapter(folder / "deep adapter", folder / "deep")
    (folder / "own.py").write_text(OWN_CODE)
    (folder / "other.py").write_text(
        OWN_CODE.replace("- 0.05", "- 0.5").replace("[::-1]", "").replace("123456", "222222")
    )
    (folder / "lib.py").write_text("LOADED = True\n")
    (folder / "tools.yaml").write_text(f"tools:\n- {folder / 'own.py'}:add\n")


def _write_experts(folder: Path, tokens: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokens)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, moe_intermediate_size=64, num_experts=4,
        num_experts_per_tok=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=4,
        max_position_embeddings=64, pad_token_id=0, eos_token_id=1, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_scorer(folder: Path, source: Path) -> None:
    config = AutoConfig.from_pretrained(source)
    config.num_labels, config.tie_word_embeddings = 1, False
    torch.manual_seed(1)
    AutoModelForTokenClassification.from_config(config).save_pretrained(folder)


def _write_adapter(folder: Path, source: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(AutoModelForCausalLM.from_pretrained(source), lora).save_pretrained(folder)


def make_bases(folder: Path) -> Bases:
    """Tiny configs, each with the way to look at what comes of it."""
    rows, model, own, out = folder / "rows.jsonl", folder / "model", folder / "own.py", folder / "run"
    common = [
        f"data.train_files={rows}", "data.train_batch_size=4", "trainer.device=cpu",
        "trainer.n_gpus_per_node=1", "trainer.logger=[file]", "trainer.total_training_steps=1",
        f"trainer.default_local_dir={out}",
    ]  # fmt: skip
    held_out = [f"data.val_files={rows}", "trainer.test_freq=1"]
    fp32 = "fsdp_config.mixed_precision.param_dtype=fp32"
    train = [
        *common, "data.max_prompt_length=8", "data.max_response_length=7", f"{A}.ppo_mini_batch_size=2", f"{R}.n=2",
        "algorithm.adv_estimator=grpo", f"custom_reward_function.path={own}",
        f"{A}.ppo_micro_batch_size_per_gpu=2", f"{A}.{fp32}", f"{R}.dtype=float32", f"{A}.optim.lr=0.01",
        f"{M}.path={model}", "trainer.val_before_train=false",
    ]  # fmt: skip
    learn = [*common, "data.max_length=16", f"engine.{fp32}", f"model.path={model}", "optim.lr=0.01"]
    ranks = ["trainer.n_gpus_per_node=4", f"{M}.path={folder / 'deep'}", f"{A}.ppo_mini_batch_size=4"]
    gae = ["algorithm.adv_estimator=gae", "critic.ppo_max_token_len_per_gpu=64", f"critic.{fp32}"]
    scored = [
        "reward_model.enable=true", f"reward_model.model.path={folder / 'scorer'}", f"reward_model.{fp32}",
        "reward_model.micro_batch_size_per_gpu=2",
    ]  # fmt: skip
    built_in = [one for one in train if not one.startswith("custom_reward_function")]
    kl, apart = [f"{A}.use_kl_loss=true"], ["actor_rollout_ref.hybrid_engine=false", f"{R}.nnodes=1"]
    tools = [
        f"{M}.path={folder / 'chat'}", f"data.train_files={folder / 'chats.jsonl'}", "data.max_prompt_length=120",
        f"data.val_files={folder / 'chats.jsonl'}", "data.max_response_length=40", f"{R}.multi_turn.enable=true",
        f"{R}.multi_turn.tokenization_sanity_check_mode=ignore_strippable",
    ]  # fmt: skip
    apart_ref = [*kl, f"{REF}.nnodes=1", f"{REF}.n_gpus_per_node=4", f"{M}.path={folder / 'deep'}"]
    supervised_ranks = ["trainer.n_gpus_per_node=4", f"model.path={folder / 'deep'}"]

    def loss(name: str, *more: str) -> tuple[str, str, list[str]]:
        sequence = [f"{A}.loss_agg_mode=seq-mean-token-mean"]
        return "train", "ran", [*train, f"{A}.policy_loss.loss_mode={name}", *sequence, *more]

    def plain(*more: str, look: str = "ran", of: list[str] = train) -> tuple[str, str, list[str]]:
        return "train", look, [*of, *more]

    bases: Bases = {
        "train": plain(), "validated": plain(*held_out), "started": plain(look="started"),
        "auto": plain("trainer.device=auto"),
        "auto built": plain("trainer.device=auto", look="built"),
        "stream": plain("data.streaming=true", look="read"), "read": plain(*held_out, look="read"),
        "overlong": plain(
            "data.truncation=left", "data.max_prompt_length=6", f"data.train_files={folder / 'mixed.jsonl'}",
            f"data.val_files={folder / 'mixed.jsonl'}", look="read"
        ),
        "chats": plain(
            f"data.train_files={folder / 'chats.jsonl'}", f"data.val_files={folder / 'chats.jsonl'}",
            f"{M}.path={folder / 'chat'}", "data.max_prompt_length=20", look="read",
        ),
        "sampler": plain(f"data.sampler.class_path={own}", "data.sampler.class_name=Backwards", look="read"),
        "own rows": plain(f"data.custom_cls.path={own}", "data.custom_cls.name=Rows", look="read"),
        "seeing": plain(f"{M}.path={folder / 'seeing'}", look="built"),
        "seeing rows": plain(f"{M}.path={folder / 'seeing'}", look="read"),
        "lora": plain(f"{M}.lora_rank=2", look="starting"),
        "ranks": plain(*ranks, look="built"),
        "lora ranks": plain(*ranks, f"{M}.lora_rank=2", look="built"),
        "fsdp1": plain(*ranks, f"{A}.strategy=fsdp", look="built"),
        "compiled": plain(f"{A}.use_torch_compile=true", look="built"),
        "experts": plain(f"{M}.path={folder / 'experts'}", look="starting"),
        "experts ranks": plain(*ranks, f"{M}.path={folder / 'experts'}", look="built"),
        "dynamic": plain(f"{A}.use_dynamic_bsz=true", f"{A}.ppo_micro_batch_size_per_gpu=null", *kl),
        "zeros": plain("reward.name=exact_match", of=built_in),
        "functions": plain(
            "reward.functions={exact_match: 1.0, format_match: {kwargs: {pattern: '1'}}}", of=built_in, look="starting"
        ),
        "scaled": plain(f"{A}.loss_agg_mode=seq-mean-token-sum-norm"),
        "own loss": plain(f"{A}.policy_loss.loss_mode={own}:loss"),
        "own estimator": plain(f"algorithm.adv_estimator={own}:estimator"),
        "sapo": loss("sapo"), "dro": loss("dro"), "m2po": loss("m2po", f"{R}.dtype=bfloat16"),
        "decoupled": loss("decoupled"),
        "icepop": loss("icepop", f"{A}.policy_loss.icepop_high=1.5"),
        "clip_cov": loss("clip_cov", f"{A}.policy_loss.clip_cov_ratio=0.5", f"{A}.policy_loss.clip_cov_lb=-5"),
        "kl_cov": loss("kl_cov", f"{A}.policy_loss.kl_cov_ratio=0.5"),
        "kl": plain(*kl), "kl steps": plain(*kl, "trainer.total_training_steps=2"),
        "wsd": plain(f"{A}.optim.lr_scheduler_type=wsd", look="starting"),
        "saving": plain("trainer.save_freq=1"), "saved critic": plain("trainer.save_freq=1", *gae, look="starting"),
        "resumed": plain("trainer.save_freq=1", look="resumed"),
        "restarts": plain("trainer.max_restarts=1", look="starting"),
        "epochs": plain("trainer.total_training_steps=null", "trainer.total_epochs=1", look="assembled"),
        "named": plain("trainer.default_local_dir=null", look="starting"),
        "timeline": plain("trainer.timeline=true", look="starting"),
        "apart": plain(*apart, f"{R}.n_gpus_per_node=1", look="pooled"),
        "apart on ray": plain(*apart, f"{R}.n_gpus_per_node=1", "trainer.backend=ray", look="pooled"),
        "pooled on ray": plain("trainer.backend=ray", look="pooled"),
        "ahead": plain(
            *apart, f"{R}.n_gpus_per_node=1", "async_training.max_staleness=2", "trainer.ledger=false", look="assembled"
        ),
        "assembled": plain("trainer.ledger=false", look="assembled"),
        "wide": plain(*ranks, "trainer.ledger=false", look="assembled"),
        "profiled": plain("global_profiler.tool=torch", "global_profiler.steps=[1]", look="assembled"),
        "on ray": plain("trainer.backend=ray", look="started"),
        "gates": plain(
            "trainer.gates.patience=2", f"{A}.ppo_epochs=2", "trainer.gates.limits={odd: {max: 1.0}}", look="gated"
        ),
        "ref apart": plain(*apart_ref, look="built ref"),
        "ref pools": plain(*apart_ref, "trainer.backend=ray", look="pooled"),
        "ref megatron": plain(*apart_ref, f"{REF}.strategy=megatron", look="built ref"),
        "ref megatron tp": plain(
            *apart_ref, f"{REF}.strategy=megatron", f"{REF}.megatron.pipeline_model_parallel_size=2", look="built ref"
        ),
        "ref experts": plain(
            *apart_ref, f"{REF}.strategy=megatron", f"{M}.path={folder / 'experts'}",
            f"{REF}.megatron.tensor_model_parallel_size=2", look="built ref",
        ),
        "single": plain(f"{R}.n=1", "algorithm.adv_estimator=reinforce_plus_plus"),
        "val sampled": plain(*held_out, f"{R}.val_kwargs.do_sample=true", f"{R}.val_kwargs.temperature=1.0"),
        "vllm": plain(f"{R}.name=vllm", look="built"),
        "sglang": plain(f"{R}.name=sglang", look="built"),
        "copies": plain(f"{R}.dtype=bfloat16", f"{R}.free_cache_engine=false", look="starting"),
        "tools": plain(*tools, f"{R}.multi_turn.tools=[{own}:add]", look="built"),
        "game": plain(*tools, f"{R}.multi_turn.environment={own}:Game", look="built"),
        "gae": plain(*gae), "gae pathed": plain(*gae, f"critic.model.path={model}", look="starting"),
        "gae built": plain(*gae, look="built critic"),
        "gae auto": plain(*gae, "trainer.device=auto"),
        "scored built": plain(*scored, look="built reward_model"),
        "gae scored": plain(*gae, *scored), "gae dynamic": plain(*gae, "critic.use_dynamic_bsz=true"),
        "gae lora": plain(*gae, "critic.model.path=" + str(model), "critic.model.lora_rank=2", look="starting"),
        "gae wsd": plain(*gae, "critic.optim.lr_scheduler_type=wsd", look="starting"),
        "gae ranks": plain(*gae, *ranks, look="built critic"),
        "gae fsdp1": plain(*gae, *ranks, "critic.strategy=fsdp", look="built critic"),
        "gae compiled": plain(*gae, f"{A}.use_torch_compile=true", "critic.use_torch_compile=true", "critic.nnodes=1",
            "critic.n_gpus_per_node=1", look="built critic"),
        "gae pools": plain(*gae, "critic.nnodes=1", "critic.n_gpus_per_node=1", "trainer.backend=ray", look="pooled"),
        "scored": plain(*scored), "scored dynamic": plain(*scored, "reward_model.use_dynamic_bsz=true"),
        "scored ranks": plain(*scored, *ranks, look="built reward_model"),
        "scored fsdp1": plain(*scored, *ranks, "reward_model.strategy=fsdp", look="built reward_model"),
        "scored compiled": plain(*scored, "reward_model.use_torch_compile=true", look="built reward_model"),
        "scored pools": plain(
            *scored, "reward_model.nnodes=1", "reward_model.n_gpus_per_node=1", "trainer.backend=ray", look="pooled"
        ),
        "judge": plain("reward.name=judge", f"reward.judge.path={folder / 'chat'}", look="built judge", of=built_in),
        "judge vllm": plain(
            "reward.name=judge", f"reward.judge.path={folder / 'chat'}", "reward.judge.engine=vllm", look="built judge",
            of=built_in,
        ),
        "judge pools": plain(
            "reward.name=judge", f"reward.judge.path={folder / 'chat'}", "reward.judge.nnodes=1",
            "reward.judge.n_gpus_per_node=1", "trainer.backend=ray", look="pooled", of=built_in,
        ),
        "rewarded": plain(look="rewarded"),
        "prime": plain("reward_manager.name=prime", look="rewarded"),
        "async reward": plain("custom_reward_function.name=later", look="rewarded"),
        "dapo": plain("reward_manager.name=dapo", "reward_manager.overlong_buffer.len=4", look="starting"),
        "parts": plain(
            "custom_reward_function.name=parts", "algorithm.adv_estimator=gdpo",
            "algorithm.gdpo_reward_keys=[first,second]",
        ),
        "filtered": plain("algorithm.filter_groups.enable=true", "custom_reward_function.name=parts"),
        "discounted": plain("algorithm.adv_estimator=reinforce_plus_plus"),
        "kl reward": plain("algorithm.use_kl_in_reward=true", f"{REF}.model.path={folder / 'deep'}"),
        "adaptive": plain("algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", look="starting"),
        "teacher": plain("algorithm.distillation_coef=0.1", f"{REF}.model.path={folder / 'deep'}"),
        "weighed": plain(f"{R}.dtype=bfloat16", "algorithm.rollout_correction.rollout_is=token"),
        "rejected": plain(
            f"{R}.dtype=bfloat16", "algorithm.rollout_correction.rollout_rs=token_k1",
            "algorithm.rollout_correction.rollout_rs_threshold=0.9_1.1",
        ),
        "bypass": plain("algorithm.rollout_correction.bypass_mode=true", look="starting"),
    }  # fmt: skip
    for root in ("sft", "prefer"):
        bases |= {
            root: (root, "ran", learn),
            f"{root} validated": (root, "ran", [*learn, *held_out]),
            f"{root} seeing": (root, "built", [*learn, f"model.path={folder / 'seeing'}"]),
            f"{root} lora": (root, "starting", [*learn, "model.lora_rank=2"]),
            f"{root} short": (root, "starting", [*learn, "data.max_length=10", "data.truncation=left"]),
            f"{root} by samples": (root, "ran", [*learn, "data.micro_batch_size_per_gpu=2"]),
            f"{root} chats": (root, "starting", [
                *learn, f"data.train_files={folder / 'chats.jsonl'}", f"data.val_files={folder / 'chats.jsonl'}",
                f"model.path={folder / 'chat'}", "data.max_length=40",
            ]),
            f"{root} ranks": (root, "built", [*learn, *supervised_ranks]),
            f"{root} fsdp1": (root, "built", [*learn, *supervised_ranks, "engine.strategy=fsdp"]),
            f"{root} compiled": (root, "built", [*learn, "engine.use_torch_compile=true"]),
            f"{root} auto": (root, "ran", [*learn, "trainer.device=auto"]),
            f"{root} wsd": (root, "starting", [*learn, "optim.lr_scheduler_type=wsd"]),
            f"{root} started": (root, "started", learn),
            f"{root} on ray": (root, "started", [*learn, "trainer.backend=ray"]),
            f"{root} pooled on ray": (root, "pooled", [*learn, "trainer.backend=ray"]),
            f"{root} saving": (root, "ran", [*learn, "trainer.save_freq=1"]),
            f"{root} resumed": (root, "resumed", [*learn, "trainer.save_freq=1"]),
            f"{root} restarts": (root, "starting", [*learn, "trainer.max_restarts=1"]),
            f"{root} held out": (root, "ran", [*learn, f"data.val_files={rows}"]),
            f"{root} epochs": (
                root, "starting", [*learn, "trainer.total_training_steps=null", "trainer.total_epochs=1"]
            ),
            f"{root} named": (root, "starting", [*learn, "trainer.default_local_dir=null"]),
            f"{root} timeline": (root, "starting", [*learn, "trainer.timeline=true"]),
        }  # fmt: skip
    wide_gae = [*train, *gae, *ranks]
    wide_scored = [*train, *scored, *ranks]
    wide_learn = [*learn, *supervised_ranks]
    experts = folder / "experts"
    for name, root, section, base, more in (
        ("megatron", "train", A, [*train, *ranks], f"{M}.path={experts}"),
        ("gae megatron", "train", "critic", wide_gae, f"critic.model.path={experts}"),
        (
            "scored megatron",
            "train",
            "reward_model",
            wide_scored,
            f"reward_model.model.path={folder / 'expert scorer'}",
        ),
        ("sft megatron", "sft", "engine", wide_learn, f"model.path={experts}"),
        ("prefer megatron", "prefer", "engine", wide_learn, f"model.path={experts}"),
    ):
        look = f"built {section}" if section in ("critic", "reward_model") else "built"
        bases |= {key: (root, look, own) for key, own in _megatron_variants(name, section, base, more).items()}
    bases |= {
        "sft nested": (
            "sft",
            "starting",
            [
                *learn,
                f"data.train_files={folder / 'nested.jsonl'}",
                "data.prompt_key=nested",
                "data.response_key=nested",
                "data.prompt_dict_keys=[ask]",
                "data.response_dict_keys=[say]",
            ],
        ),
        "sft texts": ("sft", "starting", [*learn, f"model.path={folder / 'chat'}", "data.max_length=40"]),
        "sft told": (
            "sft",
            "starting",
            [
                *learn,
                f"data.train_files={folder / 'nested.jsonl'}",
                f"model.path={folder / 'chat'}",
                "data.max_length=60",
                "data.messages_key=messages",
                f"model.custom_chat_template={TELLING}",
            ],
        ),
        "sft seeing rows": ("sft", "read", bases["sft seeing"][2]),
        "sft conversations": ("sft", "starting", [*bases["sft chats"][2], "data.messages_key=messages"]),
        "prefer judged": ("prefer", "ran", [*learn, "loss.name=kto"]),
        "prefer simpo": ("prefer", "ran", [*learn, "loss.name=simpo"]),
    }
    return bases


def _megatron_variants(name: str, section: str, base: list[str], experts: str) -> dict[str, list[str]]:
    """The same with Megatron, plain and with what single keys need beside them."""
    own = [one for one in base if not one.startswith(f"{section}.fsdp_config")] + [f"{section}.strategy=megatron"]
    variants = {
        "tp": ["tensor_model_parallel_size=2"],
        "pp": ["pipeline_model_parallel_size=2"],
        "overlap": ["overlap_grad_reduce=true"],
        "offload": ["optimizer_offload=true"],
    }
    found = {
        f"{name} {kind}": [*own, *(f"{section}.megatron.{one}" for one in more)] for kind, more in variants.items()
    }
    return {name: own, **found, f"{name} experts": [*found[f"{name} tp"], experts]}


def _engine_rows(section: str, model: str, optim: str, base: str, ranks: str) -> list[Row]:
    """The keys of a training engine, its model and its optimizer, wherever they stand."""
    s, m, o = (re.escape(name) for name in (section, model, optim))
    role = base.removesuffix(" built")

    def variant(name: str) -> str:
        return name if role == "train" else f"{role} {name}"

    return [
        Row(f"{m}.path", base, "{folder}/deep"),
        Row(f"{m}.tokenizer_path", base, "{folder}/tokens"),
        Row(f"{m}.external_lib", base, "{folder}/lib.py"),
        Row(f"{m}.override_config", base, "{{rms_norm_eps: 0.1}}"),
        Row(f"{m}.enable_activation_offload", variant("auto")),
        Row(f"{m}.lora_rank", base, "2"),
        Row(f"{m}.lora_alpha", variant("lora"), "7"),
        Row(f"{m}.target_modules", variant("lora"), "[q_proj]"),
        Row(f"{m}.exclude_modules", variant("lora"), "[q_proj]"),
        Row(f"{m}.lora_adapter_path", base, "{folder}/adapter"),
        Row(f"{s}.strategy", ranks, "fsdp"),
        Row(f"{s}.fsdp_config.fsdp_size", ranks, "2"),
        Row(rf"{s}.fsdp_config.(reshard_after_forward|forward_prefetch|wrap_policy.disable)", ranks),
        Row(f"{s}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap", ranks, "[Qwen3MLP]"),
        Row(f"{s}.fsdp_config.wrap_policy.min_num_params", ranks, "100"),
        Row(f"{s}.fsdp_config.use_orig_params", variant("fsdp1")),
        Row(f"{s}.fsdp_config.(model_dtype|mixed_precision.(param|reduce|buffer)_dtype)", base, "bf16"),
        Row(f"{s}.(ulysses_sequence|context)_parallel_size", ranks, "2"),
        Row(f"{s}.grad_clip", role, "0.1"),
        Row(f"{s}.activation_memory_budget", variant("compiled"), "0.5"),
        Row(f"{s}.use_torch_compile", variant("auto built") if base == "train" else ranks),
        Row(f"{s}.freeze_vision_tower", variant("seeing")),
        *_megatron_rows(f"{s}.megatron", variant("megatron")),
        Row(f"{o}.weight_decay", base, "0.5"),
        Row(f"{o}.betas", base, "[0.5,0.6]"),
        Row(f"{o}.eps", base, "0.1"),
        Row(f"{o}.lr_warmup_steps", base, "3"),
        Row(f"{o}.lr_warmup_steps_ratio", ranks, "0.9"),
        Row(f"{o}.lr_decay_steps_ratio", variant("wsd"), "0.9"),
        Row(f"{o}.min_lr_ratio", variant("wsd"), "0.5"),
    ]


def _megatron_rows(section: str, base: str) -> list[Row]:
    return [
        Row(f"{section}.(tensor_model|pipeline_model|context)_parallel_size", base, "2"),
        Row(f"{section}.virtual_pipeline_model_parallel_size", f"{base} pp", "2"),
        Row(f"{section}.expert_model_parallel_size", f"{base} experts", "2"),
        Row(f"{section}.expert_tensor_parallel_size", f"{base} experts", "1"),
        Row(f"{section}.sequence_parallel", f"{base} tp"),
        Row(f"{section}.dtype", base, "fp32"),
        Row(f"{section}.overlap_param_gather", f"{base} overlap"),
        Row(f"{section}.grad_offload", f"{base} offload"),
        Row(f"{section}.make_vocab_size_divisible_by", base, "64"),
        Row(f"{section}.override_transformer_config", base, "{{attention_dropout: 0.5}}"),
        Row(f"{section}.balance_algorithm", base, "greedy"),
        Row(f"{section}.schedule_type", f"{base} pp", "interleaved"),
        Row(f"{section}.use_transformer_engine", base, "true", fails=True),
        Row(f"{section}.[a-z_]+", base),
    ]


def _supervised_rows(root: str) -> list[Row]:
    return [
        *([Row("model.random_init", "prefer simpo")] if root == "prefer" else []),
        *([Row("engine.freeze_vision_tower", "prefer")] if root == "prefer" else []),
        Row("data.train_files", root, "{folder}/more.jsonl"),
        Row("data.val_files", f"{root} validated", "{folder}/more.jsonl"),
        Row("data.train_max_samples", root, "5"),
        Row("data.val_max_samples", f"{root} validated", "5"),
        Row("data.prompt_key", root, "question"),
        Row("data.prompt_dict_keys", "sft nested", "[other]"),
        Row("data.response_dict_keys", "sft nested", "[no]"),
        Row("data.prompt_as_message", "sft texts"),
        Row("data.tools_key", "sft told", "functions"),
        Row("data.enable_thinking_key", "sft told", "thinks"),
        Row("model.custom_chat_template", f"{root} chats", "{{{{ messages[0].content }}}}!"),
        Row("data.response_key", root if root == "sft" else "prefer judged", "answer"),
        Row("data.messages_key", "sft conversations", "turns"),
        Row("data.image_key", "sft seeing rows"),
        Row("data.chosen_key", root, "answer"),
        Row("data.rejected_key", root, "answer"),
        Row("data.label_key", "prefer judged", "good"),
        Row("data.apply_chat_template_kwargs", f"{root} chats", "{{loud: true}}"),
        Row("data.max_length", f"{root} short", "9"),
        Row("data.truncation", f"{root} short", "right"),
        Row("data.max_token_len_per_gpu", root, "40"),
        Row("engine.megatron.(param|optimizer|grad)_offload", f"{root} megatron"),
        *_engine_rows("engine", "model", "optim", root, f"{root} ranks"),
        Row("trainer.nnodes", f"{root} pooled on ray", "2"),
        Row("trainer.device", f"{root} ranks", "auto"),
        Row("trainer.(n_gpus_per_node|backend)", f"{root} started"),
        Row("trainer.deadlines.collective", f"{root} ranks"),
        Row("ray_init.address", f"{root} on ray", "auto"),
        Row("ray_init.object_store_memory", f"{root} on ray", "100000000"),
        Row("ray_init.[a-z_]+", f"{root} on ray"),
        Row("trainer.test_freq", f"{root} validated", "-1"),
        Row("trainer.test_after_epoch", f"{root} held out"),
        Row("trainer.(save_freq|memory_copy_freq)", root, "1"),
        Row("checkpoint.save_contents", f"{root} saving", "[model]"),
        Row("checkpoint.(async_save|load_contents)", f"{root} saving"),
        Row("trainer.total_epochs", f"{root} epochs"),
        Row("trainer.resume_mode", f"{root} resumed", "disable"),
        Row(
            "trainer.resume_from_path",
            f"{root}",
            KEPT,
            ("trainer.resume_mode=resume_path",),
        ),
        Row("trainer.remote_dir", f"{root} saving", "{folder}/remote/{root}"),
        Row("trainer.max_ckpt_to_keep", f"{root} saving", "1"),
        Row("trainer.(project|experiment)_name", f"{root} named"),
        Row("trainer.restart_wait", f"{root} restarts"),
        Row("trainer.timeline_steps", f"{root} timeline", "[2]"),
        Row("loss.simpo_gamma", "prefer simpo", "1.5"),
        Row("loss.(un)?desirable_weight", "prefer judged", "2.0"),
        Row("loss.label_smoothing", "prefer", "0.2"),
        Row("reference.path", "prefer", "{folder}/deep"),
        Row("loss.name", "prefer", "ipo"),
    ]


def _train_rows() -> list[Row]:
    return [
        Row("data.train_files", "read", "{folder}/more.jsonl"),
        Row("data.val_files", "read", "{folder}/more.jsonl"),
        Row("data.(train|val)_max_samples", "read", "5"),
        Row("data.shuffle_buffer", "stream", "2"),
        Row("data.prompt_key", "read", "question"),
        Row("data.image_key", "seeing rows"),
        Row(f"{M}.custom_chat_template", "chats", "{{{{ messages[0].content }}}}!"),
        Row("data.apply_chat_template_kwargs", "chats", "{{loud: true}}"),
        Row("data.reward_fn_key", "train", "kind"),
        Row("data.max_prompt_length", "overlong", "5"),
        Row("data.truncation", "overlong", "right"),
        Row("data.filter_overlong_prompts", "overlong"),
        Row("data.filter_overlong_prompts_workers", "read"),
        Row("data.train_batch_size", "train", "6"),
        Row("data.gen_batch_size", "filtered", "6"),
        Row("data.sampler.class_path", "sampler", "{folder}/other.py"),
        Row("data.sampler.class_name", "sampler", "Forwards"),
        Row("data.custom_cls.path", "own rows", "{folder}/other.py"),
        Row("data.custom_cls.name", "own rows", "OtherRows"),
        Row("actor_rollout_ref.hybrid_engine", "started", "false", (f"{R}.nnodes=1", f"{R}.n_gpus_per_node=1")),
        Row("actor_rollout_ref.expandable_segments", "auto built"),
        *_engine_rows(A, M, f"{A}.optim", "train", "ranks"),
        Row(f"{A}.ppo_mini_batch_size", "train", "4"),
        Row(f"{A}.ppo_micro_batch_size_per_gpu", "train", "1"),
        Row(f"{A}.ppo_max_token_len_per_gpu", "dynamic", "16"),
        Row(f"{A}.clip_ratio(_low|_high)?", "train", "0.0001"),
        Row(f"{A}.clip_ratio_c", "train", "1.00001"),
        Row(f"{A}.policy_loss.loss_mode", "train", "cispo"),
        Row(f"{A}.policy_loss.loss_kwargs", "own loss", "{{scale: 3.0}}"),
        Row(f"{A}.policy_loss.tau_(pos|neg)", "sapo", "9.0"),
        Row(f"{A}.policy_loss.clip_cov_ratio", "clip_cov", "0.2"),
        Row(f"{A}.policy_loss.clip_cov_lb", "clip_cov", "0.1"),
        Row(f"{A}.policy_loss.clip_cov_ub", "clip_cov", "0.001"),
        Row(f"{A}.policy_loss.kl_cov_ratio", "kl_cov", "0.1"),
        Row(f"{A}.policy_loss.ppo_kl_coef", "kl_cov", "9.0"),
        Row(f"{A}.policy_loss.dro_beta", "dro", "9.0"),
        Row(f"{A}.policy_loss.icepop_low", "icepop", "1.0"),
        Row(f"{A}.policy_loss.icepop_high", "icepop", "1.0"),
        Row(f"{A}.policy_loss.behaviour_weight_cap", "decoupled", "0.5"),
        Row(f"{A}.policy_loss.m2_threshold", "m2po", "0.000000001"),
        Row(f"{A}.loss_scale_factor", "scaled", "3.0"),
        Row(f"{A}.kl_loss_coef", "kl", "0.5"),
        Row(f"{A}.kl_loss_type", "kl", "k2"),
        Row(f"{A}.skip_zero_advantage", "zeros"),
        Row(f"{A}.router_replay.mode", "experts", "R3"),
        Row(f"{A}.checkpoint.save_contents", "saving", "[model]"),
        Row(f"{A}.checkpoint.(async_save|load_contents)", "saving"),
        Row(f"{REF}.nnodes", "ref pools", "2"),
        Row(f"{REF}.n_gpus_per_node", "ref pools", "2"),
        Row(f"{REF}.model.path", "kl", "{folder}/deep"),
        Row(f"{REF}.update_every", "kl steps", "1"),
        Row(f"{REF}.log_prob_micro_batch_size_per_gpu", "kl", "1"),
        Row(f"{REF}.log_prob_use_dynamic_bsz", "kl"),
        Row(f"{REF}.log_prob_max_token_len_per_gpu", "dynamic", "15"),
        Row(f"{REF}.strategy", "ref apart", "fsdp"),
        Row(f"{REF}.(ulysses_sequence_parallel_size|context_parallel_size|fsdp_config.fsdp_size)", "ref apart", "2"),
        Row(f"{REF}.fsdp_config.param_offload", "kl"),
        Row(f"{REF}.megatron.virtual_pipeline_model_parallel_size", "ref megatron tp", "2"),
        Row(f"{REF}.megatron.expert_model_parallel_size", "ref experts", "2"),
        Row(f"{REF}.megatron.expert_tensor_parallel_size", "ref experts", "1"),
        Row(f"{REF}.megatron.[a-z_]+", "ref megatron", "2"),
        Row(f"{R}.name", "train", "hf"),
        Row(f"{R}.as_server", "vllm", "true"),
        Row(f"{R}.nnodes", "apart on ray", "2"),
        Row(f"{R}.n_gpus_per_node", "apart", "2"),
        Row(f"{R}.temperature", "train", "0.5"),
        Row(f"{R}.(top_k|max_num_seqs)", "train", "2"),
        Row(f"{R}.min_p", "train", "0.99"),
        Row(f"{R}.min_tokens", "train", "6"),
        Row(f"{R}.stop", "train", "['1','2','3']"),
        Row(f"{R}.val_kwargs.stop", "validated", "['1','2','3']"),
        Row(f"{R}.val_kwargs.ignore_eos", "validated"),
        Row(f"{R}.do_sample", "single"),
        Row(f"{R}.dtype", "train", "bfloat16"),
        Row(f"{R}.kv_cache_dtype", "auto built", "fp8", fails=True),
        Row(f"{R}.max_num_batched_tokens", "train", "20"),
        Row(f"{R}.val_kwargs.temperature", "val sampled", "0.3"),
        Row(f"{R}.val_kwargs.top_k", "val sampled", "2"),
        Row(f"{R}.val_kwargs.top_p", "val sampled", "0.3"),
        Row(f"{R}.val_kwargs.min_p", "val sampled", "0.99"),
        Row(f"{R}.val_kwargs.n", "val sampled", "2"),
        Row(f"{R}.val_kwargs.repetition_penalty", "validated", "3.0"),
        Row(f"{R}.val_kwargs.min_tokens", "validated", "6"),
        Row(f"{R}.val_kwargs.do_sample", "validated", "true", (f"{R}.val_kwargs.temperature=1.0",)),
        Row(f"{R}.log_prob_micro_batch_size_per_gpu", "train", "1"),
        Row(f"{R}.log_prob_max_token_len_per_gpu", "dynamic", "15"),
        Row(f"{R}.tensor_model_parallel_size", "ranks", "2"),
        Row(f"{R}.expert_parallel_size", "experts ranks", "2"),
        Row(f"{R}.max_model_len", "train", "20"),
        Row(f"{R}.(gpu_memory_utilization|enforce_eager|enable_chunked_prefill)", "vllm"),
        Row(f"{R}.update_weights_bucket_megabytes", "vllm"),
        Row(f"{R}.load_format", "vllm", "auto"),
        Row(f"{R}.update_weights_(verify|delta)", "copies"),
        Row(f"{R}.update_weights_adapters", "lora ranks", "merged"),
        *(Row(f"{R}.engine_kwargs.{name}", name, "{{some: 1}}") for name in ("vllm", "sglang")),
        Row(f"{R}.multi_turn.enable", "tools", "false", (f"{R}.multi_turn.tools=[]",
            f"{R}.multi_turn.tokenization_sanity_check_mode=strict")),
        Row(f"{R}.multi_turn.tool_config_path", "game", "{folder}/tools.yaml"),
        Row(f"{R}.multi_turn.tools", "game", "[{folder}/own.py:add]"),
        Row(f"{R}.multi_turn.environment", "game", "{folder}/own.py:OtherGame"),
        Row(f"{R}.multi_turn.environment_kwargs", "game", "{{secret: 2}}"),
        Row(f"{R}.multi_turn.format", "tools", "code"),
        Row(f"{R}.multi_turn.[a-z_]+", "tools"),
        Row("critic.enable", "own estimator", "true"),
        Row("critic.(nnodes)", "gae pools", "2"),
        Row("critic.n_gpus_per_node", "gae pools", "2"),
        Row("critic.grad_clip", "gae", "0.1"),
        Row("critic.model.trust_remote_code", "gae pathed"),
        Row("(critic|reward_model).(freeze_vision_tower|grad_clip|keep_logits_megabytes)", "gae scored"),
        Row(
            "reward_model.model.(enable_gradient_checkpointing|enable_activation_offload|lora_rank|lora_alpha|"
            "target_modules|exclude_modules)",
            "scored",
        ),
        Row("reward_model.megatron.([a-z_]*overlap[a-z_]*|grad_offload|optimizer_offload)", "scored megatron"),
        *_engine_rows("critic", "critic.model", "critic.optim", "gae built", "gae ranks"),
        Row("critic.ppo_mini_batch_size", "gae", "4"),
        Row("critic.ppo_micro_batch_size_per_gpu", "gae", "1"),
        Row("critic.ppo_max_token_len_per_gpu", "gae dynamic", "16"),
        Row("critic.cliprange_value", "gae", "0.0001"),
        Row("critic.checkpoint.save_contents", "saved critic", "[model]"),
        Row("critic.checkpoint.(async_save|load_contents)", "saved critic"),
        Row(r"critic\..*", "gae"),
        Row("reward_model.enable", "train", "true", tuple(
            one for one in ("reward_model.model.path={folder}/scorer", "reward_model.micro_batch_size_per_gpu=2"))),
        Row("reward_model.nnodes", "scored pools", "2"),
        Row("reward_model.n_gpus_per_node", "scored pools", "2"),
        Row("reward_model.model.lora_adapter_path", "scored built", "{folder}/deep adapter"),
        *_engine_rows("reward_model", "reward_model.model", "reward_model.optim", "scored built", "scored ranks"),
        Row("reward_model.weight", "scored", "3.0"),
        Row("reward_model.micro_batch_size_per_gpu", "scored", "1"),
        Row("reward_model.forward_max_token_len_per_gpu", "scored dynamic", "16"),
        Row(r"reward_model\..*", "scored"),
        Row("reward.name", "zeros", "sort_digits"),
        Row("reward.kwargs", "zeros", "{{ignore_case: true}}"),
        Row("reward.functions", "functions", "{{exact_match: 2.0}}"),
        Row("reward.judge.path", "judge", "{folder}/deep"),
        Row("reward.judge.engine", "judge", "hf"),
        Row("reward.judge.dtype", "judge", "bfloat16"),
        Row("reward.judge.(nnodes|n_gpus_per_node)", "judge pools", "2"),
        Row("reward.judge.(gpu_memory_utilization|engine_kwargs|trust_remote_code)", "judge vllm"),
        Row(r"reward\.judge\..*", "judge"),
        Row("reward.on_error", "rewarded"),
        Row("custom_reward_function.path", "train", "{folder}/other.py"),
        Row("custom_reward_function.name", "train", "other"),
        Row("custom_reward_function.reward_kwargs", "train", "{{bonus: 1.0}}"),
        Row("reward_manager.name", "train", "dapo", ("reward_manager.overlong_buffer.len=4",)),
        Row("reward_manager.timeout", "rewarded"),
        Row("reward_manager.num_processes", "prime", "2"),
        Row("reward_manager.max_concurrent_calls", "async reward", "2"),
        Row("reward_manager.overlong_buffer.len", "dapo", "2"),
        Row("reward_manager.overlong_buffer.[a-z_]+", "dapo"),
        Row("algorithm.adv_estimator", "train", "rloo"),
        Row("algorithm.adv_kwargs", "own estimator", "{{scale: 3.0}}"),
        Row("algorithm.norm_adv_std_over", "train", "batch"),
        Row("algorithm.gamma", "discounted", "0.5"),
        Row("algorithm.lam", "gae", "0.5"),
        Row("algorithm.kl_penalty", "kl reward", "k2"),
        Row("algorithm.kl_ctrl.type", "kl reward", "adaptive"),
        Row("algorithm.kl_ctrl.kl_coef", "kl reward", "0.5"),
        Row("algorithm.kl_ctrl.(horizon|target_kl)", "adaptive", "2.0"),
        Row("algorithm.distillation_coef", "teacher", "0.9"),
        Row("algorithm.gdpo_reward_keys", "parts", "[first]"),
        Row("algorithm.gdpo_reward_weights", "parts", "[1.0,5.0]"),
        Row("algorithm.filter_groups.enable", "train"),
        Row("algorithm.filter_groups.metric", "filtered", "first"),
        Row("algorithm.filter_groups.max_num_gen_batches", "filtered", "1", fails=True),
        Row("algorithm.rollout_correction.rollout_is_threshold", "weighed", "1.0"),
        Row("algorithm.rollout_correction.rollout_is_batch_normalize", "weighed"),
        Row("algorithm.rollout_correction.rollout_rs", "rejected", "seq_mean_k1"),
        Row("algorithm.rollout_correction.rollout_rs_threshold", "rejected", "0.9999_1.0001"),
        Row("algorithm.rollout_correction.loss_type", "bypass", "reinforce"),
        Row("async_training.(max_staleness|batches_ahead)", "ahead", "1"),
        Row("async_training.partial_rollout", "ahead"),
        Row("trainer.nnodes", "pooled on ray", "2"),
        Row("trainer.(n_gpus_per_node|backend|device|deadlines.collective)", "started"),
        Row("trainer.total_epochs", "epochs", "2"),
        Row("trainer.resume_mode", "resumed", "disable"),
        Row("trainer.resume_from_path", "train", KEPT, ("trainer.resume_mode=resume_path",)),
        Row("trainer.remote_dir", "saving", "{folder}/remote/{root}"),
        Row("trainer.max_(actor_)?ckpt_to_keep", "saving", "1"),
        Row("trainer.max_critic_ckpt_to_keep", "saved critic", "1"),
        Row("trainer.(project|experiment)_name", "named"),
        Row("trainer.restart_wait", "restarts"),
        Row("trainer.timeline_steps", "timeline", "[2]"),
        Row("trainer.test_freq", "validated", "-1"),
        Row("trainer.(val_before_train|val_only|log_val_generations)|data.val_batch_size", "validated"),
        Row("trainer.(save_freq|memory_copy_freq)", "train", "1"),
        Row("trainer.critic_warmup", "gae", "1"),
        Row("trainer.balance_batch", "wide"),
        Row("trainer.rollout_data_dir", "train", "{folder}/dumped"),
        Row("trainer.validation_data_dir", "validated", "{folder}/dumped"),
        Row("trainer.gates.on_policy_kl", "gates", "0.9"),
        Row("trainer.gates.log_prob_diff_mean", "gates", "0.9"),
        Row("trainer.gates.entropy_share", "gates", "0.001"),
        Row("trainer.gates.limits", "gates", "{{odd: {{max: 5.0}}}}"),
        Row("trainer.gates.repeat_every", "gates", "2"),
        Row("trainer.gates.[a-z_]+", "gates"),
        Row("ray_init.address", "on ray", "auto"),
        Row("ray_init.object_store_memory", "on ray", "100000000"),
        Row("ray_init.[a-z_]+", "on ray"),
        Row("global_profiler.tool", "assembled", "torch", ("global_profiler.steps=[1]",)),
        Row("global_profiler.steps", "profiled", "[2]"),
        Row("global_profiler.ranks", "profiled", "[]"),
        Row("global_profiler.[a-z_]+", "profiled"),
    ]  # fmt: skip


ROWS = {"train": _train_rows(), "sft": _supervised_rows("sft"), "prefer": _supervised_rows("prefer")}


# Keys that say only what is so, or are there to be refused: any other value is refused, or noted. A model that sees
# images is refused for pairs of answers, so that there is nothing to freeze.
FIXED = re.compile(
    r"prefer:engine\.freeze_vision_tower|[a-z]+:("
    r".*model\.use_liger|.*megatron\.(use_dist_checkpointing|schedule_type)|.*optim\.optimizer|"
    rf"{re.escape(R)}\.(prompt|response)_length|critic\.keep_logits_megabytes|"
    r"(critic|reward_model)\.(freeze_vision_tower|model\.tokenizer_path|model\.custom_chat_template)|"
    r"reward_model\.(grad_clip|keep_logits_megabytes|fsdp_config\.optimizer_offload)|"
    r"reward_model\.model\.(enable_gradient_checkpointing|enable_activation_offload|lora_rank|lora_alpha|target_modules)|"
    r"reward_model\.model\.exclude_modules|"
    r"reward_model\.megatron\.(use_distributed_optimizer|overlap_grad_reduce|overlap_param_gather|grad_offload)|"
    r"reward_model\.megatron\.optimizer_offload|engine\.(fsdp_config|megatron)\.(param|optimizer|grad)_offload)"
)


def row_of(root: str, name: str) -> Row:
    """The first row for a key; without one any other value in the plain run of its command."""
    for row in ROWS[root]:
        if found := re.fullmatch(row.pattern, name):
            return replace(row, base=found.expand(row.base))
    return Row(name, root)


def other_value(leaf: Leaf, present: Any) -> str:
    """A value that is not the present one, within the key's choices and range."""
    if leaf.base_type is bool:
        return "false" if present else "true"
    if leaf.info.choices:
        others = [c for c in leaf.info.choices if c != present and [c] != present]
        chosen = str((others or ["something"])[0])
        return f"[{chosen}]" if leaf.base_type is list else chosen
    if leaf.base_type is list:
        return {int: "[2]", float: "[0.5]"}.get(leaf.item_type, "[something]")
    if leaf.base_type is dict:
        return "{some: 1}"
    if leaf.base_type in (int, float):
        low, high = leaf.info.low or 0, leaf.info.high
        return "0.37" if high == 1 else str((present or low) + 1)
    return "something"


def all_keys() -> list[tuple[str, str]]:
    return [(command, name) for command, root in ROOTS.items() for name in leaves(root)]


def overrides_for(root: str, config: Any, row: Row, name: str, folder: Path) -> list[str]:
    """What changes a key of a config, and what must be said with it."""
    leaf = leaves(ROOTS[root])[name]
    value = (
        other_value(leaf, get_value(config, name)) if row.value is None else row.value.format(folder=folder, root=root)
    )
    return [f"{name}={value}", *(one.replace("{folder}", str(folder)) for one in row.beside)]

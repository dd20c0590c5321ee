"""Whole plans: phases, verdicts, changes that fit, the search, the pipeline's bubble, and the command."""

import json
import time
from argparse import Namespace
from itertools import pairwise

import numpy as np
import pytest
from transformers import AutoConfig, Qwen3MoeConfig

from meshrl.cli import main
from meshrl.config import load_config
from meshrl.config.engine import ModelConfig
from meshrl.config.rl import PPOConfig
from meshrl.config.validate import check_config
from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.parallel.pipeline import ideal_bubble
from meshrl.telemetry.hardware import parse_cluster
from meshrl.tools.plan.models import KNOWN, drawn_lengths, find_model, known_name
from meshrl.tools.plan.plan_command import _critic_model, _ref_model
from meshrl.tools.plan.roles import Budget, Role, roles_of
from meshrl.tools.plan.rollout_plan import _count_slices, _decoding
from meshrl.tools.plan.search import changed, nearest_fit, search, stages_in_letters
from meshrl.tools.plan.step_plan import make_plan
from meshrl.tools.plan.timing import model_flops, pipeline_bubble
from meshrl.weights.placement import megatron

BASE = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]


def load(gpus, *overrides, model="Qwen3-1.7B"):
    cluster = parse_cluster(gpus)
    processes = [f"trainer.nnodes={cluster.nodes}", f"trainer.n_gpus_per_node={cluster.per_node}"]
    if cluster.nodes > 1:
        processes.append("trainer.backend=ray")
    config = load_config("grpo", [*BASE, f"actor_rollout_ref.model.path={model}", *overrides, *processes]).config
    data, n = config.data, config.actor_rollout_ref.rollout.n
    lengths = drawn_lengths(data.train_batch_size * n, n, data.max_prompt_length, data.max_response_length, 256)
    found = find_model(config.actor_rollout_ref.model)

    def make(config):
        return make_plan(config, found, cluster, lengths, quick=True)

    return config, make


def phase(plan, name):
    return next(phase for phase in plan.phases if phase.name == name)


def test_one_device_shares_weights_and_needs_no_sync():
    config, make = load("1xH200")
    plan = make(config)
    assert [p.name for p in plan.phases] == ["generate", "update_actor", "sync"]
    assert plan.fits
    numel = plan.model.num_params
    update = phase(plan, "update_actor").memory
    # bfloat16 weights, 16-bit remainders, float32 moments and gradients: 16 bytes a weight.
    assert update["parameters"] + update["optimizer"] + update["gradients"] == pytest.approx(16 * numel, rel=1e-4)
    assert "rollout weights" not in phase(plan, "generate").memory
    assert plan.rollout.sync.received == 0


def test_8_bits_take_a_copy_and_half_the_cache_and_are_faster():
    config, make = load("1xH200")
    plain = make(config)
    weights = make(changed(config, {"actor_rollout_ref.rollout.quantization": "fp8"}))
    both = make(
        changed(
            config, {"actor_rollout_ref.rollout.quantization": "fp8", "actor_rollout_ref.rollout.kv_cache_dtype": "fp8"}
        )
    )
    copy = phase(weights, "generate").memory["weights in 8 bits"]
    # 28 layers: queries and output 2048 x 2048, keys and values 2048 x 1024, three matrices 2048 x 6144.
    assert copy == 28 * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)
    assert "weights in 8 bits" not in phase(plain, "generate").memory
    assert "weights in 8 bits" not in phase(weights, "update_actor").memory
    assert phase(weights, "sync").memory["weights in 8 bits"] == copy
    caches = [phase(plan, "generate").memory["KV cache"] for plan in (plain, both)]
    assert caches[1] / caches[0] == pytest.approx((128 + 4) / 256, rel=1e-3)
    seconds = [phase(plan, "generate").seconds for plan in (plain, weights, both)]
    assert seconds[0] > seconds[1] > seconds[2] > 0.5 * seconds[0]


def test_products_in_8_bits_are_faster_where_layers_are_compiled():
    compiled = "actor_rollout_ref.actor.use_torch_compile"
    config, make = load("1xH200", "algorithm.rollout_correction.rollout_is=token", f"{compiled}=true")
    product = {"actor_rollout_ref.actor.fsdp_config.mixed_precision.product_dtype": "fp8"}
    plain, eight = make(config), make(changed(config, product))
    for name, least, most in (("old_log_prob", 0.75, 0.9), ("update_actor", 0.8, 0.95)):
        assert least < phase(eight, name).seconds / phase(plain, name).seconds < most
    assert phase(eight, "generate").seconds == phase(plain, "generate").seconds
    eager = [make(changed(config, {compiled: False} | more)) for more in ({}, product)]
    assert phase(eager[0], "update_actor").seconds == phase(eager[1], "update_actor").seconds


@pytest.mark.parametrize(
    ("gpus", "words", "remarks"),
    [
        ("1xH100", ["actor_rollout_ref.actor.use_torch_compile=true"], []),
        ("1xH100", [], ["product_dtype=fp8 gains nothing on GPUs without compiled layers: set"]),
        (
            "1xA100",
            ["actor_rollout_ref.actor.use_torch_compile=true", "actor_rollout_ref.rollout.quantization=fp8"],
            ["product_dtype will be refused: A100 has no", "kv_cache_dtype will be refused: A100 has no"],
        ),
    ],
)
def test_what_devices_lack_for_8_bits_is_remarked(capsys, gpus, words, remarks):
    product = "actor_rollout_ref.actor.fsdp_config.mixed_precision.product_dtype=fp8"
    policy = "actor_rollout_ref.model.path=Qwen3-1.7B"
    assert main(["plan", "grpo", policy, *BASE, product, *words, "--gpus", gpus, "--json"]) == 0
    found = [
        remark for remark in json.loads(capsys.readouterr().out)["remarks"] if "8-bit" in remark or "fp8" in remark
    ]
    assert len(found) == len(remarks)
    assert all(wanted in remark for wanted, remark in zip(remarks, found, strict=True))


def test_a_teacher_is_counted_with_its_own_size_and_layout():
    teacher = ["algorithm.adv_estimator=distillation", "actor_rollout_ref.ref.model.path=Qwen3-32B"]
    teacher += ["actor_rollout_ref.ref.nnodes=1", "actor_rollout_ref.ref.n_gpus_per_node=4"]
    found = []
    for more in ([], ["actor_rollout_ref.ref.ulysses_sequence_parallel_size=4"]):
        config, make = load("1xH200", *teacher, *more)
        roles = {role.name: role for role in roles_of(config, make(config).model, ref_model=_ref_model(config))}
        assert roles["ref"].model.num_params == pytest.approx(32.8e9, rel=0.01)
        found.append((roles["ref"].world_size, roles["ref"].engine.ulysses_sequence_parallel_size))
        assert roles["actor"].engine.ulysses_sequence_parallel_size == 1
    assert found == [(4, 1), (4, 4)]
    assert _ref_model(load("1xH200")[0]) is None


def test_phases_follow_the_recipe():
    config, make = load(
        "8xH200", "algorithm.adv_estimator=gae", "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.ppo_epochs=2",
    )  # fmt: skip
    plan = make(config)
    names = ["generate", "old_log_prob", "ref", "values", "update_critic", "update_actor", "sync"]
    assert [p.name for p in plan.phases] == names
    assert {"ref parameters", "critic optimizer"} <= set(phase(plan, "update_actor").memory)
    assert "critic gradients" in phase(plan, "update_critic").memory
    assert "critic gradients" not in phase(plan, "update_actor").memory


def test_a_critic_on_devices_of_its_own_leaves_the_policy_room_and_time():
    ppo = (
        "algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.ppo_epochs=2",
    )  # fmt: skip
    config, make = load("8xH200", *ppo)
    shared = make(config)
    config, make = load("8xH200", *ppo, "critic.nnodes=1", "critic.n_gpus_per_node=2")
    plan = make(config)
    away = ("actor_rollout_ref.ref.nnodes=1", "actor_rollout_ref.ref.n_gpus_per_node=8")
    config, make = load("8xH200", *ppo, *away)
    aside = make(config)
    assert not any(part.startswith("ref") for part in phase(aside, "update_actor").memory)
    assert "parameters" not in phase(aside, "ref").memory  # the policy's
    first, second = phase(aside, "ref"), phase(aside, "old_log_prob")
    assert first.beside == pytest.approx(min(first.seconds, second.seconds))
    assert aside.seconds == pytest.approx(shared.seconds - phase(aside, "ref").beside, rel=0.01)
    assert [p.name for p in plan.phases] == [p.name for p in shared.phases]
    for name in ("old_log_prob", "update_actor", "generate"):
        assert phase(plan, name).seconds == phase(shared, name).seconds
        assert not any(part.startswith("critic") for part in phase(plan, name).memory)
    mine, theirs = phase(plan, "update_critic"), phase(shared, "update_critic")
    assert {part.partition(" ")[0] for part in mine.memory if "critic" in part} == {"critic"}
    assert "parameters" not in mine.memory  # the policy's
    # A quarter of the ranks: four times the states of one, and most of four times the seconds.
    assert mine.memory["critic optimizer"] == pytest.approx(4 * theirs.memory["critic optimizer"], rel=0.01)
    assert 2 < mine.seconds / theirs.seconds <= 4.1
    learning = phase(plan, "update_actor").seconds + phase(plan, "sync").seconds
    assert mine.beside == pytest.approx(min(mine.seconds, learning))
    values, before = phase(plan, "values"), phase(plan, "old_log_prob").seconds + phase(plan, "ref").seconds
    assert values.beside == pytest.approx(min(values.seconds, before))
    assert plan.seconds == pytest.approx(sum(p.seconds for p in plan.phases) - mine.beside - values.beside)


@pytest.mark.parametrize(
    ("words", "needs"),
    [
        ([], False),
        (["algorithm.rollout_correction.rollout_is=token"], True),
        (["algorithm.rollout_correction.rollout_rs=token_k1"], True),
        (["async_training.max_staleness=1"], True),
        (["async_training.max_staleness=1", "algorithm.rollout_correction.rollout_is=off"], False),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"], True),
        (["actor_rollout_ref.actor.ppo_mini_batch_size=32", "algorithm.rollout_correction.bypass_mode=true"], False),
    ],
)
def test_old_log_probs_are_planned_where_the_trainer_needs_them(words, needs):
    config, make = load("1xH200", *words, model="Qwen3-0.6B")
    assert ("old_log_prob" in [phase.name for phase in make(config).phases]) == needs


def numbers(capsys, *words):
    """What the command says of a recipe, as numbers."""
    policy = "actor_rollout_ref.model.path=Qwen3-0.6B"
    assert main(["plan", "grpo", policy, *BASE, *words, "--gpus", "1xH100", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(("words", "trained"), [([], 596e6), (["critic.model.lora_rank=8"], 5.05e6)])
def test_a_critic_has_the_policys_path_but_not_its_adapters(words, trained):
    lora = ["algorithm.adv_estimator=gae", "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.model.lora_rank=4"]
    config, _ = load("1xH100", *lora, *words, model="Qwen3-0.6B")
    model = find_model(config.actor_rollout_ref.model)
    _, critic = roles_of(config, model, _critic_model(config, Namespace(model_config=None)))
    # Remainders of 16 bits and two moments in float32.
    assert critic.states().optimizer == pytest.approx(10 * trained, rel=0.01)


def test_a_reward_model_and_a_judge_have_their_room(capsys):
    plain = numbers(capsys)
    scored = numbers(capsys, "reward_model.enable=true", "reward_model.model.path=Qwen3-1.7B")
    assert [phase["name"] for phase in scored["phases"]] == ["generate", "reward", "update_actor", "sync"]
    held = scored["phases"][2]["memory"]["reward_model parameters"]
    assert held == pytest.approx(2 * 1.72e9, rel=0.01)  # bfloat16 on one device, without a language model's head
    assert scored["phases"][2]["bytes"] == plain["phases"][1]["bytes"] + held
    unknown = numbers(capsys, "reward_model.enable=true", "reward_model.model.path=elsewhere")
    assert any("elsewhere" in remark for remark in unknown["remarks"])
    judged = numbers(capsys, "reward.judge.path=elsewhere", "reward.judge.engine=vllm")
    assert judged["phases"][1]["memory"]["judge"] == pytest.approx(0.2 * 79.1 * 2**30, rel=0.02)
    assert any("judge" in remark for remark in numbers(capsys, "reward.judge.path=elsewhere")["remarks"])


def test_more_shards_hold_less_and_offload_takes_it_away():
    plans = [make(config) for config, make in (load(f"{n}xH200") for n in (2, 4, 8))]
    held = [phase(plan, "update_actor").memory["optimizer"] for plan in plans]
    assert held[0] > 1.9 * held[1] > 3.7 * held[2]
    config, make = load("8xH200", "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true")
    assert "optimizer" not in phase(make(config), "generate").memory
    assert "optimizer" in phase(make(config), "update_actor").memory


def test_ranks_of_a_sequence_hold_shards_of_their_own():
    """64 devices as in verl's script for a model of 7B: 4 share a sequence, 32 a copy of the weights."""
    actor = "actor_rollout_ref.actor"
    words = [f"{actor}.ulysses_sequence_parallel_size=4", "actor_rollout_ref.rollout.tensor_model_parallel_size=4"]

    def planned(*more):
        config, make = load("64xH100", *words, *more, model="Qwen2.5-7B")
        update = phase(make(config), "update_actor")
        return update.memory, {traffic.axis: traffic for traffic in update.traffic}

    whole = find_model(ModelConfig(path="Qwen2.5-7B")).num_params * 4
    for size, shards in ((-1, 64), (32, 32), (8, 8), (2, 2)):
        memory, traffic = planned(f"{actor}.fsdp_config.fsdp_size={size}")
        assert memory["parameters"] == pytest.approx(whole / shards, rel=1e-3)
        assert memory["optimizer"] == pytest.approx(2 * whole / shards, rel=1e-3)
        assert traffic["fsdp"].ranks == traffic["fsdp grads"].ranks == shards
        # Shards are neighbours: 8 of them are those of one machine, and copies lie on others.
        assert traffic["fsdp"].crosses_nodes == (shards > 8)
        assert not traffic["sp"].crosses_nodes
        assert ("copies" in traffic) == (size != -1)
        if "copies" in traffic:
            assert (traffic["copies"].ranks, traffic["copies"].crosses_nodes) == (64 // shards, True)
    # The control: what lies on a rank does not depend on how many share a sequence.
    words = words[1:]
    assert planned()[0]["parameters"] == pytest.approx(whole / 64, rel=1e-3)


def test_checkpointing_trades_memory_for_time():
    config, make = load("8xH200")
    with_it, without = (
        phase(make(changed(config, {"actor_rollout_ref.model.enable_gradient_checkpointing": on})), "update_actor")
        for on in (True, False)
    )
    assert without.memory["activations"] > 4 * with_it.memory["activations"]
    assert without.seconds < with_it.seconds


def test_what_does_not_fit_says_what_would():
    config, make = load("1xL40S", model="Qwen3-4B")
    plan = make(config)
    assert not plan.fits
    nearest = nearest_fit(plan, make)
    assert nearest is not None
    assert nearest.plan.fits
    # The overrides are words that the command line takes, and give that very plan.
    again, make_again = load("1xL40S", *nearest.overrides, model="Qwen3-4B")
    assert make_again(again).fullest.total == nearest.plan.fullest.total


def test_changes_carry_their_followers():
    config, _ = load("1xH200")
    made = changed(config, {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096})
    assert made.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu == 4096
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16384


def test_search_ranks_what_fits_and_what_the_config_allows():
    config, make = load("2xH100", model="Qwen3-4B")
    plan = make(config)
    found = search(plan, make)
    assert found.best
    assert found.seen == found.layouts
    for first, second in pairwise(found.best):
        assert first.plan.seconds <= second.plan.seconds
    known = set(check_config(config, check_files=False))
    for candidate in found.best:
        assert candidate.plan.fits
        assert set(check_config(candidate.plan.config, check_files=False)) <= known
    loaded, _ = load("2xH100", *found.best[0].overrides, model="Qwen3-4B")
    assert isinstance(loaded, PPOConfig)
    # With no time at all it looks at nothing.
    assert search(plan, make, seconds=-1.0).seen == 0


LONG = [
    *("data.max_prompt_length=2048", "data.max_response_length=32768", "data.train_batch_size=16"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=16", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=36864"),
]


@pytest.mark.parametrize(
    ("gpus", "model", "words"),
    [
        ("1xH100", "Qwen3-8B", ["actor_rollout_ref.model.lora_rank=32"]),
        ("1xH200", "Qwen3-0.6B", LONG),
        ("1xH200", "Qwen3-0.6B", ["actor_rollout_ref.actor.fsdp_config.param_offload=true"]),
    ],
    ids=["few weights are trained", "a budget above all that are tried", "another way to offload"],
)
def test_a_search_finds_at_least_the_recipe_that_fits(gpus, model, words):
    config, make = load(gpus, *words, model=model)
    plan = make(config)
    found = search(plan, make, best=100)
    assert plan.fits
    assert {} in [candidate.settings for candidate in found.best]
    assert found.best[0].plan.seconds <= plan.seconds
    assert len(found.best) > 1


def test_stages_in_letters():
    assert stages_in_letters(5, 2) in ("Ettt|ttL", "Ett|tttL")
    text = stages_in_letters(61, 32)
    assert text.count("t") == 61
    assert text.count("|") == 31
    assert {len(chunk.strip("EL")) for chunk in text.split("|")} == {1, 2}
    assert text.startswith("Et|")
    assert text.endswith("|tL")


@pytest.mark.parametrize(("pp", "vpp", "count"), [(2, 1, 4), (4, 1, 8), (4, 2, 8), (2, 4, 6)])
def test_equal_micro_batches_have_the_known_bubble(pp, vpp, count):
    config, _ = load("8xH200", model="Qwen3-32B")
    actor = config.actor_rollout_ref.actor
    actor.strategy = "megatron"
    actor.megatron.pipeline_model_parallel_size = pp
    actor.megatron.virtual_pipeline_model_parallel_size = vpp if vpp > 1 else None
    model = find_model(config.actor_rollout_ref.model)
    role = Role("actor", model, config.actor_rollout_ref.model, actor, 8)
    even = pipeline_bubble(role, Budget(1, 1, count), [1.0] * count)
    assert even.replayed == pytest.approx(ideal_bubble(pp, vpp, count))
    uneven = pipeline_bubble(role, Budget(1, 1, count), [1.0 + (number % 2) for number in range(count)])
    assert uneven.replayed > even.replayed


def test_decoding_steps_by_hand():
    active, context = _decoding(np.array([3, 1, 2]), np.array([10, 20, 30]), slots=2)
    # Step 0: samples 0 and 1; sample 2 takes the place of sample 1.
    assert active.tolist() == [2, 2, 2]
    assert context.tolist() == [30, 41, 43]


def test_operations_by_hand(make_lm):
    from meshrl.tools.plan.models import PlannedModel

    model = PlannedModel(make_lm("qwen3_moe").config, "test")
    flops = model_flops(model)
    attention = 32 * 8 * (4 + 2 + 2) + 32 * 32
    experts = 2 * 3 * 32 * 16 + 0  # two of four are visited; the router is no linear layer here
    assert flops.token == 2 * 2 * (attention + experts)
    assert flops.target == 2 * 41 * 32
    assert flops.pair == 2 * 2 * 4 * (8 + 8)


def test_known_shapes_have_their_names_size():
    assert known_name("models/Qwen2.5-7B-Instruct") == "Qwen2.5-7B"
    assert known_name("nobody") is None
    for name in ("Qwen2.5-7B", "Qwen3-30B-A3B", "Llama-3.3-70B"):
        billions = float(name.split("-")[-1].rstrip("B")) if "A3B" not in name else 30.0
        config, _ = load("8xH200", model=name)
        assert find_model(config.actor_rollout_ref.model).num_params == pytest.approx(billions * 1e9, rel=0.1)
    assert "DeepSeek-V3" in KNOWN


def test_other_kinds_of_attention_are_no_states(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "deepseek_v32", "num_hidden_layers": 2}))
    assert find_model(ModelConfig(), str(file)).num_layers == 2


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "nonesuch"}, "knows no model_type 'nonesuch'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "is refused by transformers: .*hidden_size"),
        ({"model_type": "qwen3_5_text"}, "layers of qwen3_5_text carry a state .* not planned yet"),
        ({"model_type": "falcon_h1"}, "layers of falcon_h1 carry a state"),
    ],
)
def test_a_config_file_that_cannot_be_planned_is_named(tmp_path, fields, words):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=f"{file}.* {words}"):
        find_model(ModelConfig(), str(file))


@pytest.mark.parametrize(
    ("recipe", "gpus"),
    [("qwen2_7b_fsdp_8gpu", "8xH100"), ("qwen2_7b_megatron_8gpu", "8xH100"), ("llama_70b_megatron_32gpu", "32xH100")],
)
def test_a_recipe_for_a_cluster_fits_it(recipe, gpus, capsys):
    assert main(["plan", recipe, "--gpus", gpus]) == 0
    assert "\nfits: " in capsys.readouterr().out


def test_the_command_prints_and_writes(capsys, tmp_path):
    out = tmp_path / "best.txt"
    words = ["plan", "grpo", "actor_rollout_ref.model.path=Qwen3-0.6B", *BASE, "--gpus", "1xH200"]
    assert main([*words, "--search", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "built-in shape of Qwen3-0.6B" in text
    assert "fits: " in text
    assert out.read_text().count("=") == len(out.read_text().splitlines()) > 0
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["seconds"] == pytest.approx(sum(p["seconds"] for p in found["phases"]))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8xH201"], "no device"),
        (["--gpus", "1xH200", "--search", "--out", "no/such/folder/best.txt"], "--out: there is no folder to write"),
        (["--gpus", "1xH200", "--lengths", "no-such-file"], "no-such-file"),
        (["--gpus", "1xH200", "--mean-response", "100000"], "max_response_length"),
        (["--gpus", "1xH200", "--mean-response", "0"], "--mean-response (0) must lie between 1"),
        (["actor_rollout_ref.model.path=unknown", "--gpus", "1xH200"], "--model-config"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=4", "--gpus", "2xH200"], "the 4 ranks that share a"),
    ],
)
def test_mistakes_are_told(capsys, words, message):
    assert main(["plan", "grpo", "actor_rollout_ref.model.path=Qwen3-0.6B", *BASE, *words]) == 2
    assert message in capsys.readouterr().err


def test_671b_is_planned_in_seconds(capsys):
    started = time.process_time()
    words = ["plan", "deepseek_671b_megatron_128gpu", "--gpus", "128xH200", "--json"]
    offload = "actor_rollout_ref.actor.megatron.optimizer_offload"
    assert main([*words, f"{offload}=false"]) == 0
    assert time.process_time() - started < 20  # about 5 where nothing else runs
    printed = capsys.readouterr()
    assert "looking for the nearest change that does ..." in printed.err
    found = json.loads(printed.out)
    assert found["model"]["parameters"] == pytest.approx(671e9, rel=0.001)
    assert not found["fits"]
    assert found["nearest"]["fits"]
    assert f"{offload}=true" in found["nearest"]["overrides"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize("sizes", [{"pp": 2, "vpp": 2}, {"tp": 2, "pp": 4}, {"tp": 2, "pp": 2, "ep": 4, "etp": 1}])
def test_slices_are_counted_on_one_rank_of_each_stage(sizes):
    """Stages differ: embedding, head, and layers without experts."""
    config = Qwen3MoeConfig(
        hidden_size=16, vocab_size=40, num_attention_heads=8, num_key_value_heads=2, head_dim=6, intermediate_size=24,
        num_hidden_layers=8, num_experts=4, moe_intermediate_size=8, mlp_only_layers=[0, 5],
    )  # fmt: skip
    ranks = ParallelRanks(0, 8, **sizes)
    assert _count_slices(config, ranks, 40) == len(megatron(config, ranks, vocab_size=40).slices)


@pytest.mark.parametrize("words", [(), ("actor_rollout_ref.hybrid_engine=false",)], ids=["together", "apart"])
def test_weights_in_buffers_are_synced_too(tmp_path, capsys, words):
    """A router's bias is a weight of the rollout that no parameter of the trainer is."""
    shape = AutoConfig.for_model("deepseek_v3", num_hidden_layers=4, n_routed_experts=8, n_group=2, topk_group=1)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(shape.to_dict()))
    assert main(["plan", "grpo", "--gpus", "4xH200", "--model-config", str(file), *BASE, *words, "--json"]) == 0
    assert any(phase["name"] == "sync" for phase in json.loads(capsys.readouterr().out)["phases"])

"""Plans of rollouts on devices of their own: how weights get there, and the room that they need on arrival."""

import pytest
from test_plan_steps import load, phase

from meshrl.tools.plan.step_plan import make_plan

ROLLOUT = "actor_rollout_ref.rollout"
APART = ("actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2")
MEBIBYTE = 1 << 20


def planned(monkeypatch, gpus, *overrides):
    monkeypatch.setattr("test_plan_steps.make_plan", lambda *given, quick: make_plan(*given))
    config, make = load(gpus, *overrides)
    return make(config)


@pytest.mark.parametrize("name", ["embedded", "vllm", "sglang", "hf"])
@pytest.mark.parametrize("gpus", ["1xH200", "2xH200"])
def test_all_weights_travel_to_every_rollout(monkeypatch, gpus, name):
    plan = planned(monkeypatch, gpus, *APART, f"{ROLLOUT}.name={name}")
    sync, size = plan.rollout.sync, 2 * plan.model.num_params
    assert sync.received == size
    assert sync.sent == size  # a trainer feeds two rollouts in a chain, or each of two feeds one half of both
    assert sync.copied == size  # from where it arrived into the engine
    assert ("each bucket" in sync.way) == (name in ("vllm", "sglang"))
    assert sync.way.startswith("a plan")


def test_every_rank_of_a_rollout_that_is_cut_gets_its_part(monkeypatch):
    cut = f"{ROLLOUT}.tensor_model_parallel_size=2"
    found = {
        name: planned(monkeypatch, "2xH200", *APART, cut, f"{ROLLOUT}.name={name}") for name in ("embedded", "vllm")
    }
    size = 2 * found["vllm"].model.num_params
    for plan in found.values():
        assert 0.49 * size < plan.rollout.sync.received < 0.51 * size
        assert phase(plan, "generate").memory["rollout weights"] < 0.51 * size


def test_engines_outside_need_room_for_two_parts_and_ours_for_a_second_copy(monkeypatch):
    found = {}
    for name, megabytes in (("embedded", 64), ("vllm", 64), ("vllm", 2048)):
        more = f"{ROLLOUT}.update_weights_bucket_megabytes={megabytes}"
        plan = planned(monkeypatch, "2xH200", *APART, f"{ROLLOUT}.name={name}", more)
        memory = phase(plan, "generate").memory
        assert "parameters" not in memory  # the trainer's are elsewhere
        found[name, megabytes] = memory["arriving weights"] - plan.rollout.sync.buffers
        weights = memory["rollout weights"]
    largest = 2 * 151936 * 2048  # the embedding is more than a small bucket
    assert found["embedded", 64] == weights
    assert found["vllm", 64] == 2 * largest
    assert found["vllm", 2048] == 2048 * MEBIBYTE


def test_on_shared_devices_nothing_arrives_beside(monkeypatch):
    plan = planned(monkeypatch, "2xH200", f"{ROLLOUT}.name=vllm")
    assert "arriving weights" not in phase(plan, "generate").memory
    assert plan.rollout.sync.way.startswith("a plan for each bucket")


def test_ranks_with_spread_experts_share_those_and_repeat_all_else(monkeypatch):
    found = {}
    for ranks in (2, 4, 8):
        wanted = f"{ROLLOUT}.expert_parallel_size={ranks}", "data.train_batch_size=1024"
        config, make = load("8xH200", *wanted, model="Qwen3-30B-A3B")
        plan = make(config)
        generate = phase(plan, "generate")
        found[ranks] = generate.memory["rollout weights"], generate.seconds
        experts = plan.model.expert_params
        assert found[ranks][0] == 2 * (plan.model.num_params - experts + experts // ranks)
    # Half as many rollouts have twice the sequences each: with so many that is more than the experts take off.
    assert found[2][1] < found[4][1] < found[8][1]

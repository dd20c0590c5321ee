"""The Megatron engine beyond plain training: stand-ins, values, half precision, experts' balance, offload."""

from dataclasses import replace

import pytest
import torch
from megatron_trials import megatron_trial, run_megatron, write_small_model
from test_value_model import reference, train_values, value_folder
from transformers import AutoModelForCausalLM

from meshrl.algorithms import BatchStats
from meshrl.tools.verify import TEMPERATURE, TOLERANCE, _loss_function, relative_difference, run_reference

META = {"temperature": TEMPERATURE, "use_dynamic_bsz": False, "micro_batch_size": 1, "calculate_entropy": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("megatron-batch-models")
    small = {name: write_small_model(name, root / name) for name in ("qwen2", "qwen3", "qwen3_moe")}
    return small | {"qwen3_vpp": write_small_model("qwen3", root / "qwen3_vpp", layers=4)}


def one_step(trial, samples_of_rank, meta=None, spoil=False):
    """One step on unequal shards: data-parallel rank r takes the samples listed at r. `spoil`: a NaN as advantage."""
    from meshrl.engines.megatron.megatron_engine import MegatronEngine
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    engine = MegatronEngine(trial.model, trial.engine, trial.optim, device=torch.device("cpu"), total_steps=1)
    engine.initialize()
    batch = trial.batches(61)[0]
    if spoil:
        batch.batch["advantages"][0, 0] = float("nan")
    before = {name: value.clone() for name, value in engine.per_tensor_params()}
    mine = batch.select_idxs(samples_of_rank[engine.dp_rank])
    mine.meta_info = META | (meta or {})
    mask = batch.batch["response_mask"]
    stats = BatchStats(engine.gradient_ranks, int(mask.sum()), len(mask))
    answers = engine.forward(mine)
    engine.optimizer_zero_grad()
    metrics = engine.forward_backward_batch(mine, _loss_function(stats)).metrics
    norm = engine.optimizer_step()
    with pytest.raises(ValueError, match="optimizer_zero_grad"):
        engine.forward_backward_batch(mine, _loss_function(stats))
    weights = {name: value.clone() for name, value in engine.per_tensor_params()}
    where = engine.is_collect, engine.dp_rank
    leave_parallel_state()
    return where, answers, metrics, norm, weights, before


@pytest.mark.parametrize(
    ("world", "family", "axes"),
    [
        (2, "qwen3", {}),
        (4, "qwen3_vpp", {"pp": 2, "vpp": 2}),
        (4, "qwen3", {"tp": 2}),
        (4, "qwen3", {"cp": 2}),
    ],
    ids=["dp", "vpp", "tp", "cp"],
)
def test_stand_ins_count_for_nothing_and_results_keep_their_order(megatron_ranks, folders, world, family, axes):
    """One rank has three samples, a micro-batch each, the other one: it runs two stand-ins, interleaved one more."""
    trial = replace(megatron_trial(folders[family], axes), samples=4)
    shards = [[3, 0, 1], [2]]
    expected = run_reference(trial)
    results = megatron_ranks(world).run(one_step, trial, shards)
    for (collects, dp_rank), answers, metrics, norm, _, _ in results:
        assert metrics["loss"] == pytest.approx(expected.losses[0], rel=TOLERANCE)
        assert norm == pytest.approx(expected.grad_norms[0], rel=TOLERANCE)
        assert bool(answers) == collects
        if collects:
            assert relative_difference(answers["log_probs"], expected.log_probs[shards[dp_rank]]) <= TOLERANCE
    assert sum(collects for (collects, _), *_ in results) == 2


def test_a_gradient_that_is_not_finite_is_not_applied(megatron_ranks, folders):
    trial = megatron_trial(folders["qwen2"], {"pp": 2})
    for *_, norm, weights, before in megatron_ranks(2).run(one_step, trial, [list(range(8))], spoil=True):
        assert not norm < float("inf")
        assert all(torch.equal(weights[name], before[name]) for name in weights)
    for *_, weights, before in megatron_ranks(2).run(one_step, trial, [list(range(8))]):
        assert any(not torch.equal(weights[name], before[name]) for name in weights)


def train_values_on_megatron(trial, folder):
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    answers = train_values(trial, folder)
    leave_parallel_state()
    return answers


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A token classifier, what training it finds, and what training finds that begins a little off."""
    folder = value_folder(tmp_path_factory.mktemp("megatron-values"), "qwen3")
    trial = megatron_trial(folder, {})
    return folder, reference(trial, folder), reference(trial, folder, perturb=1e-3)


@pytest.mark.parametrize(
    ("world", "axes"),
    [(1, {}), (2, {"cp": 2}), (4, {"tp": 2, "pp": 2})],
    ids=["one", "cp", "tp-pp"],
)
def test_values_are_those_of_a_token_classifier(megatron_ranks, classifier, world, axes):
    folder, (first, losses, weights), perturbed = classifier
    trial = megatron_trial(folder, axes)
    answers = megatron_ranks(world).run(train_values_on_megatron, trial, str(folder))
    for _, got_first, got_losses, got_weights in answers:
        assert not len(got_first) or relative_difference(got_first, first) <= TOLERANCE
        assert got_losses == pytest.approx(losses, rel=TOLERANCE)
        assert got_weights.keys() == weights.keys()
        assert max(relative_difference(got_weights[n], weights[n]) for n in weights) <= TOLERANCE
    assert perturbed[1] != pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"pp": 2, "vpp": 2}, {"cp": 2}], ids=["tp", "vpp", "cp"])
def test_half_precision_is_close(megatron_ranks, folders, axes):
    """bfloat16 has 8 bits: two steps stay within a few percent, and further from float32 than float32 is."""
    trial = megatron_trial(folders["qwen3_vpp" if "vpp" in axes else "qwen3"], axes | {"dtype": "bf16"})
    expected = run_reference(trial)
    for outcome in megatron_ranks(2).run(run_megatron, trial):
        if len(outcome.log_probs):
            assert 1e-5 < relative_difference(outcome.log_probs, expected.log_probs) < 0.05
        assert outcome.grad_norms == pytest.approx(expected.grad_norms, rel=0.05)
        assert all(value.dtype == torch.bfloat16 for value in outcome.weights.values())


def balance_by_hand(folder, batch):
    """The balancing loss of one batch from Hugging Face's router: experts * sum(share of tokens * mean probability)."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    losses = []
    ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=ids, attention_mask=mask, position_ids=positions, output_router_logits=True, use_cache=False)
    for logits in out.router_logits:
        probs = logits.view(-1, 4)[mask.flatten().bool()].softmax(-1)
        chosen = torch.zeros_like(probs).scatter(1, probs.topk(2).indices, 1.0)
        losses.append(4 * (chosen.mean(0) / 2 * probs.mean(0)).sum())
    return float(torch.stack(losses).mean())


BALANCE = {"override_transformer_config": {"moe_aux_loss_coeff": 0.5}}


def test_balancing_loss_is_the_routers(megatron_ranks, folders):
    trial = megatron_trial(folders["qwen3_moe"], BALANCE)
    whole = {"micro_batch_size": 8}
    ((_, _, metrics, norm, _, _),) = megatron_ranks(1).run(one_step, trial, [list(range(8))], whole)
    expected = balance_by_hand(folders["qwen3_moe"], trial.batches(61)[0])
    assert metrics["moe/load_balancing_loss"] == pytest.approx(expected, rel=1e-5)
    without = megatron_trial(folders["qwen3_moe"], {})
    ((_, _, plain_metrics, plain_norm, _, _),) = megatron_ranks(1).run(one_step, without, [list(range(8))], whole)
    assert "moe/load_balancing_loss" not in plain_metrics
    assert norm != pytest.approx(plain_norm, rel=1e-3)


@pytest.mark.parametrize(
    ("world", "axes"), [(4, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}), (2, {"cp": 2})], ids=["tp-pp-ep", "cp"]
)
def test_balancing_loss_weighs_the_same_on_every_layout(megatron_ranks, folders, world, axes):
    samples, meta = [list(range(8))], {"micro_batch_size": 3}
    alone = megatron_ranks(1).run(one_step, megatron_trial(folders["qwen3_moe"], BALANCE), samples, meta)[0]
    trial = megatron_trial(folders["qwen3_moe"], axes | BALANCE)
    for result in megatron_ranks(world).run(one_step, trial, samples, meta):
        assert result[2]["moe/load_balancing_loss"] == pytest.approx(alone[2]["moe/load_balancing_loss"], rel=1e-5)
        assert result[3] == pytest.approx(alone[3], rel=1e-5)


def go_away_and_come_back(trial):
    """Frees the memory of weights, gradients and optimizer states and takes it again between two steps."""
    from meshrl.engines.megatron.megatron_engine import move_gradients, move_states, move_weights
    from meshrl.engines.megatron.parallel_state import leave_parallel_state
    from meshrl.engines.optim import HostMemory
    from meshrl.tools import verify

    host = HostMemory()
    freed = []

    def away_and_back(engine, trial, device):
        buffers = [b for chunk in engine.model for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        for where in (torch.device("cpu"), torch.device("cuda")):
            move_weights(engine.model, where)
            move_gradients(engine.model, where)
            move_states(engine.optimizer, where, engine.transformer.bf16, host)
            if where.type == "cpu":
                data = [x for b in buffers for x in (b.param_data, b.grad_data) if x is not None]
                freed.append(sum(x.untyped_storage().size() for x in data))

    original, verify._send_away_and_back = verify._send_away_and_back, away_and_back
    outcome = verify.run_engine(trial)
    verify._send_away_and_back = original
    leave_parallel_state()
    return outcome, freed


@pytest.mark.parametrize(
    ("family", "axes"), [("qwen3", {"dtype": "bf16"}), ("qwen3_moe", {"ep": 2}), ("qwen3", {"tp": 2})]
)
def test_offload_gives_memory_back_and_loses_nothing(megatron_ranks, folders, family, axes):
    trial = megatron_trial(folders[family], axes)
    stayed = megatron_ranks(2).run(run_megatron, trial)
    for (outcome, freed), other in zip(megatron_ranks(2).run(go_away_and_come_back, trial), stayed, strict=True):
        assert freed == [0, 0]
        assert outcome.losses == other.losses
        assert all(torch.equal(value, other.weights[name]) for name, value in outcome.weights.items())


def two_layouts(trial, other):
    from meshrl.engines.megatron.megatron_engine import MegatronEngine
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    for config in (trial, trial):
        MegatronEngine(config.model, config.engine, None, device=torch.device("cpu")).initialize()
    with pytest.raises(ValueError, match="one layout a process: this one has tp 2"):
        MegatronEngine(other.model, other.engine, None, device=torch.device("cpu")).initialize()
    leave_parallel_state()


def test_a_process_has_one_layout(megatron_ranks, folders):
    trial = megatron_trial(folders["qwen2"], {"tp": 2})
    megatron_ranks(2).run(two_layouts, trial, replace(trial, engine=megatron_trial(folders["qwen2"], {"pp": 2}).engine))

"""Value models (critics and reward models) on several layouts against Hugging Face's own token classifier."""

from dataclasses import replace

import pytest
import torch
from test_fsdp_engine import make_trial
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from meshrl.algorithms import BatchStats, agg_loss
from meshrl.engines.engine_class import engine_class
from meshrl.tools.verify import TOLERANCE, Trial, relative_difference, small_config, write_model

LAYOUTS = ["one", "ddp2-fsdp2", "cp2", "fsdp2-sp2", "fsdp1"]


def value_folder(root, family):
    """A token classifier of one label, with weights in its head."""
    config = small_config(family)
    config.num_labels = 1
    torch.manual_seed(3)
    model = AutoModelForTokenClassification.from_config(config)
    torch.nn.init.normal_(model.score.weight)
    torch.nn.init.constant_(model.score.bias, 0.3)
    model.save_pretrained(root / family)
    return root / family


def train_values(trial: Trial, folder: str, head: str = "value"):
    """Two steps of regression towards the advantages; returns first values, losses and the weights after."""
    trial.model.path = folder
    engine = engine_class(trial.engine)(
        trial.model, trial.engine, trial.optim, device=torch.device("cpu"), head=head, total_steps=2
    )
    engine.initialize()
    losses, first = [], None
    for batch in trial.batches(61):
        mine = batch.chunk(engine.dp_size)[engine.dp_rank]
        mine.meta_info = {"use_dynamic_bsz": True, "max_token_len": trial.tokens_per_micro_batch}
        if first is None:
            first = engine.forward(mine).get("values", torch.empty(0))
        mask = batch.batch["response_mask"]
        stats = BatchStats(engine.gradient_ranks, int(mask.sum()), len(mask))

        def loss_function(output, data, stats=stats):
            error = (output["values"] - data.batch["advantages"]) ** 2
            loss = agg_loss(error, data.batch["response_mask"], "token-mean", stats=stats)
            return loss, {"loss": loss.detach() / stats.dp_size}

        engine.optimizer_zero_grad()
        losses.append(engine.forward_backward_batch(mine, loss_function).metrics["loss"])
        engine.optimizer_step()
        engine.lr_scheduler_step()
    weights = {name: value.clone() for name, value in engine.per_tensor_params()}
    return engine.dp_rank, first, losses, weights


def reference(trial: Trial, folder, perturb=0.0):
    """Padded, one process, Hugging Face and torch alone."""
    model = AutoModelForTokenClassification.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        model.score.weight += perturb
    config = trial.optim
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=tuple(config.betas), eps=config.eps, weight_decay=config.weight_decay
    )
    model.eval()  # a token classifier's dropout is not part of a value model
    losses, first = [], None
    for batch in trial.batches(61):
        tensors = batch.batch
        mask, width = tensors["attention_mask"], tensors["response_mask"].shape[1]
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        out = model(input_ids=tensors["input_ids"], attention_mask=mask, position_ids=positions, use_cache=False)
        values = out.logits[:, -width - 1 : -1, 0]
        response = tensors["response_mask"]
        first = (values * response).detach() if first is None else first
        loss = ((values - tensors["advantages"]) ** 2 * response).sum() / response.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return first, losses, {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return value_folder(tmp_path_factory.mktemp("values"), "qwen3")


@pytest.fixture(scope="module")
def expected(folder):
    """What training finds, and what training finds that begins a little off."""
    _, trial = make_trial(folder, "one", "plain")
    return reference(trial, folder), reference(trial, folder, perturb=1e-3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_same_values_losses_and_weights(ranks, folder, expected, layout):
    world, trial = make_trial(folder, layout, "plain")
    (first, losses, weights), perturbed = expected
    answers = ranks(world).run(train_values, trial, str(folder))
    shards = 1 + max(dp_rank for dp_rank, *_ in answers)
    for dp_rank, got_first, got_losses, got_weights in answers:
        assert relative_difference(got_first, first.chunk(shards)[dp_rank]) <= TOLERANCE
        assert got_losses == pytest.approx(losses, rel=TOLERANCE)
        assert got_weights.keys() == weights.keys()
        assert max(relative_difference(got_weights[n], weights[n]) for n in weights) <= TOLERANCE
    assert perturbed[1] != pytest.approx(losses, rel=TOLERANCE)


@pytest.mark.parametrize("layout", ["one", "fsdp2", "fsdp1"])
def test_a_critic_made_from_a_language_model_starts_at_zero_and_has_its_body(ranks, tmp_path, layout):
    folder = write_model(small_config("llama"), tmp_path / "lm")
    world, trial = make_trial(folder, layout, "plain")
    body = AutoModelForCausalLM.from_pretrained(folder)
    trial = replace(trial, optim=replace(trial.optim, lr=0.0))
    for _, first, _, weights in ranks(world).run(train_values, trial, str(folder)):
        assert first.abs().max() == 0
        assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], body.model.layers[1].mlp.up_proj.weight)

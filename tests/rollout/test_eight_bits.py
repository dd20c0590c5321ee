"""Generation with products of 8-bit floats, on a CPU: the numbers of a model with rounded linears, whatever arrives."""

import pytest
import torch
from rounded import round_linears
from test_embedded_requests import PAD, asked

from meshrl.models.fp8 import Fp8Projection, in_8_bits
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import SamplingParams

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "qwen3_mixed"]


def made(model, **settings):
    settings = {"block_size": 4, "shares_weights": True, "quantization": "fp8"} | settings
    rollout = EmbeddedRollout(model, pad_token_id=PAD, **settings)
    weights = [] if settings["shares_weights"] else list(model.named_parameters())
    rollout.update_weights(weights, 1)
    return rollout


def differences(model, requests, answers):
    """Of the log-probs of all tokens to those of a model on the finished sequences."""
    found = []
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            log_probs = model(ids, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1].log_softmax(-1)
        wanted = log_probs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        found.append((torch.tensor(answer.log_probs) - wanted).abs())
    return torch.cat(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_a_model_with_rounded_linears(make_lm, family):
    requests = asked(9)
    answers = made(make_lm(family)).complete(requests)
    ours = differences(round_linears(make_lm(family, "eager")), requests, answers)
    plain = differences(make_lm(family, "eager"), requests, answers)
    # A number in the middle between two of the grid may go to either: then one token is off by a little.
    assert float(ours.quantile(0.9)) < 1e-4
    assert float(ours.mean()) < 0.02 * float(plain.mean())
    assert float(plain.mean()) > 1e-2


@pytest.mark.parametrize("shares", [True, False])
def test_new_weights_are_rounded_anew_also_after_a_release(make_lm, shares):
    requests = asked(5)
    rollout = made(make_lm("qwen2"), shares_weights=shares)
    first = rollout.complete(requests)
    new = make_lm("qwen2")
    with torch.no_grad():
        for param in new.parameters():
            param.mul_(1.3)

    def arrive(version):
        if shares:
            with torch.no_grad():
                for own, other in zip(rollout.hf_model.parameters(), new.parameters(), strict=True):
                    own.copy_(other)
        rollout.update_weights([] if shares else list(new.named_parameters()), version)

    arrive(2)
    second = rollout.complete(requests)
    assert [a.token_ids for a in second] != [a.token_ids for a in first]
    reference = make_lm("qwen2", "eager")
    reference.load_state_dict(new.state_dict())
    reference = round_linears(reference)
    assert float(differences(reference, requests, second).quantile(0.9)) < 1e-4
    # A run that shares its weights gives the cache alone up; the copy in 8 bits is the rollout's own and goes with it.
    tags = ["kv_cache"] if shares else ["weights", "kv_cache"]
    rollout.release(tags)
    assert rollout.runner.plain.layers == []
    rollout.resume(tags)
    if not shares:
        arrive(3)
    assert [a.token_ids for a in rollout.complete(requests)] == [a.token_ids for a in second]


def test_a_projection_is_renewed_where_it_lies():
    weights, biases = [torch.randn(16, 32), torch.randn(32, 32)], [torch.randn(16), torch.randn(32)]
    projection, x = Fp8Projection(weights, biases), torch.randn(5, 32)
    place = projection.values.data_ptr()
    for _ in range(2):
        wanted = torch.cat([x @ w.t() + b for w, b in zip(weights, biases, strict=True)], 1)
        error = (projection(x) - wanted).norm() / wanted.norm()
        assert 1e-3 < error < 0.06
        for tensor in (*weights, *biases):
            tensor.mul_(-3)
        projection.refresh()
    assert projection.values.data_ptr() == place
    assert [half.shape for half in projection.halves(x)] == [(5, 24), (5, 24)]


def test_numbers_on_the_grid_stay():
    x = torch.tensor([[448.0, -1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
    values, scales = in_8_bits(x)
    assert (values.float() * scales).equal(x)


def test_what_is_refused(make_lm):
    with pytest.raises(ValueError, match=r"is for Llama.* and this is Qwen3MoeForCausalLM with silu: leave it out"):
        made(make_lm("qwen3_moe"))
    with pytest.raises(ValueError, match="multiples of 16, and the model has one of 64 by 40 on a rank"):
        made(make_lm("qwen2", hidden_size=40))
    with pytest.raises(ValueError, match="kv_cache_dtype=fp8 is for GPUs"):
        made(make_lm("qwen2"), kv_cache_dtype="fp8")
    with pytest.raises(ValueError, match="with gelu: leave it out"):
        made(make_lm("llama", hidden_act="gelu"))
    with pytest.raises(ValueError, match=r"does not go with rollout\.dtype=float16"):
        made(make_lm("llama").half())


def test_greedy_answers_are_mostly_those_of_the_model(make_lm):
    """Rounding moves log-probs, and seldom the likeliest token of a model that is sure of it."""
    requests = asked(8, SamplingParams(12, temperature=0.0))
    answers = made(make_lm("qwen3")).complete(requests)
    reference = make_lm("qwen3", "eager")
    agree = []
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]])
        with torch.no_grad():
            likeliest = reference(ids, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1].argmax(-1)
        agree += (likeliest == torch.tensor(answer.token_ids)).tolist()
    assert sum(agree) > 0.85 * len(agree)

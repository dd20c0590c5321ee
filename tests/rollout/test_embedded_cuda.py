"""The embedded rollout on a GPU: log-probs against Transformers' own model, and the ways its work can be cut."""

import pytest
import torch
from rounded import round_linears
from routed import check_routes

from meshrl.models.fp8 import Fp8Projection, Rows8, in_8_bits
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import Completion, Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY = 41
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "qwen3_mixed", "qwen3_moe"]
HEADS = {"head_dim": 32, "hidden_size": 64}


def made(make_lm, family: str, dtype: torch.dtype, **settings) -> EmbeddedRollout:
    model = make_lm(family, **HEADS).to("cuda", dtype)
    rollout = EmbeddedRollout(model, pad_token_id=0, shares_weights=True, **({"block_size": 16} | settings))
    rollout.update_weights([], 3)
    return rollout


def asked(count: int, params: SamplingParams, longest: int = 50) -> list[Request]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    prompts = [tuple(torch.randint(2, VOCABULARY, (n,), generator=generator).tolist()) for n in lengths]
    return [Request(f"r{i}", prompt, params, 7 * i) for i, prompt in enumerate(prompts)]


def largest_error(reference, requests: list[Request], answers: list[Completion]) -> float:
    """The largest difference to the log-probs of a float32 model on the finished sequences."""
    prompts = {r.request_id: r for r in requests}
    worst = 0.0
    for answer in answers:
        request = prompts[answer.request_id]
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]], device="cuda")
        with torch.no_grad():
            logits = reference(ids, use_cache=False).logits[0, len(request.prompt_token_ids) - 1 : -1].float()
        log_probs = (logits / (request.params.temperature or 1.0)).log_softmax(-1)
        wanted = log_probs.gather(-1, torch.tensor(answer.token_ids, device="cuda")[:, None])[:, 0]
        worst = max(worst, float((torch.tensor(answer.log_probs, device="cuda") - wanted).abs().max()))
    return worst


def all_back(rollout: EmbeddedRollout) -> bool:
    return rollout.blocks.num_free == rollout.blocks.num_blocks and rollout.rows.num_held == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_model(make_lm, family, dtype):
    rollout, requests = made(make_lm, family, dtype), asked(21, SamplingParams(30))
    answers = rollout.complete(requests)
    reference = make_lm(family, "eager", **HEADS).to("cuda", dtype)
    exact = make_lm(family, "eager", **HEADS).to("cuda").to(dtype).float()
    error = largest_error(exact, requests, answers)
    # bfloat16: no further from exact arithmetic than twice what Transformers' own bfloat16 model is
    own = 1e-4
    if dtype == torch.bfloat16:
        own = 2 * max(largest_error_of(reference, exact, requests, answers), 0.02)
    assert error < own
    assert all(len(a.token_ids) == 30 for a in answers)
    assert all_back(rollout)


def largest_error_of(model, exact, requests: list[Request], answers: list[Completion]) -> float:
    worst = 0.0
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([[*request.prompt_token_ids, *answer.token_ids]], device="cuda")
        with torch.no_grad():
            pair = [m(ids, use_cache=False).logits[0].float().log_softmax(-1) for m in (model, exact)]
        chosen = [p[:-1].gather(-1, ids[0, 1:, None])[len(request.prompt_token_ids) - 1 :] for p in pair]
        worst = max(worst, float((chosen[0] - chosen[1]).abs().max()))
    return worst


EIGHT = {"weights": {"quantization": "fp8"}, "cache": {"kv_cache_dtype": "fp8"}}
EIGHT["both"] = EIGHT["weights"] | EIGHT["cache"]


def differences(exact, requests, answers) -> torch.Tensor:
    """Of the log-probs of every answer's tokens, the largest."""
    return torch.tensor([largest_error(exact, [r], [a]) for r, a in zip(requests, answers, strict=True)])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_mixed"])
def test_in_8_bits_it_is_the_model_with_rounded_linears(make_lm, family):
    """All else in float32. Products add up in fewer bits than that, so some numbers go to the grid's next point."""
    requests = asked(21, SamplingParams(30))
    answers = made(make_lm, family, torch.float32, **EIGHT["weights"]).complete(requests)
    rounded = round_linears(make_lm(family, "eager", **HEADS).to("cuda"))
    ours = differences(rounded, requests, answers)
    others = differences(make_lm(family, "eager", **HEADS).to("cuda"), requests, answers)
    assert float(ours.median()) < 0.5 * float(others.median())


def test_a_product_of_8_bits_is_the_one_that_a_cpu_computes():
    weights = [torch.randn(48, 64), 3 * torch.randn(16, 64)]
    x = torch.randn(37, 64)
    here, there = Fp8Projection(weights, []), Fp8Projection([w.cuda() for w in weights], [])
    assert here.values.view(torch.uint8).equal(there.values.cpu().view(torch.uint8))
    rows, wanted = Rows8(*in_8_bits(x)), here(x)
    found = there(Rows8(rows.values.cuda(), rows.scales.cuda())).cpu()
    assert float((found - wanted).norm() / wanted.norm()) < 2e-3


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "qwen3_mixed", "qwen3_moe"])
def test_a_cache_of_8_bits_is_near(make_lm, family):
    requests = asked(21, SamplingParams(30))
    exact = make_lm(family, "eager", **HEADS).to("cuda").bfloat16().float()
    found = {}
    for eight in (False, True):
        rollout = made(make_lm, family, torch.bfloat16, **(EIGHT["cache"] if eight else {}))
        found[eight] = float(differences(exact, requests, rollout.complete(requests)).median())
    assert found[False] < found[True] < 0.5


@pytest.mark.parametrize("eight", EIGHT)
def test_in_8_bits_new_weights_preemption_and_prefixes(make_lm, eight):
    model = make_lm("qwen3", **HEADS).to("cuda", torch.bfloat16)
    rollout = EmbeddedRollout(model, pad_token_id=0, block_size=16, shares_weights=True, num_blocks=24, **EIGHT[eight])
    requests = asked(18, SamplingParams(40))
    found = []
    for version in range(2):
        rollout.update_weights([], version)
        found.append(rollout.complete(requests))
        exact = make_lm("qwen3", "eager", **HEADS).to("cuda")
        exact.load_state_dict(model.state_dict())
        assert float(differences(exact.float(), requests, found[-1]).median()) < 1.5
        longer = Request("b", (*requests[0].prompt_token_ids, *found[-1][0].token_ids), SamplingParams(9))
        assert float(differences(exact.float(), [longer], rollout.complete([longer])).median()) < 1.5
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(-1.2)
    assert rollout.stats()["preemptions"] > 0
    assert [a.token_ids for a in found[0]] != [a.token_ids for a in found[1]]
    assert all_back(rollout)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 5},
        {"max_num_batched_tokens": 17},
        {"num_blocks": 16},
        {"block_size": 64},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_how_work_is_cut_changes_no_token(make_lm, settings):
    requests = asked(18, SamplingParams(40, stop_token_ids=(5, 6)))
    wanted = made(make_lm, "qwen3", torch.float32).complete(requests)
    rollout = made(make_lm, "qwen3", torch.float32, **settings)
    found = rollout.complete(requests)
    same = sum(a.token_ids == b.token_ids for a, b in zip(found, wanted, strict=True))
    assert same >= 17  # rounding may turn one draw
    assert all_back(rollout)


def test_samples_prefixes_and_new_weights(make_lm):
    rollout = made(make_lm, "qwen3", torch.float32)
    request = Request("a", tuple(range(2, 40)), SamplingParams(20, n=5))
    answers = rollout.complete([request])
    assert len({tuple(a.token_ids) for a in answers}) == 5
    exact = make_lm("qwen3", "eager", **HEADS).to("cuda")
    assert largest_error(exact, [request], answers) < 1e-4
    longer = Request("b", (*request.prompt_token_ids, *answers[0].token_ids), SamplingParams(9))
    assert largest_error(exact, [longer], rollout.complete([longer])) < 1e-4
    assert rollout.stats()["cached_prompt_tokens"] >= 48
    with torch.no_grad():
        for mine, other in zip(rollout.hf_model.parameters(), exact.parameters(), strict=True):
            mine.mul_(1.05)
            other.mul_(1.05)
    rollout.update_weights([], 4)
    assert largest_error(exact, [longer], rollout.complete([longer])) < 1e-4


def test_rows_with_different_parameters(make_lm):
    kinds = [
        SamplingParams(10),
        SamplingParams(10, temperature=0.0),
        SamplingParams(10, temperature=0.6, top_k=3),
        SamplingParams(10, top_p=0.5, top_log_probs=3),
        SamplingParams(10, repetition_penalty=1.5),
        SamplingParams(10, logit_bias={5: 1e4}),
        SamplingParams(10, stop_token_ids=tuple(range(20)), min_tokens=3),
    ]
    requests = [Request(f"r{i}", (3, 4 + i, 9), kind, i) for i, kind in enumerate(kinds)]
    together = made(make_lm, "qwen3", torch.float32).complete(requests)
    exact = make_lm("qwen3", "eager", **HEADS).to("cuda")
    assert largest_error(exact, requests, together) < 1e-4
    assert together[5].token_ids == [5] * 10
    assert len(together[6].token_ids) > 3
    for request, answer in zip(requests, together, strict=True):
        assert made(make_lm, "qwen3", torch.float32).complete([request])[0].token_ids == answer.token_ids


def test_running_requests_go_on_with_new_weights(make_lm):
    rollout = made(make_lm, "qwen3", torch.float32)
    old, new = (make_lm("qwen3", "eager", **HEADS).to("cuda") for _ in range(2))
    answers: dict[str, Completion] = {}
    requests = asked(6, SamplingParams(20))
    rollout._enter(requests, lambda c: answers.setdefault(c.request_id, Completion(c.request_id, 0)).add(c))
    for _ in range(6):
        rollout._advance()
    with torch.no_grad():
        for mine, other in zip(rollout.hf_model.parameters(), new.parameters(), strict=True):
            mine.mul_(1.1)
            other.mul_(1.1)
    rollout.update_weights([], 9)
    while rollout.has_work():
        rollout._advance()
    for request in requests:
        answer = answers[request.request_id]
        assert set(answer.versions) == {3, 9}
        cut = answer.versions.index(9)
        parts = [Completion("x", 0, answer.token_ids[:cut], answer.log_probs[:cut])]
        assert largest_error(old, [Request("x", request.prompt_token_ids, request.params)], parts) < 1e-4
        prompt = (*request.prompt_token_ids, *answer.token_ids[:cut])
        parts = [Completion("x", 0, answer.token_ids[cut:], answer.log_probs[cut:])]
        assert largest_error(new, [Request("x", prompt, request.params)], parts) < 1e-4
    rollout.release(["kv_cache"])
    rollout.resume(["kv_cache"])
    assert len(rollout.complete(requests)) == 6


@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 5, "max_model_len": 64, "max_num_batched_tokens": 32}], ids=str
)
def test_every_token_went_where_the_model_sends_it(make_lm, settings):
    """With few blocks answers are set aside and computed again."""
    rollout = made(make_lm, "qwen3_moe", torch.float32, max_num_seqs=8, records_routes=True, **settings)
    check_routes(rollout, make_lm("qwen3_moe", "eager", **HEADS).to("cuda"))
    assert rollout.stats()["cached_prompt_tokens"] > 0
    assert (rollout.stats()["preemptions"] > 0) == bool(settings)


def test_steps_of_experts_are_recorded_and_follow_their_weights(make_lm):
    """A recording reads weights where they lay: when they lie elsewhere it is made anew. `plain` records nothing."""
    ours, plain = (made(make_lm, "qwen3_moe", torch.bfloat16) for _ in range(2))
    plain.runner.records = False
    requests, before = asked(9, SamplingParams(20)), None
    for places_change in (None, False, True):
        if places_change is not None:
            with torch.no_grad():
                for param, theirs in zip(ours.hf_model.parameters(), plain.hf_model.parameters(), strict=True):
                    theirs.mul_(1.3)
                    param.data = theirs.clone() if places_change else param.data.copy_(theirs)
            for rollout in (ours, plain):
                rollout.update_weights([], rollout.version + 1)
            assert bool(ours.runner._graphs) != places_change
        found, expected = (
            [(answer.token_ids, answer.log_probs) for answer in rollout.complete(requests)] for rollout in (ours, plain)
        )
        assert found == expected
        assert found != before
        assert ours.runner._graphs
        assert not plain.runner._graphs
        before = found


@pytest.mark.parametrize("is_watched", [True, False])
def test_a_model_whose_steps_cannot_be_recorded_steps_as_it_is(make_lm, caplog, monkeypatch, is_watched):
    """Experts one after the other, as many as are wanted: the host has to know how many that is.

    Where that is not seen before, the recording fails, and leaves random numbers and memory as they were.
    """
    if not is_watched:
        monkeypatch.setattr("meshrl.rollout.embedded.cuda_runner.what_waits", lambda step: step())
    rollout, requests = made(make_lm, "qwen3_moe", torch.float32), asked(9, SamplingParams(20))
    rollout.hf_model.config._experts_implementation = "eager"
    stream = torch.cuda.current_stream()
    answers = rollout.complete(requests)
    assert torch.cuda.current_stream() == stream
    assert not rollout.runner._graphs
    (said,) = (line for line in caplog.messages if "decodes without recorded graphs" in line)
    assert ("slower: aten." in said) == is_watched
    assert torch.randn(3, device="cuda").isfinite().all()
    before = torch.cuda.memory_reserved()
    held = torch.empty(1 << 28, device="cuda")
    del held
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before
    assert largest_error(make_lm("qwen3_moe", "eager", **HEADS).to("cuda"), requests, answers) < 1e-4


def test_routes_of_recorded_steps_are_those_of_the_others(make_lm):
    """In bfloat16, where steps of experts are recorded."""
    found = []
    for records in (True, False):
        rollout = made(make_lm, "qwen3_moe", torch.bfloat16, records_routes=True)
        rollout.runner.records = records
        answers = rollout.complete(asked(9, SamplingParams(20)))
        assert bool(rollout.runner._graphs) == records
        found.append([(answer.token_ids, answer.routes.tolist()) for answer in answers])
    assert found[0] == found[1]

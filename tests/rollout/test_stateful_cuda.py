"""Layers that carry a state on a GPU: kernels, recorded steps and packed rows against what a CPU computes."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from meshrl.parallel.attention import PackedSequences
from meshrl.parallel.linear_attention import DeltaRule, States, chunked, convolved, enter_recurrences, recurrences
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import Request, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTHS = [5, 130, 1, 64, 65, 300, 3]


def made(tokens: int, key_dim: int = 32, value_dim: int = 48) -> tuple[DeltaRule, tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    rule = DeltaRule(normal(2 * 2 * key_dim + 4 * value_dim, 4) * 0.5, 2, 4, key_dim, value_dim)
    decay = -torch.nn.functional.softplus(normal(tokens, 4) - 2)
    return rule, (normal(tokens, len(rule.conv)), decay, normal(tokens, 4).sigmoid())


def there(rule: DeltaRule, dtype: torch.dtype = torch.float32) -> DeltaRule:
    return DeltaRule(rule.conv.cuda().to(dtype), rule.key_heads, rule.value_heads, rule.key_dim, rule.value_dim)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 48), (6, 10), (128, 128)])
def test_a_step_of_some_rows_is_the_one_of_a_cpu(key_dim: int, value_dim: int) -> None:
    from meshrl.rollout.embedded.delta_kernel import recur_rows

    rule, row = made(5, key_dim, value_dim)
    states = States(*(torch.randn(9, *x.shape[1:]) for x in rule.no_states(1, row[0])))
    order = torch.tensor([7, 0, 3, 8, 2])
    expected, after = rule.step(*row, States(*(x[order] for x in states)))
    on_device = States(*(x.cuda() for x in states))
    out = recur_rows(there(rule), *(x.cuda() for x in row), on_device, order.cuda())
    assert apart(out, expected) < 1e-5
    for own, new, old in zip(on_device, after, states, strict=True):
        assert apart(own[order.cuda()], new) < 1e-5
        others = [at for at in range(9) if at not in order]
        assert torch.equal(own.cpu()[others], old[others])


@pytest.mark.parametrize("goes_on", [False, True])
def test_packed_rows_are_those_of_a_cpu(goes_on: bool) -> None:
    """Whatever computes them there; its products are of fewer bits than float32's."""
    rule, row = made(sum(LENGTHS))
    before = States(*(torch.randn(len(LENGTHS), *x.shape[1:]) for x in rule.no_states(1, row[0]))) if goes_on else None
    packed, there_packed = (PackedSequences.of(LENGTHS, device) for device in ("cpu", "cuda"))
    leaves = [[x.clone().requires_grad_() for x in row], [x.cuda().requires_grad_() for x in row]]
    expected, after = rule.over(*leaves[0], packed, before, wants_after=True)
    on_device = None if before is None else States(*(x.cuda() for x in before))
    out, states = there(rule).over(*leaves[1], there_packed, on_device, wants_after=True)
    assert after is not None
    assert states is not None
    assert apart(out, expected) < 5e-3
    assert apart(states.memory, after.memory) < 5e-3
    assert apart(states.recent, after.recent) < 1e-6
    weights = torch.randn(out.shape)
    (expected * weights).sum().backward()
    (out * weights.cuda()).sum().backward()
    for ours, theirs in zip(leaves[1], leaves[0], strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert apart(ours.grad, theirs.grad) < 1e-2
    # The control: another border.
    moved = PackedSequences.of([LENGTHS[0] + 1, LENGTHS[1] - 1, *LENGTHS[2:]], "cuda")
    assert apart(there(rule).over(*leaves[1], moved, on_device)[0], expected) > 2e-2


def test_without_kernels_a_gpu_computes_the_same() -> None:
    rule, row = made(sum(LENGTHS))
    packed = PackedSequences.of(LENGTHS, "cuda")
    conv = there(rule)
    mixed, _ = convolved(row[0].cuda(), conv.conv, packed, None, False)
    query, key, value = conv.heads_of(mixed)
    out, _ = chunked(*conv._prepared(query, key), value, row[1].cuda(), row[2].cuda(), packed, None)
    assert apart(out, rule.over(*row, PackedSequences.of(LENGTHS, "cpu"))[0]) < 1e-5


@torch.no_grad()
def log_probs(model: PreTrainedModel, ids: torch.Tensor, row: PackedSequences) -> torch.Tensor:
    """Of every token of a sequence but the first."""
    logits = model(ids, use_cache=False, attention_context=row).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


DIMS = {"head_dim": 32, "hidden_size": 64, "linear_key_head_dim": 16, "linear_value_head_dim": 32}


@pytest.mark.parametrize(
    ("family", "dtype"),
    # Kernels are tuned anew for each type, which takes most of the time.
    [*[(family, torch.float32) for family in ("qwen3_5", "qwen3_next", "olmo_hybrid")], ("qwen3_5", torch.bfloat16)],
    ids=str,
)
def test_log_probs_are_those_of_the_model(
    make_lm: Callable[..., PreTrainedModel], family: str, dtype: torch.dtype
) -> None:
    """Pieces of prompts, samples of a prompt, steps as recorded graphs of several sizes, rows used again."""
    ours, exact = (make_lm(family, **DIMS, max_position_embeddings=512) for _ in range(2))
    for model in (ours, exact):
        enter_recurrences(model)  # on a CPU, test_delta_rule.py compares it with Transformers' own
        for layer in recurrences(model):
            torch.nn.init.constant_(layer.A_log, -2)
            torch.nn.init.constant_(layer.dt_bias, -1)
    rollout = EmbeddedRollout(
        ours.to("cuda", dtype), pad_token_id=0, shares_weights=True, max_num_seqs=9, max_num_batched_tokens=40
    )
    rounds = copy.deepcopy(exact).to(dtype) if dtype != torch.float32 else None
    exact = exact.to(dtype).float()
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5, 2), (90, 9, 3), (1, 30, 1), (17, 4, 2), (150, 20, 2), (16, 7, 1), (33, 12, 1), (2, 40, 3)]
    asked = [
        Request(str(at), tuple(torch.randint(2, 41, (prompt,), generator=generator).tolist()), SamplingParams(new, n=n))
        for at, (prompt, new, n) in enumerate(shapes)
    ]
    for version in range(2):
        rollout.update_weights((), version)
        errors, theirs = [], [torch.zeros(1)]
        for answer in rollout.complete(asked):
            prompt = asked[int(answer.request_id)].prompt_token_ids
            ids = torch.tensor([[*prompt, *answer.token_ids]])
            whole = PackedSequences.of([ids.shape[1]], "cpu")
            wanted = log_probs(exact, ids, whole)[len(prompt) - 1 :]
            errors.append((torch.tensor(answer.log_probs) - wanted).abs())
            if rounds is not None:
                theirs.append((log_probs(rounds, ids, whole)[len(prompt) - 1 :] - wanted).abs())
        # In bfloat16: about as far from exact arithmetic as the same model on a CPU.
        assert float(torch.cat(errors).mean()) < 2e-3 + 2 * float(torch.cat(theirs).mean())
        assert rollout.stats()["free_blocks"] == rollout.stats()["total_blocks"]
        with torch.no_grad():
            for model in (rollout.hf_model, exact, *([] if rounds is None else [rounds])):
                for layer in recurrences(model):
                    layer.conv1d.weight.mul_(-2)
    assert family == "qwen3_next" or len(rollout.runner._graphs) > 2  # type: ignore[attr-defined]

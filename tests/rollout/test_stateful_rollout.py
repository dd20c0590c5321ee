"""Layers that carry a state, in the embedded rollout: the log-probs of every token are Hugging Face's."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from transformers import PreTrainedModel

from meshrl.parallel.attention import PackedSequences
from meshrl.parallel.linear_attention import recurrences
from meshrl.rollout.embedded.capacity import attending_layers, default_num_blocks
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.embedded.kv_cache import bytes_of_states
from meshrl.rollout.requests import Completion, Request, SamplingParams

STATEFUL = ("qwen3_next", "qwen3_5", "olmo_hybrid")
MakeLM = Callable[..., PreTrainedModel]


def lasting(model: PreTrainedModel) -> PreTrainedModel:
    """With states that last: as Transformers begins, they fade within a few tokens, and none would be missed."""
    for layer in recurrences(model):
        with torch.no_grad():
            layer.A_log.fill_(-2)
            layer.dt_bias.fill_(-1)
    return model


def both(make_lm: MakeLM, family: str, **settings: int) -> tuple[EmbeddedRollout, PreTrainedModel]:
    ours, theirs = (lasting(make_lm(family, *how, max_position_embeddings=256)) for how in ((), ("eager",)))
    rollout = EmbeddedRollout(ours, pad_token_id=0, shares_weights=True, **settings)
    rollout.update_weights((), version=1)
    return rollout, theirs


def requests(shapes: Iterable[tuple[int, int, int]], seed: int = 0) -> list[Request]:
    """By lengths of prompts, new tokens, and numbers of answers."""
    generator = torch.Generator().manual_seed(seed)
    return [
        Request(
            str(at),
            tuple(torch.randint(2, 41, (prompt,), generator=generator).tolist()),
            SamplingParams(max_tokens=new, n=answers),
            seed=at,
        )
        for at, (prompt, new, answers) in enumerate(shapes)
    ]


@torch.no_grad()
def difference(model: PreTrainedModel, prompt: Iterable[int], answer: Completion) -> float:
    """How far an answer's log-probs are from those of the model without any cache."""
    ids, new = torch.tensor([*prompt, *answer.token_ids]), len(answer.token_ids)
    log_probs = model(ids[None], use_cache=False).logits[0].float().log_softmax(-1)[-new - 1 : -1]
    return float((log_probs.gather(1, ids[-new:, None])[:, 0] - torch.tensor(answer.log_probs)).abs().max())


SHAPES = ((3, 5, 2), (40, 9, 3), (1, 30, 1), (17, 4, 2), (90, 20, 2), (16, 7, 1))


@pytest.mark.parametrize("family", STATEFUL)
def test_log_probs_are_those_of_the_model(make_lm: MakeLM, family: str) -> None:
    """Prompts in pieces of at most 16 tokens beside rows that decode, samples of a prompt, rows that close gaps."""
    rollout, model = both(make_lm, family, max_num_seqs=5, max_num_batched_tokens=16, num_blocks=60)
    asked = requests(SHAPES)
    answers = rollout.complete(asked)
    assert len(answers) == sum(shape[2] for shape in SHAPES)
    worst = max(difference(model, asked[int(a.request_id)].prompt_token_ids, a) for a in answers)
    assert worst < 5e-5
    for layer in recurrences(model):
        torch.nn.init.normal_(layer.conv1d.weight)
    assert difference(model, asked[4].prompt_token_ids, answers[-3]) > 1e-2  # the control
    stats = rollout.stats()
    assert stats["cached_prompt_tokens"] == stats["cached_blocks"] == 0
    assert stats["free_blocks"] == stats["total_blocks"]


def test_preempted_rows_begin_anew(make_lm: MakeLM) -> None:
    rollout, model = both(make_lm, "qwen3_5", max_num_seqs=4, num_blocks=9, block_size=16)
    asked = requests([(20, 70, 1)] * 4)
    answers = rollout.complete(asked)
    assert rollout.stats()["preemptions"] > 0
    assert max(difference(model, asked[int(a.request_id)].prompt_token_ids, a) for a in answers) < 5e-5


def test_an_answer_does_not_depend_on_its_neighbours(make_lm: MakeLM) -> None:
    rollout, _ = both(make_lm, "qwen3_5", max_num_seqs=5, max_num_batched_tokens=32)
    asked = requests(SHAPES)
    together = {(a.request_id, a.index): a.token_ids for a in rollout.complete(asked)}
    for request in asked:
        for answer in rollout.complete([request]):
            assert answer.token_ids == together[answer.request_id, answer.index]


def test_new_weights_make_new_states(make_lm: MakeLM) -> None:
    """Also those of answers under way: their later tokens are the new weights' own, of all that stands before."""
    rollout, model = both(make_lm, "qwen3_5")
    prompt = requests([(50, 12, 1)])[0].prompt_token_ids
    rollout.add(Request("a", prompt, SamplingParams(max_tokens=12)))
    chunks = [chunk for _ in range(5) for chunk in rollout.step()]
    with torch.no_grad():
        for owner in (rollout.hf_model, model):
            for layer in recurrences(owner):
                layer.in_proj_qkv.weight.mul_(-1.5)
    rollout.update_weights((), version=2)
    while rollout.has_work():
        chunks += rollout.step()
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    versions = [version for chunk in chunks for version in chunk.versions]
    log_probs = [value for chunk in chunks for value in chunk.log_probs]
    assert set(versions) == {1, 2}
    first = versions.index(2)
    later = Completion("a", 0, tokens[first:], log_probs[first:])
    assert difference(model, (*prompt, *tokens[:first]), later) < 5e-5


def test_states_are_given_back_and_taken_again(make_lm: MakeLM) -> None:
    rollout, model = both(make_lm, "qwen3_5")
    asked = requests([(30, 6, 2)])
    first = rollout.complete(asked)
    assert rollout.runner.states is not None
    assert rollout.runner.states._layers
    rollout.release(["kv_cache"])
    assert not rollout.runner.states._layers
    rollout.resume(["kv_cache"])
    assert [a.token_ids for a in rollout.complete(asked)] == [a.token_ids for a in first]
    assert difference(model, asked[0].prompt_token_ids, first[0]) < 5e-5


def test_memory_counts_states_and_the_layers_that_attend(make_lm: MakeLM) -> None:
    model = make_lm("qwen3_5")
    assert attending_layers(model) == [1]
    # Three tokens before the convolution, and a matrix for each of four heads; in two layers.
    assert bytes_of_states(model) == 2 * 4 * (3 * (2 * 2 * 6 + 4 * 10) + 4 * 6 * 10)
    assert bytes_of_states(make_lm("qwen3")) == 0

    def blocks(rows: int) -> int:
        return default_num_blocks(model, 16, rows, 128, 0.5, None, torch.float32, False)

    assert blocks(3) == 3 * 8
    with pytest.raises(
        ValueError, match=r"the states of 1000000000 sequences take .* lower rollout.max_num_seqs to"
    ) as e:
        blocks(10**9)
    fits = int(str(e.value).split("max_num_seqs to ")[1])
    assert blocks(fits * 99 // 100) >= 8
    with pytest.raises(ValueError, match="no room for one sequence of 128 tokens"):
        blocks(fits * 101 // 100)
    assert "gpu_memory" not in str(e.value)  # of a CPU
    everywhere = make_lm("qwen3_5", layer_types=["linear_attention"] * 3)
    assert default_num_blocks(everywhere, 16, 3, 128, 0.5, None, torch.float32, False) == 3 * 8


def test_in_bfloat16_steps_and_rows_round_alike(make_lm: MakeLM) -> None:
    """Convolutions that a row adds up in fewer bits than steps do would be most of the difference."""
    model = lasting(make_lm("qwen3_5", max_position_embeddings=256)).to(torch.bfloat16)
    rollout = EmbeddedRollout(model, pad_token_id=0, shares_weights=True)
    rollout.update_weights((), version=1)
    asked = requests([(60, 40, 1)] * 4)
    found = []
    for answer in rollout.complete(asked):
        ids = torch.tensor([*asked[int(answer.request_id)].prompt_token_ids, *answer.token_ids])
        with torch.no_grad():
            row = PackedSequences.of([len(ids)], "cpu")
            logits = model(ids[None], use_cache=False, attention_context=row).logits[0, -41:-1].float()
        log_probs = logits.log_softmax(-1).gather(1, ids[-40:, None])[:, 0]
        found.append((log_probs - torch.tensor(answer.log_probs)).abs())
    assert float(torch.cat(found).mean()) < 0.01

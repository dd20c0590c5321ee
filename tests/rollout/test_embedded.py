"""The embedded rollout against Transformers' own model on the finished sequences, and against itself alone."""

import gc
import weakref

import psutil
import pytest
import torch
from torch import Tensor

from meshrl.data.batch import DataProto
from meshrl.rollout.embedded import kv_cache as slots_module
from meshrl.rollout.embedded import model_runner as runner_module
from meshrl.rollout.embedded.embedded_rollout import AnswerBatch, EmbeddedRollout
from meshrl.rollout.embedded.kv_cache import SlotCache
from meshrl.rollout.requests import Request, SamplingParams

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "qwen3_mixed", "qwen3_moe", "mixtral", "deepseek_v3"]
PAD, VOCABULARY = 0, 41
RAGGED = [5, 1, 9, 2, 2, 7]


def requests(lengths: list[int], n: int = 1, width: int | None = None) -> DataProto:
    """Left-padded random prompts of these lengths, each `n` times in a row, with a seed for every sample."""
    generator = torch.Generator().manual_seed(len(lengths))
    width = width or max(lengths)
    ids = torch.full((len(lengths), width), PAD)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(2, VOCABULARY, (length,), generator=generator)
        mask[row, width - length :] = 1
    samples = len(lengths) * n
    tensors = {
        "input_ids": ids.repeat_interleave(n, 0),
        "attention_mask": mask.repeat_interleave(n, 0),
        "seeds": torch.randint(0, 2**62, (samples,), generator=generator),
    }
    return DataProto.from_dict(tensors)


def rollout(model, **settings) -> EmbeddedRollout:
    made = EmbeddedRollout(model, pad_token_id=PAD, shares_weights=True, **settings)
    made.update_weights([], 3)
    return made


def generate(model, data: DataProto, how: SamplingParams, **settings) -> dict[str, Tensor]:
    return dict(rollout(model, **settings).generate_sequences(data, how).batch.items())


def reference_log_probs(reference, out: dict[str, Tensor], temperature: float = 1.0) -> Tensor:
    """Log-probs of the responses by Transformers' own model over the whole left-padded batch."""
    columns = out["responses"].shape[1]
    with torch.no_grad():
        logits = reference(
            out["input_ids"], attention_mask=out["attention_mask"], position_ids=out["position_ids"], use_cache=False
        ).logits
    log_p = (logits[:, -columns - 1 : -1] / temperature).log_softmax(-1)
    return log_p.gather(-1, out["responses"][..., None])[..., 0] * out["response_mask"]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], rows: Tensor | None = None) -> None:
    """The same tokens and masks exactly, and log-probs to rounding."""
    for name in ("responses", "response_mask", "rollout_log_probs"):
        wanted = right[name] if rows is None else right[name][rows]
        if name == "rollout_log_probs":
            torch.testing.assert_close(left[name], wanted, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(left[name], wanted), name


# Two stop tokens of 41: answers end at all lengths and slots are repacked while others run on.
STOPPING = SamplingParams(max_tokens=12, stop_token_ids=(1, 7, 20))


@pytest.mark.parametrize("lengths", [RAGGED, [4, 4, 4]], ids=["ragged", "even"])
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_transformers(make_lm, family, lengths):
    out = generate(make_lm(family), requests(lengths, n=3), STOPPING)
    ended = out["response_mask"].sum(1)
    assert len(ended.unique()) > 2  # some went on after others had left
    wanted = reference_log_probs(make_lm(family, "eager"), out)
    torch.testing.assert_close(out["rollout_log_probs"], wanted, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_comparison_notices_a_moved_weight(make_lm, family):
    model = make_lm(family)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] += 1e-2
    out = generate(model, requests(RAGGED), STOPPING)
    wanted = reference_log_probs(make_lm(family, "eager"), out)
    assert (out["rollout_log_probs"] - wanted).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_are_those_of_transformers_generate(make_lm, family):
    data = requests(RAGGED)
    out = generate(make_lm(family), data, SamplingParams(max_tokens=10, temperature=0.0, stop_token_ids=(1,)))
    ids, mask = data.batch["input_ids"], data.batch["attention_mask"]
    reference = make_lm(family, "sdpa")
    for row in range(len(ids)):
        prompt = ids[row][mask[row].bool()][None]
        wanted = reference.generate(prompt, do_sample=False, max_new_tokens=10, eos_token_id=1, pad_token_id=PAD)
        answer = out["responses"][row][out["response_mask"][row].bool()]
        assert answer.tolist() == wanted[0, prompt.shape[1] :].tolist(), row


def test_temperature_and_cuts_leave_log_probs_of_the_whole_policy(make_lm):
    how = SamplingParams(max_tokens=6, temperature=0.7, top_k=5, top_p=0.8)
    out = generate(make_lm("qwen3"), requests(RAGGED, n=2), how)
    wanted = reference_log_probs(make_lm("qwen3", "eager"), out, temperature=0.7)
    torch.testing.assert_close(out["rollout_log_probs"], wanted, rtol=1e-5, atol=2e-5)


def test_the_fields_of_an_answer(make_lm):
    data = requests(RAGGED, n=2, width=11)
    out = generate(make_lm("qwen3"), data, STOPPING)
    mask, responses = out["response_mask"], out["responses"]
    assert {name: tuple(x.shape) for name, x in out.items()} == {
        "prompts": (12, 11),
        **dict.fromkeys(("responses", "response_mask", "rollout_log_probs", "versions"), (12, 12)),
        **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), (12, 23)),
    }
    assert torch.equal(out["prompts"], data.batch["input_ids"])
    assert torch.equal(out["input_ids"], torch.cat([out["prompts"], responses], 1))
    assert torch.equal(out["attention_mask"], torch.cat([data.batch["attention_mask"], mask], 1))
    assert torch.equal(out["versions"], torch.where(mask.bool(), 3, -1).int())
    for row in range(12):
        length = int(mask[row].sum())
        stops = [at for at, token in enumerate(responses[row].tolist()) if token in STOPPING.stop_token_ids]
        # the stop token is the last one, and belongs to the answer
        assert length == (stops[0] + 1 if stops else 12)
        assert mask[row].tolist() == [1] * length + [0] * (12 - length)
        assert (responses[row, length:] == PAD).all()
        assert (out["rollout_log_probs"][row, length:] == 0).all()
        kept = out["attention_mask"][row].bool()
        assert out["position_ids"][row][kept].tolist() == list(range(int(kept.sum())))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3_mixed"])
@pytest.mark.parametrize(
    "settings",
    [{"max_num_seqs": 4}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 3}, {"max_num_batched_tokens": 11}],
    ids=str,
)
def test_waves_and_prefill_budgets_change_nothing(make_lm, family, settings):
    data = requests(RAGGED, n=3)
    whole = generate(make_lm(family), data, STOPPING)
    assert_same(generate(make_lm(family), data, STOPPING, **settings), whole)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_request_alone_or_among_others_gives_the_same_answer(make_lm, family):
    data = requests(RAGGED, n=2)
    whole = generate(make_lm(family), data, STOPPING)
    for rows in ([3], [11, 0, 6], [5, 4, 5]):
        index = torch.tensor(rows)
        assert_same(generate(make_lm(family), data.select_idxs(rows), STOPPING), whole, index)


def test_more_padding_on_the_left_changes_nothing(make_lm):
    narrow, wide = (generate(make_lm("qwen3"), requests(RAGGED, n=2, width=w), STOPPING) for w in (9, 20))
    assert_same(wide, narrow)


def test_what_lies_under_the_padding_plays_no_part(make_lm):
    data, spoiled = requests(RAGGED), requests(RAGGED)
    hidden = spoiled.batch["attention_mask"] == 0
    spoiled.batch["input_ids"][hidden] = 33
    assert_same(generate(make_lm("qwen3"), spoiled, STOPPING), generate(make_lm("qwen3"), data, STOPPING))


def test_samples_of_a_prompt_differ_by_their_seeds_alone(make_lm):
    data = requests([6], n=4)
    out = generate(make_lm("qwen3"), data, SamplingParams(max_tokens=12))
    assert len({tuple(row) for row in out["responses"].tolist()}) == 4
    data.batch["seeds"][2] = data.batch["seeds"][0]
    again = generate(make_lm("qwen3"), data, SamplingParams(max_tokens=12))
    assert torch.equal(again["responses"][2], out["responses"][0])
    assert torch.equal(again["responses"][3], out["responses"][3])


def test_a_prompt_is_computed_once_for_its_samples(make_lm):
    model, seen = make_lm("qwen3"), []
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: seen.append(args[0].numel()))
    generate(model, requests([5, 3], n=4), SamplingParams(max_tokens=3))
    assert seen == [8, 8, 8]  # 5 + 3 prompt tokens, then one token of eight samples, twice


def test_ended_samples_leave_the_batch(make_lm):
    model, seen = make_lm("qwen3"), []
    model.model.embed_tokens.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[0]))
    out = generate(model, requests([4] * 16), SamplingParams(max_tokens=40, stop_token_ids=tuple(range(1, 8))))
    lengths = out["response_mask"].sum(1)
    running = [int((lengths > step).sum()) for step in range(1, int(lengths.max()))]
    for slots, alive in zip(seen[1:], running, strict=True):
        assert alive <= slots
        assert alive > (1 - runner_module.REPACK_SHARE) * slots
    assert seen[-1] < 16


@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_when_slots_are_repacked_changes_nothing(make_lm, monkeypatch, family, share):
    data = requests(RAGGED, n=3)
    wanted = generate(make_lm(family), data, STOPPING)
    monkeypatch.setattr(runner_module, "REPACK_SHARE", share)
    assert_same(generate(make_lm(family), data, STOPPING), wanted)


@pytest.mark.parametrize("growth", [1, 2, 5])
@pytest.mark.parametrize("lengths", [RAGGED, [3, 3]], ids=["ragged", "even"])
def test_how_the_cache_grows_changes_nothing(make_lm, monkeypatch, lengths, growth):
    data, how = requests(lengths, n=2), SamplingParams(max_tokens=20)
    wanted = generate(make_lm("qwen3"), data, how)
    monkeypatch.setattr(slots_module, "GROWTH", growth)
    assert_same(generate(make_lm("qwen3"), data, how), wanted)


def test_a_long_prompt_may_enter_in_pieces_beside_a_row_that_goes_on(make_lm, monkeypatch):
    monkeypatch.setattr(slots_module, "GROWTH", 1)
    generator = torch.Generator().manual_seed(5)
    asked = [(3, 2), (3, 30), (60, 3)]  # the third takes the first one's row while the second decodes
    prompts = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length, _ in asked]
    wanted = [
        Request(f"{at}", tuple(prompt), SamplingParams(max_tokens=count), seed=at)
        for at, (prompt, (_, count)) in enumerate(zip(prompts, asked, strict=True))
    ]
    whole, pieces = (
        rollout(make_lm("qwen3"), max_num_seqs=2, max_num_batched_tokens=budget).complete(wanted)
        for budget in (512, 16)
    )
    assert [answer.token_ids for answer in pieces] == [answer.token_ids for answer in whole]
    assert [len(answer.token_ids) for answer in pieces] == [2, 30, 3]


def test_a_long_row_takes_no_memory_for_short_ones():
    cache = SlotCache(num_blocks=8, block_size=4, max_length=1 << 20)
    cache.make_room(64, 16)
    key = torch.ones(1, 4, 1, 64)
    keys, _ = cache.of(0, key, key)
    keys[:, :, :16] = 1.0
    before = psutil.Process().memory_info().rss
    cache.make_room(64, 20000)
    keys, _ = cache.of(0, key, key)
    keys[0, :, :20000] = 2.0
    taken = psutil.Process().memory_info().rss - before
    assert keys[:, :, :16].mean() > 1
    assert not keys[1:, :, 16:64].any()
    assert taken < 200 << 20  # all rows would be 1.2 GiB, for the keys alone


def test_the_cache_never_grows_beyond_the_longest_possible_sequence(make_lm, monkeypatch):
    rooms = []
    grow = SlotCache.make_room

    def watched(self, rows, length):
        grow(self, rows, length)
        rooms.append(self.room)

    monkeypatch.setattr(SlotCache, "make_room", watched)
    generate(make_lm("qwen3"), requests([5, 2]), SamplingParams(max_tokens=7), max_model_len=14)
    assert max(rooms) == 14


def test_one_token_needs_no_decoding(make_lm):
    data = requests(RAGGED)
    one = generate(make_lm("qwen3"), data, SamplingParams(max_tokens=1))
    more = generate(make_lm("qwen3"), data, SamplingParams(max_tokens=4))
    assert one["responses"].shape == (6, 1)
    assert torch.equal(one["responses"], more["responses"][:, :1])


def test_everything_may_end_at_once(make_lm):
    out = generate(make_lm("qwen3"), requests(RAGGED), SamplingParams(5, stop_token_ids=tuple(range(VOCABULARY))))
    assert out["response_mask"].tolist() == [[1, 0, 0, 0, 0]] * 6


def test_an_empty_prompt_is_named(make_lm):
    data = requests([2, 3])
    data.batch["attention_mask"][1] = 0
    with pytest.raises(ValueError, match="prompt 1 of the batch is empty"):
        generate(make_lm("qwen3"), data, STOPPING)


def test_generating_without_weights_is_refused(make_lm):
    made = EmbeddedRollout(make_lm("qwen3"), pad_token_id=PAD)
    with pytest.raises(RuntimeError, match="no weights yet"):
        made.generate_sequences(requests([2]), STOPPING)


def replica(make_lm, family: str = "qwen3") -> EmbeddedRollout:
    model = make_lm(family)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return EmbeddedRollout(model, pad_token_id=PAD)


@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_weights_arrive_whole_with_their_version(make_lm, family):
    source, made = make_lm(family), replica(make_lm, family)
    made.update_weights(((name, p.detach().bfloat16()) for name, p in source.named_parameters()), 8)
    assert made.version == 8
    for name, param in made.hf_model.named_parameters():
        assert torch.equal(param, dict(source.named_parameters())[name].bfloat16().float()), name
    made.update_weights(source.named_parameters(), 9)
    out = made.generate_sequences(requests(RAGGED), STOPPING).batch
    assert set(out["versions"].unique().tolist()) == {-1, 9}
    assert_same(dict(out.items()), generate(source, requests(RAGGED), STOPPING))


def test_bad_weight_streams_are_refused_and_keep_the_version(make_lm):
    weights = dict(make_lm("qwen3").named_parameters())
    first, *_, last = weights
    made = replica(make_lm)
    for stream, message in (
        ([(n, w) for n, w in weights.items() if n != last], f"1 parameters were never sent, such as '{last}'"),
        ([*weights.items(), ("model.extra", torch.ones(1))], "no parameter 'model.extra'"),
        ([*weights.items(), (first, weights[first])], "got it twice"),
        ([(first, weights[first][:1])], "was sent as"),
        ([(first, torch.tensor(1.0))], "was sent as"),
        ([], "were never sent"),
    ):
        with pytest.raises(ValueError, match=message):
            made.update_weights(stream, 1)
        assert made.version == -1


def test_shared_weights_are_not_copied(make_lm):
    made = EmbeddedRollout(make_lm("qwen3"), pad_token_id=PAD, shares_weights=True)

    def never():
        raise AssertionError("nothing needs to be gathered")
        yield

    made.update_weights(never(), 4)
    assert made.version == 4


def test_a_training_module_generates_without_dropout_or_gradients(make_lm):
    model = make_lm("qwen3", attention_dropout=0.5).train()
    out = rollout(model).generate_sequences(requests([3]), STOPPING).batch
    assert not out["rollout_log_probs"].requires_grad
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


def test_a_batch_goes_with_its_last_user(make_lm, monkeypatch):
    """Not some time later, when cycles are looked for: a run would grow meanwhile."""
    made = []

    class Watched(AnswerBatch):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(weakref.ref(self))

    monkeypatch.setattr("meshrl.rollout.embedded.embedded_rollout.AnswerBatch", Watched)
    engine = rollout(make_lm("qwen3_moe"), records_routes=True)
    gc.disable()
    try:
        for _ in range(2):
            engine.generate_sequences(requests(RAGGED, n=2), SamplingParams(4))
        assert [ref() for ref in made] == [None, None]
    finally:
        gc.enable()

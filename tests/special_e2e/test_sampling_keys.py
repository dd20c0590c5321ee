"""How a run's config says to draw tokens and to end answers reaches the engine, in training and in validation."""

from functools import cache

import pytest
import torch
from test_worker import ROLLOUT, policy, some_prompts
from transformers import AutoModelForCausalLM

from meshrl.models.loading import load_tokenizer

LENGTH = 16
ENGINES = ("embedded", "hf")


def letters(text):
    """One letter a token."""
    return text.replace("<eos>", "E").replace("<pad>", "P")


@pytest.fixture(scope="module", params=ENGINES)
def answer(request, task, tmp_path_factory):
    """Texts of answers, a letter for each token, as a config with these settings gives them; checks their log-probs."""
    tmp_path = tmp_path_factory.mktemp(request.param)
    tokenizer, prompts = load_tokenizer(task.model), some_prompts(task, tmp_path).repeat(4)
    prompts.batch["seeds"] = torch.arange(len(prompts)) * 31

    @cache
    def generate(*settings, validate=False):
        options = (f"data.max_response_length={LENGTH}", *(f"{ROLLOUT}.{setting}" for setting in settings))
        group = policy(task, tmp_path, 1, f"{ROLLOUT}.name={request.param}", *options)
        try:
            group.sync_weights(0)
            prompts.meta_info["validate"] = validate
            data = group.generate_sequences(prompts)
            if not validate:
                # Penalties and cuts choose tokens; the log-probs stay those of the policy.
                found = group.compute_log_prob(data).batch["old_log_probs"] - data.batch["rollout_log_probs"]
                assert (found.abs() * data.batch["response_mask"]).max() < 1e-5
        finally:
            group.shutdown()
        rows = zip(data.batch["responses"], data.batch["response_mask"], strict=True)
        return [letters(tokenizer.decode(ids[mask.bool()])) for ids, mask in rows]

    return generate


def test_stop_texts_and_end_tokens(answer):
    plain = answer()
    assert any("5" in text[:-1] for text in plain)
    stopped = answer("stop=['5', 'never']")
    assert any(text.endswith("5") for text in stopped)
    for text, whole in zip(stopped, plain, strict=True):
        assert text == (whole[: whole.index("5") + 1] if "5" in whole else whole)
    endless = answer("ignore_eos=true")
    assert any("E" in text for text in endless)
    assert all(len(text) == LENGTH for text in endless)
    assert not all(len(text) == LENGTH for text in plain)


def test_validation_ends_answers_as_training_does_unless_told(answer):
    plain = answer(validate=True)
    assert any("5" in text[:-1] for text in plain)
    assert all("5" not in text[:-1] for text in answer("stop=['5']", validate=True))
    assert answer("stop=['5']", "val_kwargs.stop=[]", validate=True) == plain
    assert all("5" not in text[:-1] for text in answer("val_kwargs.stop=['5']", validate=True))


def test_fewest_tokens(answer):
    assert any(len(text.removesuffix("E")) < 9 for text in answer())
    for text in answer("min_tokens=9"):
        assert "E" not in text[:9]
        assert len(text) >= 9
    assert any(
        len(text.removesuffix("E")) < 9 for text in answer("min_tokens=9", "val_kwargs.min_tokens=0", validate=True)
    )


def test_tokens_much_less_likely_than_the_likeliest_are_not_drawn(answer):
    greedy = answer(validate=True)
    assert answer("min_p=1.0") == greedy
    assert answer() != greedy
    drawn = ("val_kwargs.do_sample=true", "val_kwargs.temperature=1.0")
    assert answer(*drawn, "val_kwargs.min_p=1.0", validate=True) == greedy
    assert answer(*drawn, "min_p=1.0", validate=True) != greedy


def test_a_repetition_penalty_is_that_of_transformers(answer, task, tmp_path):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(task.model), load_tokenizer(task.model)
    prompts = some_prompts(task, tmp_path)

    def expected(penalty):
        found = model.generate(
            prompts.batch["input_ids"], attention_mask=prompts.batch["attention_mask"], do_sample=False,
            max_new_tokens=LENGTH, repetition_penalty=penalty, pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        texts = tokenizer.batch_decode(found[:, prompts.batch["input_ids"].shape[1] :])
        return [letters(text.replace("<pad>", "")) for text in texts for _ in range(4)]

    # So strong that it changes some answer, whatever model the warm-up has made on this machine.
    assert expected(10.0) != expected(1.0)
    assert answer("val_kwargs.repetition_penalty=10", validate=True) == expected(10.0)
    assert answer("repetition_penalty=10", validate=True) == expected(1.0)
    assert answer("min_p=1.0", "repetition_penalty=10") == expected(10.0)

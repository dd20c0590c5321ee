"""The model and tokenizer made on the spot."""

import json

import pytest
import torch
from safetensors.torch import load_file

from meshrl.models.loading import load_tokenizer, stop_token_ids
from meshrl.models.tiny import char_tokenizer, make_tiny_model

ALPHABET = "01ab +\n"


@pytest.mark.parametrize("text", ["", "01", " a  b ", "0\n1", "a\n\nb\n", "\n\n\n", "0 1+a b"])
def test_every_character_is_a_token_and_comes_back(text):
    tokenizer = char_tokenizer(ALPHABET)
    ids = tokenizer(text)["input_ids"]
    assert ids == [2 + ALPHABET.index(character) for character in text]
    assert tokenizer.decode(ids) == text


def test_the_special_tokens():
    tokenizer = char_tokenizer(ALPHABET)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 2 + len(ALPHABET))
    assert tokenizer.decode([0, 2, 3, 1, 0], skip_special_tokens=True) == "01"
    assert tokenizer("0<eos>1")["input_ids"] == [2, 1, 3]


def test_a_folder_is_complete_and_small(tmp_path):
    folder = make_tiny_model(tmp_path / "new" / "model", ALPHABET)
    tokenizer = load_tokenizer(folder)
    assert tokenizer("ab")["input_ids"] == [4, 5]
    assert stop_token_ids(folder, tokenizer) == [1]
    config = json.loads((folder / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer)
    weights = load_file(folder / "model.safetensors")
    assert 0.3e6 < sum(w.numel() for w in weights.values()) < 0.5e6


def test_the_seed_alone_decides_the_weights(tmp_path):
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}

    def weights(name: str, seed: int, noise: int):
        torch.manual_seed(noise)
        made = load_file(make_tiny_model(tmp_path / name, ALPHABET, seed, **small) / "model.safetensors")
        return made["model.embed_tokens.weight"], torch.rand(1)

    first, after = weights("a", 1, noise=5)
    again, _ = weights("b", 1, noise=6)
    other, _ = weights("c", 2, noise=5)
    assert first.shape == (len(ALPHABET) + 2, 16)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(1))  # the caller's own random numbers are untouched

"""What is kept of single tokens: their text without half characters, their numbers, and how the answer ended."""

import json

import numpy as np
import pytest
import torch

from meshrl.data.batch import DataProto, object_array
from meshrl.telemetry.run_folder import RunFolder
from meshrl.telemetry.samples import SampleLog, finish_reasons, token_details, token_pieces

EOS = 256


def decode(ids):
    """Tokens are bytes; 256 ends the answer."""
    return "".join("<eos>" if part == [EOS] else bytes(part).decode("utf-8", errors="replace") for part in split(ids))


def split(ids):
    parts = [[]]
    for token in ids:
        if token == EOS:
            parts += [[EOS], []]
        else:
            parts[-1].append(token)
    return parts


@pytest.mark.parametrize("text", ["abc", "naïve 漢字", "👩‍💻!", ""])
def test_pieces_make_the_text_and_no_half_characters(text):
    ids = [*text.encode(), EOS]
    pieces = token_pieces(decode, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text + "<eos>"
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_do_not_stop_the_rest():
    pieces = token_pieces(decode, [0xFF] * 20 + list(b"ok"))
    assert len(pieces) == 22
    assert pieces[-1] == "k"
    assert "".join(pieces).count("\ufffd") == 20


def row(text, **columns):
    ids = torch.tensor(list(text.encode()))
    padded = torch.cat([ids, torch.zeros(3, dtype=ids.dtype)])
    mask = torch.tensor([1] * len(ids) + [0] * 3)
    attention = torch.cat([torch.ones(4, dtype=torch.long), mask])
    wide = {
        name: torch.cat([torch.tensor(v), torch.zeros(3, dtype=torch.tensor(v).dtype)]) for name, v in columns.items()
    }
    return {"responses": padded, "response_mask": mask, "attention_mask": attention, **wide}


def test_columns_are_numbers_or_one_number():
    found = token_details(
        row("abc", rollout_log_probs=[-0.12345, -2.0, 0.0], advantages=[0.5, 0.5, 0.5], versions=[3, 3, 4]), decode
    )
    assert found == {
        "text": ["a", "b", "c"],
        "log_prob": [-0.123, -2.0, 0.0],
        "advantage": 0.5,
        "version": [3, 3, 4],
    }


def test_both_log_probs_give_their_difference():
    found = token_details(row("ab", rollout_log_probs=[-1.0, -2.0], old_log_probs=[-1.25, -2.0]), decode)
    assert found["mismatch"] == [-0.25, 0.0]
    assert found["log_prob"] == [-1.0, -2.0]
    assert token_details(row("ab", old_log_probs=[-1.25, -2.0]), decode)["log_prob"] == [-1.25, -2.0]


def test_what_the_model_was_told_is_marked_and_has_no_numbers():
    given = row("abcd", advantages=[0.5, 9.0, -0.0, 0.5], versions=[2, -1, 2, 2])
    given["response_mask"][1] = 0
    found = token_details(given, decode)
    assert found["told"] == [0, 1, 0, 0]
    assert found["advantage"] == [0.5, 0.0, 0.0, 0.5]
    assert str(found["advantage"][2]) == "0.0"
    assert found["version"] == 2


def test_long_answers_are_cut_and_say_so():
    found = token_details(row("x" * 40, versions=[1] * 40), decode, limit=16)
    assert (len(found["text"]), found["of"]) == (16, 40)
    assert "of" not in token_details(row("x" * 16), decode, limit=16)
    assert token_details(row(""), decode) is None


def test_answers_end_by_their_last_token():
    #                     cut        ended at the last place   ended early
    responses = torch.tensor([[7, 8, 9], [7, 8, EOS], [EOS, 0, 0]])
    attention = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]])
    batch = {"responses": responses, "attention_mask": attention}
    assert finish_reasons(batch, [EOS]) == ["length", "stop", "stop"]
    assert finish_reasons(batch, [9, EOS]) == ["stop", "stop", "stop"]
    assert finish_reasons(batch, []) == ["length", "length", "stop"]


def batch(count, ending=None):
    width = 5
    lengths = [1 + i % width for i in range(count)]
    mask = torch.tensor([[int(j < n) for j in range(width)] for n in lengths])
    scores = torch.zeros(count, width)
    scores[:, 0] = torch.tensor([float(i % 2) for i in range(count)])
    columns = {
        "raw_prompt": object_array([f"p{i}" for i in range(count)]),
        "ground_truth": object_array([None] * count),
        "data_source": object_array(["s"] * count),
    }
    if ending is not None:
        columns["ending"] = np.array([ending] * count, dtype=object)
    tensors = {
        "token_level_scores": scores,
        "responses": torch.full((count, width), 65) * mask,
        "response_mask": mask,
        "attention_mask": torch.cat([torch.ones(count, 2, dtype=torch.long), mask], dim=1),
        "rollout_log_probs": torch.full((count, width), -0.5),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


def text_of(data):
    return ["A" * int(n) for n in data.batch["response_mask"].sum(1)]


def test_a_step_leaves_details_of_a_few_and_the_spread_of_all(tmp_path):
    everything = tmp_path / "all"
    with RunFolder(tmp_path / "run") as run:
        log = SampleLog(run, rollout_data_dir=str(everything), decode_tokens=decode, stops=[EOS])
        log.log_training(batch(10), text_of, 3)
        log.log_validation(batch(4), text_of, 3)
        first, second, *validated = run.read_generations()
        assert first["tokens"] == {"text": ["A"], "log_prob": -0.5}
        assert second["tokens"]["text"] == ["A", "A"]
        assert len(validated) == 4
        assert [row["finish"] for row in validated] == ["stop"] * 4
        # Only training steps have a spread, and all of their samples are in it.
        assert run.read_distributions() == [
            {
                "step": 3,
                "score": {"values": [0.0, 1.0], "counts": [5, 5]},
                "response_length": {"values": [1.0, 2.0, 3.0, 4.0, 5.0], "counts": [2] * 5},
                "finish": {"stop": 8, "length": 2},
            }
        ]
    assert "tokens" not in (everything / "3.jsonl").read_text()


def test_samples_dropped_for_a_failed_reward_have_no_score(tmp_path):
    samples = batch(10)
    samples.non_tensor_batch["reward_dropped"] = object_array([at in (0, 2, 5) for at in range(10)])
    with RunFolder(tmp_path / "run") as run:
        SampleLog(run, training_samples=4, rollout_data_dir=str(tmp_path / "all")).log_training(samples, text_of, 1)
        assert run.read_distributions()[0]["score"] == {"values": [0.0, 1.0], "counts": [3, 4]}
        assert [row["score"] for row in run.read_generations()] == [None, 1.0, None, 1.0]
    rows = [json.loads(line) for line in (tmp_path / "all" / "1.jsonl").read_text().splitlines()]
    assert [at for at, row in enumerate(rows) if row["score"] is None] == [0, 2, 5]


def test_the_agents_word_on_the_ending_counts(tmp_path):
    with RunFolder(tmp_path) as run:
        SampleLog(run).log_training(batch(3, ending="max_turns"), text_of, 1)
        assert run.read_distributions()[0]["finish"] == {"max_turns": 3}
        assert "tokens" not in run.read_generations()[0]


def test_a_resumed_run_forgets_the_spread_of_later_steps(tmp_path):
    with RunFolder(tmp_path) as run:
        for step in (1, 2, 3):
            run.append_distributions({"finish": {"stop": step}}, step)
    assert [row["step"] for row in RunFolder(tmp_path, resume=True, last_step=2).read_distributions()] == [1, 2]
    assert (RunFolder(tmp_path).moved_to / "distributions.jsonl").exists()

"""Ways to read and order data, inside runs: mixed by weights, streamed, and by a sampler that learns."""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from by_hand import Recorder
from test_algorithms_by_hand import TWO_MICRO_BATCHES
from test_layouts import SHORT

OPTIONS = (*SHORT, *TWO_MICRO_BATCHES, "trainer.total_training_steps=3")

SAMPLER = '''
class Easiest:
    """Rows in order of their first digit, moved on by what was solved."""

    def __init__(self, data_source, data_config):
        self.rows = sorted(range(len(data_source)), key=lambda n: data_source.rows[n]["prompt"])
        self.heard = []

    def __iter__(self):
        return iter(self.rows)

    def update(self, batch):
        self.heard.append(len(batch))
        heard.append(float(batch.batch["token_level_scores"].sum()))


heard = []
'''


@pytest.fixture
def two_files(tmp_path):
    files = []
    for name, digits in (("low", "012345"), ("high", "567890")):
        rows = [{"prompt": digits[n % 6 :] + digits[: n % 6] + ">", "data_source": name} for n in range(40)]
        rows = [row | {"extra_info": {"digits": row["prompt"][:-1]}} for row in rows]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files.append(str(path))
    return files


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_files_in_the_shares_asked_for(task, tmp_path, monkeypatch, two_files, streaming):
    recorder = Recorder().watch(monkeypatch)
    mix = (f"data.train_files=[{','.join(two_files)}]", "data.train_weights=[3,1]", f"data.streaming={streaming}")
    task.train(tmp_path / "run", *OPTIONS, *mix)
    for batch in recorder.batches:
        assert Counter(batch["data_source"]) == {"low": 36, "high": 12}


def test_a_streamed_run_is_that_of_the_whole_data(task, tmp_path):
    options = (*OPTIONS, "trainer.total_training_steps=2")
    plain = (*options, "data.shuffle=false")
    whole = task.train(tmp_path / "whole", *plain)
    stream = task.train(tmp_path / "stream", *plain, "data.streaming=true")
    two = task.train(tmp_path / "two", *options, "data.streaming=true", "trainer.n_gpus_per_node=2")
    one = task.train(tmp_path / "one", *options, "data.streaming=true")
    for name, weight in whole.weights.items():
        assert torch.equal(stream.weights[name], weight)
        torch.testing.assert_close(two.weights[name], one.weights[name], rtol=1e-5, atol=1e-5)
    assert any(not torch.equal(one.weights[name], weight) for name, weight in whole.weights.items())
    assert stream.metrics[-1]["data/dropped_prompts"] == 0


def test_a_sampler_chooses_and_hears(task, tmp_path, monkeypatch, two_files):
    recorder = Recorder().watch(monkeypatch)
    (tmp_path / "easiest.py").write_text(SAMPLER)
    files = (f"data.train_files=[{','.join(two_files)}]",)
    own = (f"data.sampler.class_path={tmp_path / 'easiest.py'}", "data.sampler.class_name=Easiest")
    task.train(tmp_path / "run", *OPTIONS, *files, *own)
    prompts = [list(batch["raw_prompt"])[::4] for batch in recorder.batches]
    everything = sorted(prompt for part in prompts for prompt in part)
    assert [prompt for part in prompts for prompt in part] == everything
    assert everything[0].startswith("0")
    from meshrl.config.user_code import load_function

    heard = load_function(str(tmp_path / "easiest.py"), "Easiest").__init__.__globals__["heard"]
    assert heard == [pytest.approx(float(batch["token_level_scores"].sum())) for batch in recorder.batches]


@pytest.mark.parametrize("way", ["mixed", "streamed", "sampled"])
def test_a_run_goes_on_with_the_rows_that_come_next(task, tmp_path, monkeypatch, two_files, way):
    """Stopped after the second of three steps, and gone on with: the third has the prompts it would have had."""
    (tmp_path / "easiest.py").write_text(SAMPLER)
    ways = {
        "mixed": ("data.train_weights=[3,1]",),
        "streamed": ("data.streaming=true", "data.shuffle_buffer=9"),
        "sampled": (f"data.sampler.class_path={tmp_path / 'easiest.py'}", "data.sampler.class_name=Easiest"),
    }
    options = (*OPTIONS, f"data.train_files=[{','.join(two_files)}]", *ways[way])
    recorder = Recorder().watch(monkeypatch)
    whole = task.train(tmp_path / "whole", *options, "trainer.save_freq=1")
    wanted = list(recorder.batches[2]["raw_prompt"])
    later = shutil.copytree(whole.path, tmp_path / "later", ignore=shutil.ignore_patterns("model", "global_step_3"))
    recorder.batches.clear()
    gone_on = task.train(later, *options, "trainer.save_freq=1")
    (batch,) = recorder.batches
    assert batch["step"] == 3
    assert list(batch["raw_prompt"]) == wanted
    for name, weight in whole.weights.items():
        assert torch.equal(gone_on.weights[name], weight), name


def test_variables_of_the_chat_template_in_a_run(task, tmp_path):
    """A template that writes the prompts' arrow only when it is told to: then the run is that of plain text."""
    model = shutil.copytree(task.model, tmp_path / "model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}{% if arrow %}>{% endif %}")
    files = []
    for name in ("prompts", "held_out"):
        rows = [json.loads(line) for line in Path(task.files[name]).read_text().splitlines()]
        rows = [row | {"prompt": [{"role": "user", "content": row["prompt"].removesuffix(">")}]} for row in rows]
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = (f"data.train_files=[{files[0]}]", f"data.val_files=[{files[1]}]", f"actor_rollout_ref.model.path={model}")
    options = (*OPTIONS, "trainer.total_training_steps=1", "trainer.test_freq=1")
    text = task.train(tmp_path / "text", *options)
    told = task.train(tmp_path / "told", *options, *chats, "data.apply_chat_template_kwargs={arrow: true}")
    untold = task.train(tmp_path / "untold", *options, *chats)
    plain_model = f"actor_rollout_ref.model.path={task.model}"  # its tokenizer has no template
    given = "actor_rollout_ref.model.custom_chat_template={{ messages[0].content }}>"
    own = task.train(tmp_path / "own", *options, *chats, plain_model, given)
    assert (own.path / "model" / "chat_template.jinja").read_text() == "{{ messages[0].content }}>"
    for name, weight in text.weights.items():
        assert torch.equal(told.weights[name], weight), name
        assert torch.equal(own.weights[name], weight), name
    scores = [{k: v for k, v in run.metrics[-1].items() if k.startswith("val-")} for run in (text, told, untold)]
    assert scores[0]
    assert scores[0] == scores[1] != scores[2]
    assert any(not torch.equal(untold.weights[name], weight) for name, weight in text.weights.items())

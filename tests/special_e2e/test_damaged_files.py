"""Files of a run that a full disk or a kill has left empty, cut off or filled with something else.

Every command that reads a run's folder goes on without such a file, and says so, or ends with one line that names it.
"""

import re
import shutil

import pytest

from meshrl.cli import main

RUN = (
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=false",
    "trainer.timeline=true",
    "trainer.keep_batches_megabytes=100",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
)
WAYS = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "other": lambda content: b"\x00\xffnothing of the kind\n" * 3,
}
BARE = re.compile(r"JSONDecodeError|EOFError|UnpicklingError|UnicodeDecodeError|KeyError")
# By the end of its path: the commands that read it.
READ_BY = {
    "config.yaml": ("report", "replay", "train"),
    "config_sources.json": ("report", "train"),
    "tracker_ids.json": ("train",),
    "metrics.jsonl": ("report", "train"),
    "generations.jsonl": ("report", "train"),
    "distributions.jsonl": ("report", "train"),
    "restarts.jsonl": ("train",),
    "memory_copies.json": ("train",),
    "timeline.json.gz": ("timeline", "train"),
    "step_1.dataproto": ("replay",),
    "global_step_2/manifest.json": ("convert", "train"),
    "global_step_2/trainer.json": ("convert", "train"),
    "global_step_2/actor/tensors.json": ("convert", "train"),
    "global_step_2/actor/tensors-0.safetensors": ("convert", "train"),
    "global_step_2/actor/extra-0.plain": ("convert", "train"),
    "global_step_2/actor/huggingface/config.json": ("convert",),
    "model/config.json": ("from hf",),
    "model/model.safetensors": ("from hf",),
    "model/tokenizer.json": ("from hf",),
}


@pytest.fixture(scope="module")
def words(task):
    """The command of the run but for its folder."""
    return [
        "train", "demo_grpo", f"data.train_files=[{task.files['prompts']}]", "data.val_files=[]",
        f"actor_rollout_ref.model.path={task.model}", "trainer.device=cpu", "trainer.logger=[file]",
        "data.train_batch_size=16", "actor_rollout_ref.rollout.n=4", "trainer.memory_copy_freq=1",
        "trainer.max_restarts=1", *RUN,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def whole(task, words, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main([*words, f"trainer.default_local_dir={out}"]) == 0
    (out / "tracker_ids.json").write_text('{"wandb": "abc"}\n')
    (out / "restarts.jsonl").write_text('{"time": 1.0, "event": "failed", "kind": "rollout", "error": "x"}\n' * 2)
    (out / "memory_copies.json").write_text('{"folder": "/dev/shm/meshrl-copies-1", "run": {}}\n')
    return out


def command_of(name, run, out, words):
    return {
        "report": ["report", str(run)],
        "timeline": ["timeline", str(run), "--out", f"{out}.svg"],
        "replay": ["replay", str(run), "1"],
        "convert": ["convert", str(run / "checkpoints" / "global_step_2"), str(out)],
        "from hf": ["convert", str(run / "model"), str(out)],
        "train": [*words, f"trainer.default_local_dir={run}"],
    }[name]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("file", READ_BY)
def test_every_reader_names_it_or_goes_on(whole, words, tmp_path, capfd, file, way):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    path = next(path for path in run.rglob("*") if str(path).endswith(f"/{file}"))
    path.write_bytes(WAYS[way](path.read_bytes()))
    for name in READ_BY[file]:
        code = main(command_of(name, run, tmp_path / f"out-{name.replace(' ', '-')}", words))
        told = capfd.readouterr().err
        assert code in (0, 1, 2), (name, told)
        assert "Traceback" not in told, name
        assert not BARE.search(told), (name, told)
        named = [path.name, *(parent.name for parent in path.relative_to(run).parents if parent.name)]
        assert code == 0 or any(word in told for word in named), (name, told)


def test_undamaged_all_work(whole, words, tmp_path, capfd):
    """The control."""
    shutil.copytree(whole, tmp_path / "run")
    for name in sorted({name for names in READ_BY.values() for name in names}):
        command = command_of(name, tmp_path / "run", tmp_path / f"out-{name.replace(' ', '-')}", words)
        assert main(command) == 0, (name, capfd.readouterr().err)

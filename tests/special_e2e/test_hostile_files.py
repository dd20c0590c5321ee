"""Whatever file of a run, a checkpoint or a model is replaced by a pickle, no command runs what the pickle says."""

import base64
import io
import json
import os
import pickle
import shutil
import zlib

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from meshrl.cli import main
from meshrl.data import plain_data
from meshrl.data.batch import DataProto
from meshrl.telemetry.live_report import Mark, WatchedRun
from meshrl.trainer.checkpoints import CheckpointError, newest_complete, problems_of
from meshrl.trainer.launch import train
from meshrl.trainer.replay import train_only

QUIET = Console(quiet=True)
SAMPLER = """
class Remembers:
    def __init__(self, data_source, data_config):
        self.count, self.taken = len(data_source), {(0, "start"): 0.0}

    def __iter__(self):
        for number in range(self.count):
            self.taken[number, "row"] = float("inf")
            yield number

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        assert state["taken"][0, "start"] == 0.0
        self.taken = state["taken"]
"""


class Attack:
    """A pickle of it makes a folder when it is read."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def raw(marker):
    return pickle.dumps(Attack(marker), 4)


def by_torch(marker):
    stream = io.BytesIO()
    torch.save({"x": Attack(marker)}, stream)
    return stream.getvalue()


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """A short run that writes every kind of file: batches, groups that wait for the next step, a sampler's state."""
    folder = tmp_path_factory.mktemp("sampler")
    (folder / "sampler.py").write_text(SAMPLER)
    return (
        "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.keep_batches_megabytes=50",
        "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.val_files=[]",
        "trainer.test_freq=-1", "trainer.val_before_train=false", f"data.sampler.class_path={folder / 'sampler.py'}",
        "data.sampler.class_name=Remembers", "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=seq_reward", "data.gen_batch_size=32",
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(task, options, tmp_path_factory):
    return task.train(tmp_path_factory.mktemp("hostile") / "run", *options).path


def with_manifest(checkpoint, file, content):
    """The attacker makes the checkpoint's own list fit."""
    listed = json.loads((checkpoint / "manifest.json").read_text())
    for record in listed["files"]:
        if checkpoint / record["name"] == file:
            record |= {"size": len(content), "crc32": zlib.crc32(content)}
    (checkpoint / "manifest.json").write_text(json.dumps(listed))


def quietly(work):
    """Errors are what the attacks should come to; here only what they have run is asked."""
    try:
        work()
    except (Exception, SystemExit):
        return False
    return True


def newest(folder):
    return folder / "checkpoints" / "global_step_2"


def test_the_run_has_files_of_every_kind(run):
    """Of what is attacked below; and none of its files is a pickle, or holds one."""
    found = {str(file.relative_to(run)) for file in run.rglob("*") if file.is_file()}
    own = {f"checkpoints/global_step_2/{name}" for name in ("trainer.json", "manifest.json", "surplus.dataproto")}
    own |= {f"checkpoints/global_step_2/actor/{n}" for n in ("tensors.json", "tensors-0.safetensors", "extra-0.plain")}
    assert own | {"batches/step_1.dataproto", "batches/step_2.dataproto", "metrics.jsonl", "config.yaml"} <= found
    for name in found:
        content = (run / name).read_bytes()
        assert not plain_data.is_pickle(run / name), name
        assert b"pickle" not in content.lower() or name.endswith((".json", ".yaml", ".txt", ".html")), name
        for start in (b"\x80\x02", b"\x80\x04\x95", b"\x80\x05\x95", b"PK\x03\x04"):
            assert not content.startswith(start), name


@pytest.mark.parametrize("attack", [raw, by_torch])
def test_a_checkpoint_of_pickles_runs_nothing(task, options, run, tmp_path, attack):
    """Each file of it in turn, while its manifest fits: going on, conversion, replay."""
    marker, refused = tmp_path / "was-run", 0
    files = [file.relative_to(run) for file in sorted(newest(run).rglob("*")) if file.is_file()]
    for number, name in enumerate(files):
        copy = tmp_path / f"run-{number}"
        shutil.copytree(run, copy)
        (copy / name).write_bytes(attack(marker))
        if name.name != "manifest.json":
            with_manifest(newest(copy), copy / name, attack(marker))
        where = f"trainer.resume_from_path={newest(copy)}"
        go_on = task.config(tmp_path / f"on-{number}", *options, "trainer.resume_mode=resume_path", where)
        go_on.trainer.total_training_steps = 3
        commands = [
            lambda config=go_on: train(config, console=QUIET),
            lambda copy=copy: main(["convert", str(newest(copy)), str(tmp_path / "hf"), "--overwrite"]),
        ]
        refused += not quietly(commands[0])
        quietly(commands[1])
        assert not marker.exists(), name
        shutil.rmtree(copy)
    assert refused >= 5  # tensors, their index, random states, the trainer's state, what waits, the manifest
    pickle.loads(raw(marker))  # the control: whoever unpickles the file is hit
    assert marker.is_dir()


def test_a_run_of_pickles_runs_nothing(task, options, run, tmp_path, capsys):
    """All that a run's folder holds beside its checkpoints: going on, replay, report, watch, compare, --train-only."""
    marker = tmp_path / "was-run"
    files = [f.relative_to(run) for f in sorted(run.rglob("*")) if f.is_file() and "checkpoints" not in f.parts]
    everything = shutil.copytree(run, tmp_path / "everything")
    for number, name in enumerate(files):
        copy = shutil.copytree(run, tmp_path / f"run-{number}")
        for place in (copy, everything):
            (place / name).write_bytes(raw(marker))
        if name.parts[0] == "model":
            quietly(lambda copy=copy: main(["convert", str(copy / "model"), str(tmp_path / "hf"), "--overwrite"]))
        else:
            quietly(lambda copy=copy: WatchedRun(copy).page())
        if name.suffix == ".dataproto" or name.name in ("config.yaml", "metrics.jsonl"):
            quietly(lambda copy=copy: main(["replay", str(copy), "2"]))
        assert not marker.exists(), name
        shutil.rmtree(copy)
    quietly(lambda: main(["report", str(everything)]))
    quietly(lambda: main(["compare", str(run), str(everything)]))
    quietly(lambda: WatchedRun(everything).news(Mark()))
    config = task.config(everything, *options)
    config.trainer.total_training_steps = 3
    quietly(lambda: train(config, console=QUIET))
    for words in (["replay", str(everything), "1"], ["convert", str(everything), str(tmp_path / "hf")]):
        quietly(lambda words=words: main(words))
    assert not marker.exists()
    capsys.readouterr()
    batch = tmp_path / "batch.dataproto"
    for content in (raw(marker), by_torch(marker), pickle.dumps(DataProto(meta_info={"x": Attack(marker)}))):
        batch.write_bytes(content)
        assert not quietly(lambda: train_only(task.config(tmp_path / "train", *options), batch, console=QUIET))
        assert not marker.exists()


def test_names_in_files_lead_nowhere_else(task, options, run, tmp_path):
    """`{"file": "../../evil"}` in trainer.json, as it once was read; and a sampler's state as it once was."""
    marker = tmp_path / "was-run"
    for number, name in enumerate(("../../../evil.dataproto", str(tmp_path / "evil.dataproto"), "link.dataproto")):
        copy = shutil.copytree(run, tmp_path / f"run-{number}")
        for place in (copy / "evil.dataproto", tmp_path / "evil.dataproto"):
            place.write_bytes(pickle.dumps(DataProto(meta_info={"x": Attack(marker)})))
        (newest(copy) / "link.dataproto").symlink_to(tmp_path / "evil.dataproto")
        content = json.loads((newest(copy) / "trainer.json").read_text())
        content["state"]["surplus"] = {"file": name}
        content["state"]["data"]["pickled_sampler"] = base64.b64encode(raw(marker)).decode()
        text = json.dumps(content).encode()
        (newest(copy) / "trainer.json").write_bytes(text)
        with_manifest(newest(copy), newest(copy) / "trainer.json", text)
        assert not problems_of(newest(copy))
        config = task.config(copy, *options)
        config.trainer.total_training_steps = 3
        with pytest.raises(CheckpointError, match=r"as the file of surplus: it is 'surplus.dataproto'"):
            train(config, console=QUIET)
        assert not marker.exists()


def test_a_model_of_pickles_runs_nothing(task, options, tmp_path, capsys):
    """A folder with pytorch_model.bin alone, and one whose files are pickles under other names."""
    marker = tmp_path / "was-run"
    old, other = (shutil.copytree(task.model, tmp_path / name) for name in ("old", "other"))
    (old / "model.safetensors").unlink()
    (old / "pytorch_model.bin").write_bytes(raw(marker))
    (other / "model.safetensors").write_bytes(raw(marker))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n')
    for folder in (old, other):
        words = (f"actor_rollout_ref.model.path={folder}", *options)
        assert not quietly(lambda words=words: train(task.config(tmp_path / "run", *words), console=QUIET))
        generate = ["generate", str(folder), "--prompts", str(prompts), "--out", str(tmp_path / "out.jsonl")]
        assert main(generate) not in (0, None)
        assert main(["convert", str(folder), str(tmp_path / "new")]) == 1
        quietly(lambda folder=folder: main(["plan", f"actor_rollout_ref.model.path={folder}"]))
        assert not marker.exists()
    assert "--trust-pickle" in capsys.readouterr().err


# What was written before, and is made new on request.


@pytest.fixture
def before(run, tmp_path):
    """The run as format 2 had it: torch's own distributed checkpoint, random states and batches as pickles."""
    import torch.distributed.checkpoint as dcp

    old = shutil.copytree(run, tmp_path / "before")
    for file in (old / "batches").iterdir():
        file.write_bytes(pickle.dumps(DataProto.load_from_disk(file)))
    for checkpoint in (old / "checkpoints").iterdir():
        role = checkpoint / "actor"
        held = load_file(role / "tensors-0.safetensors")
        state = {"model": {}, "optimizer": {"state": {}}}
        for key, tensor in held.items():
            if key.startswith("model."):
                state["model"][key.removeprefix("model.")] = tensor
            else:
                name, _, kind = key.removeprefix("optimizer.state.").rpartition(".")
                state["optimizer"]["state"].setdefault(name, {})[kind] = tensor
        dcp.save(state, checkpoint_id=role, no_dist=True)
        torch.save(plain_data.load(role / "extra-0.plain"), role / "extra-0.pt")
        for name in ("tensors-0.safetensors", "tensors.json", "extra-0.plain"):
            (role / name).unlink()
        content = json.loads((checkpoint / "trainer.json").read_text())
        own = plain_data.from_json(content["state"]["data"].pop("sampler_state"))
        content["state"]["data"]["pickled_sampler"] = base64.b64encode(pickle.dumps(own)).decode()
        (checkpoint / "trainer.json").write_text(json.dumps(content))
        batch = checkpoint / "surplus.dataproto"
        batch.write_bytes(pickle.dumps(DataProto.load_from_disk(batch)))
        files = [f for f in sorted(checkpoint.rglob("*")) if f.is_file() and f.name != "manifest.json"]
        listed = [
            {"name": str(f.relative_to(checkpoint)), "size": f.stat().st_size, "crc32": zlib.crc32(f.read_bytes())}
            for f in files
        ]
        manifest = {"format": 2, "meshrl": "0", "step": content["step"], "files": listed}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    return old


def trees(folder):
    return {str(f.relative_to(folder)): f for f in folder.rglob("*") if f.is_file() and f.name != ".lock"}


def test_a_run_of_before_is_refused_and_made_new_on_request(task, options, run, before, tmp_path, capsys):
    with pytest.raises(CheckpointError, match="--trust-pickle"):
        train(task.config(before, *options), console=QUIET)
    assert main(["convert", str(before), str(tmp_path / "hf")]) == 1
    assert main(["replay", str(before), "2"]) != 0
    with pytest.raises(Exception, match="--trust-pickle"):
        train_only(task.config(tmp_path / "train", *options), before / "batches" / "step_1.dataproto", console=QUIET)
    capsys.readouterr()
    assert main(["convert", str(before), str(tmp_path / "new"), "--trust-pickle"]) == 0
    assert "without pickles: 4 places made new" in capsys.readouterr().out
    assert not [name for name, file in trees(tmp_path / "new").items() if plain_data.is_pickle(file)]
    # What came of it is what the run itself had written: tensors, states, batches.
    mine, own = trees(tmp_path / "new"), trees(run)
    assert mine.keys() == own.keys()
    for name in own:
        if name.endswith(".dataproto"):
            got, sent = DataProto.load_from_disk(mine[name]), DataProto.load_from_disk(own[name])
            assert got.batch.keys() == sent.batch.keys()
            assert all(torch.equal(got.batch[key], sent.batch[key]) for key in sent.batch.keys())
            assert repr(got.meta_info) == repr(sent.meta_info)
        elif name.endswith("tensors-0.safetensors"):
            got, sent = load_file(mine[name]), load_file(own[name])
            assert got.keys() == sent.keys()
            assert all(torch.equal(got[key], sent[key]) for key in sent)
        elif name.endswith(".plain"):
            assert repr(plain_data.load(mine[name])) == repr(plain_data.load(own[name]))
        elif name.endswith("trainer.json"):
            got, sent = (json.loads(file.read_text()) for file in (mine[name], own[name]))
            assert got["state"] == sent["state"]
        elif not name.endswith(("manifest.json", "tensors.json")):
            assert mine[name].read_bytes() == own[name].read_bytes(), name
    assert newest_complete(tmp_path / "new" / "checkpoints").step == 2
    assert main(["replay", str(tmp_path / "new"), "2"]) == 0
    assert main(["convert", str(newest(before)), str(tmp_path / "one"), "--trust-pickle"]) == 0
    assert not problems_of(tmp_path / "one")
    batch = str(before / "batches" / "step_1.dataproto")
    assert main(["convert", batch, str(tmp_path / "batch.dataproto"), "--trust-pickle"]) == 0
    assert "uid" in DataProto.load_from_disk(tmp_path / "batch.dataproto").non_tensor_batch
    for words in (["--trust-pickle"], ["--trust-pickle", "--dtype", "bf16"]):
        assert main(["convert", str(run), str(tmp_path / "again"), *words]) == 1
    assert "holds no pickles" in capsys.readouterr().err


def test_a_model_of_before_is_made_new_on_request(task, tmp_path, capsys):
    old = shutil.copytree(task.model, tmp_path / "old")
    held = load_file(old / "model.safetensors")
    (old / "model.safetensors").unlink()
    torch.save(held, old / "pytorch_model.bin")
    assert main(["convert", str(old), str(tmp_path / "new"), "--trust-pickle"]) == 0
    got = load_file(tmp_path / "new" / "model.safetensors")
    assert got.keys() == held.keys()
    assert all(torch.equal(got[name], held[name]) for name in held)
    assert not list((tmp_path / "new").glob("*.bin"))
    assert (tmp_path / "new" / "tokenizer.json").is_file()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    torch.save({"lora_A": torch.ones(2)}, adapter / "adapter_model.bin")
    assert main(["convert", str(adapter), str(tmp_path / "lora"), "--trust-pickle"]) == 0
    assert torch.equal(load_file(tmp_path / "lora" / "adapter_model.safetensors")["lora_A"], torch.ones(2))
    evil = tmp_path / "evil"
    shutil.copytree(old, evil)
    (evil / "pytorch_model.bin").write_bytes(by_torch(tmp_path / "was-run"))
    assert (
        main(["convert", str(evil), str(tmp_path / "never"), "--trust-pickle"]) == 1
    )  # weights are values, whoever asks
    assert not (tmp_path / "was-run").exists()

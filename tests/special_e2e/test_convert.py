"""Checkpoints become folders that plain transformers loads, and such folders become checkpoints."""

import errno
import json
import shutil

import pytest
import torch
from peft import PeftModel
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from meshrl.cli import main
from meshrl.config.load import load_config
from meshrl.config.supervised import SFTConfig
from meshrl.models.saving import tensor_files
from meshrl.models.tiny import char_tokenizer
from meshrl.trainer.convert import from_hf, to_hf
from meshrl.trainer.launch import train_supervised

KINDS = {
    "dense": ("qwen3", ()),
    "sharded": ("llama", ("trainer.n_gpus_per_node=2",)),
    "moe": ("qwen3_moe", ()),
    "lora": ("qwen2", ("model.lora_rank=3", "model.lora_alpha=7")),
}
IDS = torch.randint(0, 41, (3, 9), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def base(make_lm, tmp_path_factory):
    """A model folder of a family, with a chat template and a generation config of its own."""
    made = {}

    def make(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family) / "base"
            model = make_lm(family, "eager")
            model.generation_config = GenerationConfig(eos_token_id=[1, 5], pad_token_id=0)
            model.save_pretrained(folder)
            tokenizer = char_tokenizer("0123456789>abcdefghijklmnopqrstuvwxyz")
            tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
            tokenizer.save_pretrained(folder)
            made[family] = folder
        return made[family]

    return make


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """One step of fine-tuning with a checkpoint; the run's own `model/` is what the conversion must equal."""
    made = {}

    def make(kind):
        if kind not in made:
            family, options = KINDS[kind]
            folder = tmp_path_factory.mktemp(kind)
            rows = [{"prompt": f"{n}>", "response": "abc"[: 1 + n % 3]} for n in range(8)]
            (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            words = (
                f"data.train_files=[{folder / 'data.jsonl'}]", f"model.path={base(family)}", "data.train_batch_size=4",
                "trainer.n_gpus_per_node=1", "trainer.device=cpu", "trainer.logger=[file]", "optim.lr=0.01",
                "trainer.total_training_steps=1", "trainer.save_freq=1", f"trainer.default_local_dir={folder / 'run'}",
                "engine.fsdp_config.mixed_precision.param_dtype=fp32", *options,
            )  # fmt: skip
            made[kind] = train_supervised(load_config(None, words, SFTConfig).config, console=Console(quiet=True))
        return made[kind]

    return make


def logits(folder, **options):
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    with torch.no_grad():
        return loaded(IDS).logits


@pytest.mark.parametrize("kind", KINDS)
def test_plain_transformers_loads_it(run, base, kind, tmp_path):
    path = run(kind)
    made = to_hf(path, tmp_path / "hf", shard_bytes=20_000)
    found = logits(tmp_path / "hf")
    assert torch.equal(found, logits(path / "model"))
    # the control: training has moved the weights
    assert not torch.allclose(found, logits(base(KINDS[kind][0])), atol=1e-3)
    # names and sizes as transformers itself writes them, experts one by one
    files, own = tensor_files(tmp_path / "hf"), tensor_files(base(KINDS[kind][0]))
    assert files.keys() == own.keys() == tensor_files(path / "model").keys()
    assert len(set(files.values())) > 2
    assert made.tensors == len(own)
    for name, file in own.items():
        assert load_file(file)[name].shape == load_file(files[name])[name].shape
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").chat_template.startswith("{% for m in")
    assert GenerationConfig.from_pretrained(tmp_path / "hf").eos_token_id == [1, 5]


def test_no_more_than_a_shard_is_held(run, tmp_path, monkeypatch):
    held, path = [], run("moe")  # a run that saves its own model before anything is counted
    from meshrl.models import saving

    write = saving.save_tensors
    monkeypatch.setattr(
        saving, "save_tensors", lambda t, f: (held.append(sum(x.nbytes for x in t.values())), write(t, f))
    )
    to_hf(path, tmp_path / "hf", shard_bytes=12_000)
    assert len(held) > 3
    assert max(held) <= 12_000


def test_adapters_as_a_peft_folder(run, base, tmp_path):
    path = run("lora")
    to_hf(path, tmp_path / "peft", adapter=True)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base("qwen2")), tmp_path / "peft")
    with torch.no_grad():
        found = model(IDS).logits
    torch.testing.assert_close(found, logits(path / "model"), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="without adapters"):
        to_hf(run("dense"), tmp_path / "none", adapter=True)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_there_and_back(run, kind, tmp_path, capsys):
    assert main(["convert", str(run(kind)), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "global_step_0"), "--role", "model"]) == 0
    assert capsys.readouterr().out.count("wrote") == 2
    to_hf(tmp_path / "global_step_0", tmp_path / "again")
    first, second = tensor_files(tmp_path / "hf"), tensor_files(tmp_path / "again")
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(load_file(first[name])[name], load_file(second[name])[name])


def test_a_run_begins_with_converted_weights(task, tmp_path):
    options = ("trainer.total_training_steps=1", "data.train_batch_size=4", "data.val_files=[]", "trainer.test_freq=-1")
    options += ("actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.val_before_train=false")
    from_hf(task.model, tmp_path / "global_step_0")
    assets = task.folder / "assets" / "model"
    direct = task.train(tmp_path / "direct", *options)
    started = task.train(
        tmp_path / "run", *options, f"actor_rollout_ref.model.path={assets}", "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'global_step_0'}",
    )  # fmt: skip
    assert all(torch.equal(direct.weights[name], started.weights[name]) for name in direct.weights)


def test_the_type_is_changed_on_request(run, tmp_path):
    to_hf(run("dense"), tmp_path / "hf", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}
    assert AutoConfig.from_pretrained(tmp_path / "hf").dtype == torch.bfloat16


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run("dense") / "checkpoints" / "global_step_1", tmp_path / "global_step_1")


def damage_shard(checkpoint):
    file = next((checkpoint / "model").glob("tensors-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])


def remove_shard(checkpoint):
    next((checkpoint / "model").glob("tensors-*.safetensors")).unlink()


def change_config(checkpoint, manifest=True, **fields):
    file = checkpoint / "model" / "huggingface" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    listed = json.loads((checkpoint / "manifest.json").read_text())
    listed["files"] = [record for record in listed["files"] if not record["name"].endswith("/config.json")]
    (checkpoint / "manifest.json").write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (damage_shard, "bytes"),
        (remove_shard, "is missing"),
        (lambda c: change_config(c, intermediate_size=64), r"mlp\.\w+_proj.weight' is \[\d+, \d+\], not"),
        (
            lambda c: change_config(c, num_hidden_layers=3, layer_types=["full_attention"] * 3),
            r"lacks 11 tensors, first of all 'model.layers.2.",
        ),
        (
            lambda c: change_config(c, num_hidden_layers=1, layer_types=["full_attention"]),
            "that the model does not know",
        ),
    ],
)
def test_what_cannot_be_converted_is_said_and_leaves_the_old_alone(copied, tmp_path, capsys, how, said):
    how(copied)
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("old")
    assert main(["convert", str(copied), str(tmp_path / "hf"), "--overwrite"]) == 1
    import re

    assert re.search(said, capsys.readouterr().err)
    assert (tmp_path / "hf" / "config.json").read_text() == "old"
    assert not list(tmp_path.glob("*.partial"))


def test_a_full_disk(copied, tmp_path, capsys, monkeypatch):
    from meshrl.models import saving
    from meshrl.trainer import convert

    written = []

    def full_at_the_third(tensors, file):
        written.append(file)
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        file.write_bytes(b"")

    monkeypatch.setattr(saving, "save_tensors", full_at_the_third)
    monkeypatch.setattr(convert, "SHARD_BYTES", 1)  # a file for each tensor
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("old")
    assert main(["convert", str(copied), str(tmp_path / "hf"), "--overwrite"]) == 1
    assert "No space left" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "hf").iterdir()] == ["config.json"]
    assert not list(tmp_path.glob("*.partial"))


def test_wrong_words(copied, base, tmp_path, capsys):
    assert main(["convert", str(copied), str(tmp_path / "hf"), "--dtype", "int7"]) == 1
    assert "unknown dtype 'int7'" in capsys.readouterr().err
    assert main(["convert", str(copied), str(copied)]) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "nowhere"), str(tmp_path / "hf")]) == 1
    assert "there is no checkpoint" in capsys.readouterr().err
    assert main(["convert", str(base("qwen3")), str(tmp_path / "c"), "--dtype", "bf16"]) == 1
    assert "is a Hugging Face folder" in capsys.readouterr().err


def test_nothing_else_is_overwritten(copied, base, tmp_path, capsys):
    """Neither what is read nor what no conversion has made."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("all of it")
    (tmp_path / "file").write_text("data")
    for out, words in (
        (copied, "holds what is read"),
        (copied.parent, "holds what is read"),
        (tmp_path / "home", "nothing that this would write"),
        (tmp_path / "file", "nothing that this would write"),
    ):
        assert main(["convert", str(copied), str(out), "--overwrite"]) == 1
        assert words in capsys.readouterr().err
    assert main(["convert", str(base("qwen3")), str(tmp_path / "home"), "--overwrite"]) == 1
    assert (tmp_path / "home" / "thesis.txt").read_text() == "all of it"
    assert main(["convert", str(copied), str(tmp_path / "hf")]) == 0
    assert main(["convert", str(copied), str(tmp_path / "hf"), "--overwrite"]) == 0


@pytest.mark.parametrize("what", ["truncated", "missing", "quantized", "another"])
def test_folders_that_make_no_checkpoint(base, what, tmp_path):
    folder = shutil.copytree(base("qwen3"), tmp_path / "hf")
    file = folder / "model.safetensors"
    if what == "truncated":
        file.write_bytes(file.read_bytes()[:-8])
    elif what == "missing":
        file.unlink()
    elif what == "quantized":
        from safetensors.torch import save_file

        save_file({k: v.to(torch.int8) for k, v in load_file(file).items()}, file, {"format": "pt"})
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4})
        )
    said = {
        "truncated": "truncated or damaged",
        "missing": "no safetensors",
        "quantized": "int8",
        "another": "lacks 22 tensors",
    }
    with pytest.raises(ValueError, match=said[what]):
        from_hf(folder, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))

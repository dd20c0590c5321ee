"""A run that is stopped and gone on with equals one that was never stopped."""

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from test_layouts import UNEVEN, compare
from test_megatron_run import MEGATRON, on_cpu  # noqa: F401
from test_own_code_in_runs import NAMES, code  # noqa: F401

from meshrl.cli import main
from meshrl.config.load import load_config
from meshrl.config.supervised import SFTConfig
from meshrl.config.validate import ensure_runnable
from meshrl.trainer.checkpoints import CheckpointError, Checkpoints, newest_complete, problems_of
from meshrl.trainer.launch import train, train_supervised
from meshrl.trainer.run_state import batch_files, load_batch

# Three batches of 12 make an epoch, validation at every second step, a learning rate that changes. All of a batch is
# generated at once: nothing here depends on whose turn it is.
RUN = (
    *UNEVEN,
    "actor_rollout_ref.rollout.max_num_seqs=48",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "trainer.total_training_steps=5",
    "trainer.test_freq=2",
    "trainer.save_freq=1",
)
TWO = "trainer.n_gpus_per_node=2"
# What a resumed run may have of its own: clocks, and how the weights went to the rollout.
OWN = ("timing_s/", "perf/", "time", "weight_sync/", "ledger", "mfu/", "memory/")


class StoppedError(Exception):
    """The end of the process, as far as the run is concerned."""


@pytest.fixture(scope="module")
def data(task, tmp_path_factory):
    """38 prompts: three batches of 12 an epoch, two are left over. 19 to validate on."""
    folder = tmp_path_factory.mktemp("few")
    for name, count in (("prompts", 38), ("held_out", 19)):
        lines = Path(task.files[name]).read_text().splitlines()[:count]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return (f"data.train_files=[{folder / 'prompts.jsonl'}]", f"data.val_files=[{folder / 'held_out.jsonl'}]")


@pytest.fixture(scope="module")
def whole(task, data, tmp_path_factory):
    """One process, never stopped; its folder has all five checkpoints."""
    return task.train(tmp_path_factory.mktemp("whole") / "run", *RUN, *data)


@pytest.fixture
def stopped(task, data, monkeypatch, tmp_path):
    """Runs until the checkpoint of a step is in place, and no further; returns the run's folder."""

    def run_until(step, *options):
        commit = Checkpoints.commit

        def commit_and_stop(self, wait=False):
            commit(self, wait)
            if (self.folder / f"global_step_{step}").exists():
                raise StoppedError

        with monkeypatch.context() as patch:
            patch.setattr(Checkpoints, "commit", commit_and_stop)
            with pytest.raises(StoppedError):
                task.train(tmp_path / "run", *RUN, *data, *options)
        return tmp_path / "run"

    return run_until


def copy_until(whole, step, folder):
    """The folder of a run that ended after this step, made of one that went on."""
    shutil.copytree(whole.path, folder, ignore=shutil.ignore_patterns("model"))
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.rpartition("_")[2]) > step:
            shutil.rmtree(path)
    return folder


def without_own(run):
    return [{k: v for k, v in row.items() if not k.startswith(OWN)} for row in run.metrics]


def assert_equal(left, right):
    """Metrics without clocks, and weights, to the bit."""
    assert without_own(left) == without_own(right)
    assert left.weights.keys() == right.weights.keys()
    assert all(torch.equal(left.weights[name], right.weights[name]) for name in left.weights)


def test_stopped_in_the_middle_of_an_epoch_it_goes_on_to_the_bit(task, data, whole, stopped):
    folder = stopped(2)
    gone_on = task.train(folder, *RUN, *data)
    assert_equal(whole, gone_on)
    assert not list(folder.glob("previous-*"))
    assert [row["step"] for row in gone_on.metrics] == list(range(6))
    assert [row["training/epoch"] for row in gone_on.metrics[1:]] == [0, 0, 0, 1, 1]


def test_at_an_epochs_border_and_without_the_records_of_later_steps(task, data, whole, tmp_path):
    """A run that was killed two steps after its last checkpoint takes these steps again, once in its files."""
    gone_on = task.train(copy_until(whole, 3, tmp_path / "run"), *RUN, *data)
    assert_equal(whole, gone_on)
    samples = [json.loads(line) for line in (whole.path / "generations.jsonl").read_text().splitlines()]
    again = [json.loads(line) for line in (gone_on.path / "generations.jsonl").read_text().splitlines()]
    assert samples == again


def test_the_comparison_can_fail(task, data, whole, tmp_path):
    """Without the optimizer's states the run ends elsewhere."""
    folder = copy_until(whole, 2, tmp_path / "run")
    other = task.train(folder, *RUN, *data, "actor_rollout_ref.actor.checkpoint.load_contents=[model,extra]")
    with pytest.raises(AssertionError):
        assert_equal(whole, other)


def test_two_processes_go_on_to_the_bit_locally_and_on_ray(
    task,
    data,
    stopped,
    code,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    """On Ray with copies of the built-in loss and estimator, which a file of the user's registers in every process."""
    pytest.importorskip("ray")
    whole = task.train(tmp_path / "whole", *RUN, *data, TWO)
    background = "actor_rollout_ref.actor.checkpoint.async_save=true"
    folder = stopped(2, TWO, background)
    shutil.copytree(folder, tmp_path / "ray")
    assert_equal(whole, task.train(folder, *RUN, *data, TWO, background))
    monkeypatch.chdir(code.parent)
    remote = task.train(tmp_path / "ray", *RUN, *data, TWO, *NAMES, "trainer.backend=ray", "ray_init.num_cpus=2")
    assert_equal(whole, remote)
    booked = [row["ledger/actor_rollout_ref/booked"] for row in remote.metrics if "timing_s/step" in row]
    assert booked == pytest.approx([1] * 5, abs=0.01)


def test_another_world_size_and_axis(task, data, whole, tmp_path):
    folder = copy_until(whole, 2, tmp_path / "run")
    split = ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", TWO)
    compare(whole, task.train(folder, *RUN, *data, *split), 1e-5)


def test_the_other_engine(task, data, whole, on_cpu, tmp_path):  # noqa: F811
    """FSDP writes, Megatron (tp 2, pp 2) reads, trains and writes, FSDP reads."""
    folder = copy_until(whole, 2, tmp_path / "run")
    middle = task.train(folder, *RUN, *data, *MEGATRON)
    compare(whole, middle, 1e-5)
    back = copy_until(middle, 3, tmp_path / "back")
    compare(whole, task.train(back, *RUN, *data), 1e-5)


def test_a_finished_run_says_so_and_trains_nothing(task, data, whole, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    shutil.copytree(whole.path, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("meshrl.trainer.launch.worker_groups", None)  # no worker is started
    with (tmp_path / "screen.txt").open("w") as out:
        train(task.config(folder, *RUN, *data), console=Console(file=out, width=200))
    said = (tmp_path / "screen.txt").read_text()
    assert "finished" in said
    assert "after step 5 of 5" in said
    assert (folder / "metrics.jsonl").read_bytes() == before


def cut_short(file):
    file.write_bytes(file.read_bytes()[:-7])


def flip_a_bit(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    ("damage", "said"),
    [(cut_short, "bytes"), (flip_a_bit, "has been changed"), (Path.unlink, "is missing")],
)
def test_damage_is_seen(whole, tmp_path, damage, said):
    folder = copy_until(whole, 4, tmp_path / "run") / "checkpoints"
    damage(next((folder / "global_step_4" / "actor").glob("tensors-0.safetensors")))
    words = []
    assert newest_complete(folder, words.append).step == 3
    assert said in words[0]


def test_a_half_written_newest_checkpoint_is_passed_over(task, data, whole, tmp_path):
    folder = copy_until(whole, 4, tmp_path / "run")
    (folder / "checkpoints" / "global_step_4" / "manifest.json").unlink()
    with (tmp_path / "screen.txt").open("w") as out:
        train(task.config(folder, *RUN, *data), console=Console(file=out, width=300))
    said = (tmp_path / "screen.txt").read_text()
    assert "global_step_4 is passed over: it has no manifest.json" in said
    assert "goes on after step 3" in said
    weights = load_file(folder / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], whole.weights[name]) for name in weights)
    assert not problems_of(folder / "checkpoints" / "global_step_4")


def test_without_a_whole_checkpoint_the_run_does_not_begin_anew_by_itself(task, data, whole, tmp_path):
    folder = copy_until(whole, 1, tmp_path / "run")
    (folder / "checkpoints" / "global_step_1" / "trainer.json").unlink()
    with pytest.raises(CheckpointError, match="resume_mode=disable"):
        task.train(folder, *RUN, *data)
    path = f"trainer.resume_from_path={folder / 'checkpoints' / 'global_step_1'}"
    with pytest.raises(CheckpointError, match=r"trainer\.json is missing"):
        task.train(tmp_path / "other", *RUN, *data, "trainer.resume_mode=resume_path", path)


def test_disable_begins_anew_and_a_path_goes_on_from_there(task, data, whole, tmp_path):
    folder = copy_until(whole, 2, tmp_path / "run")
    fewer = ("trainer.total_training_steps=1", "trainer.resume_mode=disable")
    task.train(folder, *RUN, *data, *fewer)
    assert (folder / "previous-1" / "checkpoints" / "global_step_2").is_dir()
    assert (folder / "checkpoints" / "global_step_1").is_dir()
    path = f"trainer.resume_from_path={whole.path / 'checkpoints' / 'global_step_3'}"
    gone_on = task.train(tmp_path / "new", *RUN, *data, "trainer.resume_mode=resume_path", path)
    assert [row["step"] for row in gone_on.metrics] == [4, 5]
    assert without_own(gone_on) == without_own(whole)[4:]


def test_ppo_goes_on_with_its_critic(task, data, tmp_path):
    ppo = (
        "algorithm.adv_estimator=gae",
        "critic.model.enable_gradient_checkpointing=false",
        "critic.fsdp_config.mixed_precision.param_dtype=fp32",
        "critic.optim.lr=1e-3",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.target_kl=0.01",
        "algorithm.kl_ctrl.horizon=100",
        "algorithm.rollout_correction.bypass_mode=false",
        "trainer.total_training_steps=3",
    )
    whole = task.train(tmp_path / "whole", *RUN, *data, *ppo)
    assert_equal(whole, task.train(copy_until(whole, 1, tmp_path / "run"), *RUN, *data, *ppo))
    coefficients = [row["actor/reward_kl_penalty_coeff"] for row in whole.metrics[1:]]
    assert len(set(coefficients)) == 3


def test_sft_goes_on_to_the_bit(task, tmp_path):
    def run(folder, *options):
        loaded = load_config(
            "demo_sft",
            [
                f"data.train_files=[{task.files['demonstrations']}]",
                f"model.path={task.folder / 'assets' / 'model'}",
                f"trainer.default_local_dir={folder}",
                "trainer.logger=[file]",
                "trainer.device=cpu",
                "data.train_batch_size=48",
                "trainer.total_training_steps=5",
                "trainer.save_freq=2",
                "checkpoint.async_save=true",
                *options,
            ],
            SFTConfig,
        )
        path = train_supervised(loaded.config, console=Console(quiet=True))
        rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        kept = [{k: v for k, v in row.items() if not k.startswith(OWN)} for row in rows]
        return path, kept, load_file(path / "model" / "model.safetensors")

    path, metrics, weights = run(tmp_path / "whole")
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == [f"global_step_{n}" for n in (2, 4, 5)]
    shutil.copytree(path, tmp_path / "run")
    for name in ("model", "checkpoints/global_step_4", "checkpoints/global_step_5"):
        shutil.rmtree(tmp_path / "run" / name)
    _, again, found = run(tmp_path / "run")
    assert metrics == again
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def test_sft_validates_and_saves_after_each_pass(task, tmp_path):
    """As verl's scripts say it; 96 rows in batches of 48 are two steps a pass."""
    demonstrations = task.files["demonstrations"]
    loaded = load_config(
        "demo_sft",
        [
            f"data.train_files=[{demonstrations}]", f"data.val_files=[{demonstrations}]", "data.train_batch_size=48",
            "data.train_max_samples=96", "data.val_max_samples=16", "trainer.total_epochs=2",
            f"model.path={task.folder / 'assets' / 'model'}", f"trainer.default_local_dir={tmp_path / 'run'}",
            "trainer.logger=[file]", "trainer.device=cpu", "trainer.total_training_steps=null",
            "trainer.test_freq=after_each_epoch", "trainer.save_freq=after_each_epoch",
        ],
        SFTConfig,
    )  # fmt: skip
    ensure_runnable(loaded.config)
    path = train_supervised(loaded.config, console=Console(quiet=True))
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "val/loss" in row] == [2, 4]
    assert sorted(p.name for p in (path / "checkpoints").iterdir()) == ["global_step_2", "global_step_4"]


def test_a_run_that_generates_ahead_loses_no_prompt_and_trains_none_twice(task, data, whole, stopped):
    """What was begun and not trained on when the run ended begins again."""
    ahead = (
        "actor_rollout_ref.hybrid_engine=false",
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        "async_training.max_staleness=1",
        "trainer.keep_batches_megabytes=50",
    )
    folder = stopped(2, *ahead)
    gone_on = task.train(folder, *RUN, *data, *ahead)
    assert [row["training/epoch"] for row in gone_on.metrics[1:]] == [0, 0, 0, 1, 1]
    prompts = [
        tuple(load_batch(file)[0].non_tensor_batch["raw_prompt"]) for file in batch_files(folder / "batches").values()
    ]
    assert len(prompts) == 5
    first_epoch = [prompt for batch in prompts[:3] for prompt in set(batch)]
    assert len(first_epoch) == len(set(first_epoch)) == 36


def test_bfloat16_with_float32_masters_goes_on_to_the_bit(task, data, tmp_path):
    """The remainders of the master weights are part of the state, though the parameters are bfloat16."""
    half = (
        "actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype=bf16",
        "trainer.total_training_steps=3",
        # Few samples: processors without bfloat16 take hundreds of times as long for its products.
        "data.train_batch_size=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    )
    whole = task.train(tmp_path / "whole", *RUN, *data, *half)
    assert_equal(whole, task.train(copy_until(whole, 1, tmp_path / "run"), *RUN, *data, *half))
    rounded = [weight for weight in whole.weights.values() if not torch.equal(weight, weight.bfloat16().float())]
    assert rounded


def test_a_killed_process_goes_on_with_the_same_command(task, data, whole, tmp_path, capsys):
    words = [
        "demo_grpo", *RUN, *data, f"actor_rollout_ref.model.path={task.model}", "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "meshrl.cli", "train", *words]
    killed = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "checkpoints" / "global_step_2").exists() and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    assert not main(["train", *words])  # here, where all is imported
    assert "goes on after step" in capsys.readouterr().out
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert all(torch.equal(weights[name], whole.weights[name]) for name in weights)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(6))


def test_surplus_groups_and_a_refreshed_reference_go_on_to_the_bit(task, data, tmp_path):
    """Groups that dynamic sampling kept for the next step, and a reference that is no longer the first policy."""
    options = (
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=score",
        "data.train_batch_size=6",
        "data.gen_batch_size=12",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.1",
        "actor_rollout_ref.ref.update_every=2",
        "algorithm.rollout_correction.bypass_mode=false",
        "trainer.total_training_steps=4",
    )
    whole = task.train(tmp_path / "whole", *RUN, *data, *options)
    assert max(row["filter_groups/surplus_groups"] for row in whole.metrics[1:4]) > 0
    assert_equal(whole, task.train(copy_until(whole, 3, tmp_path / "run"), *RUN, *data, *options))
    # The control: a reference that begins again as the first policy gives another KL.
    folder = copy_until(whole, 3, tmp_path / "without")
    step = folder / "checkpoints" / "global_step_3"
    shutil.rmtree(step / "actor" / "ref")
    manifest = json.loads((step / "manifest.json").read_text())
    manifest["files"] = [record for record in manifest["files"] if not record["name"].startswith("actor/ref/")]
    (step / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(AssertionError):
        assert_equal(whole, task.train(folder, *RUN, *data, *options))

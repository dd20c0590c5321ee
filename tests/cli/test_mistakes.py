"""Mistakes on the command line: one line each that says what to change, an exit code that is not 0, no traceback."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.cli import main
from meshrl.config import load_config
from meshrl.config.keys import ConfigError, told_without_traceback
from meshrl.config.supervised import SFTConfig

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command, which must fail; returns exit code and stderr."""

    def call(*words: str) -> tuple[int, str]:
        try:
            code = main(words)
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        said = capsys.readouterr().err
        assert code != 0
        assert "Traceback" not in said
        return code, said

    return call


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "grpo", "--trainer.seed=3"], "keys are set without dashes: trainer.seed=VALUE"),
        (["train", "grpo", "--skip-files"], "--skip-files is for --dry-run"),
        (["train", "grpo", "data.train_files=[a"], "expected ',' or ']'"),
        (["train", "demo_sft"], "demo_sft is a recipe of meshrl sft: use that command"),
        (["sft", "grpo"], "grpo is a recipe of meshrl train: use that command"),
        (["plan", "demo_sft", "--gpus", "8xH100"], "demo_sft is a recipe of meshrl sft"),
        (["plan", "grpo", "trainer.sed=1", "trainer.sede=1", "--gpus", "8xH100"], "\nmeshrl: unknown key trainer.sede"),
        (["plan", "--sft", "--gpus", "8xH100"], "the recipe names no model: set model.path"),
        (["plan", "grpo", "--gpus", "8xH100", "--hardware", "nofile"], "--hardware: there is no file nofile"),
        (["plan", "grpo", "--gpus", "8xH100", "--model-config", "nofile"], "--model-config: there is no file nofile"),
        (
            ["plan", "grpo", "actor_rollout_ref.model.path=Qwen3-8B", "--gpus", "8xH100", "--lengths", "nofile"],
            "--lengths: there is no file nofile",
        ),
        (["plan", "grpo", "--gpus", "8xH100", "--out", "x.txt"], "--out x.txt is for what --search finds"),
        (["doctor", "--measure", "nofolder/x.yaml"], "--measure: there is no folder to write nofolder/x.yaml into"),
        (["verify", "--layers", "2"], "--layers 2 is for the shape of your own model"),
        (
            ["verify", "--world", "3", "ulysses_sequence_parallel_size=3"],
            "num_attention_heads (8) must be divisible by engine.ulysses_sequence_parallel_size (3); --model DIR",
        ),
        (
            ["verify", "fsdp_config.mixed_precision.product_dtype=fp8"],
            "product_dtype=fp8: two layouts differ by their last digits",
        ),
        (["verify", "--model", "nofolder"], "--model nofolder: there is no such folder with a config.json"),
        (["serve", "nomodel", "--port", "99999"], "port must be between 0 and 65535, got 99999"),
        (["replay", "norun", "2"], "there is no run folder norun"),
        (["replay", ".", "2", "--token", "x"], "--token 'x' must be two numbers from 0, SAMPLE,TOKEN"),
        (["convert", "norun", "out", "--shard-mb", "0"], "--shard-mb (0) must be at least 1"),
    ],
    ids=lambda part: " ".join(part)[:60] if isinstance(part, list) else "",
)
def test_a_mistake_is_told(fails: Run, words: list[str], said: str) -> None:
    assert said in fails(*words)[1]


def test_a_model_of_the_hub_comes_with_the_command_that_fetches_it(fails: Run) -> None:
    _, said = fails("train", "grpo", "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "--dry-run")
    assert "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B is not a folder, and not whole in the hub's cache" in said
    assert "'hf download Qwen/Qwen3-0.6B'" in said
    _, said = fails("train", "grpo", "actor_rollout_ref.model.path=/models/qwen", "--dry-run")
    assert "/models/qwen is not a folder; download the model there first\n" in said


def test_the_shape_of_a_model_needs_a_layer(fails: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "--layers (0) must be at least 1" in fails("verify", "--model", str(tmp_path), "--layers", "0")[1]
    options = ("--shard-mb", "8")
    assert "--shard-mb is for checkpoints" in fails("convert", str(tmp_path), str(tmp_path / "out"), *options)[1]


def test_a_wrong_key_in_a_recipe_is_still_a_wrong_key(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("trainer: {sed: 3}\n")
    for root in (None, SFTConfig):
        with pytest.raises(ConfigError, match=r"unknown key trainer\.sed"):
            load_config(recipe, [], root) if root else load_config(recipe)


def test_a_port_in_use_is_told_before_the_model_is_loaded(fails: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert f"cannot listen on 127.0.0.1 port {port}" in fails("serve", "nomodel", "--port", str(port))[1]


@pytest.mark.parametrize("task", ["sort", "calculator"])
def test_a_demo_loads_its_config_before_it_warms_up(
    fails: Run, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshrl.trainer import calculator_demo, demo

    for module in (demo, calculator_demo):
        monkeypatch.setattr(module, "train_supervised", lambda *_: pytest.fail("the warm-up has begun"))
    assert fails("demo", "--task", task, "--out", str(tmp_path), "trainer.sed=3") == (
        2,
        "meshrl: unknown key trainer.sed: did you mean trainer.seed? (command line)\n",
    )


def test_a_reference_that_leads_nowhere_has_its_source() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name: .*'nokey' not found \(command line\)"):
        load_config("grpo", ["trainer.experiment_name=${nokey}"])


def test_what_a_run_refuses_as_it_starts_needs_no_traceback() -> None:
    with pytest.raises(ConfigError) as caught, told_without_traceback("data.val_files"):
        raise OSError("no such file")
    assert caught.value.problems == ["data.val_files: no such file"]
    with pytest.raises(ConfigError) as caught, told_without_traceback("a"):
        raise ConfigError(["one", "two"])
    assert caught.value.problems == ["one", "two"]
    with pytest.raises(ConfigError) as caught, told_without_traceback("trainer.logger"):
        raise TimeoutError
    assert caught.value.problems == ["trainer.logger: TimeoutError"]
    with pytest.raises(RuntimeError), told_without_traceback():
        raise RuntimeError("a bug keeps its traceback")


@pytest.mark.parametrize(("kind", "code"), [(ValueError, 2), (ConnectionError, 75)])
def test_a_service_that_does_not_answer_may_be_tried_again(
    kind: type[Exception], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import meshrl.trainer.launch  # noqa: F401  only runs meet services

    def opened(_: object) -> None:
        with told_without_traceback("trainer.logger"):
            raise kind("nobody there")

    monkeypatch.setattr("meshrl.cli._config", opened)
    assert main(["config"]) == code
    assert capsys.readouterr().err == "meshrl: trainer.logger: nobody there\n"
    monkeypatch.setenv("MESHRL_TRACEBACK", "1")
    assert main(["config"]) == code
    assert "Traceback" in capsys.readouterr().err


def test_megatron_is_not_verified_without_devices(fails: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, said = fails("verify", "--strategy", "megatron")
    assert code == 2
    assert "needs CUDA devices, and torch sees none here: use fsdp2 on a CPU" in said

"""The command line: exit codes, one clear line per problem, nothing heavy before it is needed."""

import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import meshrl
from meshrl.cli import main
from meshrl.rewards import functions as code_tests
from meshrl.rewards.sandbox.backends import Backend, SandboxError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process; returns exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = main(words)
        except SystemExit as exit_:  # argparse
            code = int(exit_.code or 0)
        return code, *capsys.readouterr()

    return call


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    """Overrides that make the grpo recipe runnable."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 4}))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    (tmp_path / "train.jsonl").write_text('{"prompt": "6 * 7", "response": "42"}\n' * 1024)
    return [
        f"data.train_files={tmp_path}/train.jsonl",
        f"actor_rollout_ref.model.path={model}",
        "reward.name=exact_match",
        "trainer.n_gpus_per_node=2",
    ]


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stands in for the trainer's entry points and keeps what they were called with."""
    calls: dict[str, Any] = {}

    def entry(name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            calls[name] = (args, kwargs)
            if stand_in.outcome is not None:
                raise stand_in.outcome
            return Path("folder")

        return called

    stand_in = types.SimpleNamespace(calls=calls, outcome=None)
    for module, functions in {"launch": ("train", "train_supervised"), "demo": ("main",)}.items():
        fake = types.ModuleType(f"meshrl.trainer.{module}")
        for function in functions:
            setattr(fake, function, entry(function))
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
        monkeypatch.setattr(f"meshrl.trainer.{module}", fake, raising=False)
    return stand_in


def test_version_and_help(run: Run) -> None:
    assert run("--version") == (0, f"meshrl {meshrl.__version__}\n", "")
    code, out, _ = run("--help")
    assert code == 0
    for command in ("train", "sft", "demo", "config", "report", "watch"):
        assert f"    {command} " in out


@pytest.mark.parametrize("words", [[], ["trian"], ["config", "--onyl", "x"], ["report"], ["watch", "a", "b"]])
def test_wrong_usage_is_2(run: Run, words: list[str]) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert "usage: meshrl" in err


def test_train_gets_the_checked_config_and_its_sources(run: Run, settings: list[str], trainer: Any) -> None:
    code, _, err = run("train", "grpo", *settings, "trainer.seed=5")
    assert (code, err) == (0, "")
    (config, sources), _ = trainer.calls["train"]
    assert (config.trainer.seed, config.algorithm.adv_estimator) == (5, "grpo")
    assert sources["trainer.seed"] == "command line"


def test_sft_gets_its_config(run: Run, settings: list[str], trainer: Any) -> None:
    words = [settings[0], settings[1].replace("actor_rollout_ref.", ""), settings[3]]
    assert run("sft", *words)[0] == 0
    (config, _), _ = trainer.calls["train_supervised"]
    assert type(config).__name__ == "SFTConfig"
    assert config.trainer.world_size == 2


def test_demo_gets_its_options(run: Run, trainer: Any) -> None:
    assert run("demo", "--seed", "3", "--control", "--out", "here", "trainer.total_training_steps=2")[0] == 0
    options = {"seed": 3, "control": True, "algorithm": "grpo", "overrides": ["trainer.total_training_steps=2"]}
    assert trainer.calls["main"] == (("here",), options)
    assert run("demo")[0] == 0
    assert trainer.calls["main"] == (
        ("outputs/demo",),
        {"seed": 0, "control": False, "algorithm": "grpo", "overrides": []},
    )


def test_overrides_may_stand_after_options(run: Run, settings: list[str], trainer: Any) -> None:
    code, out, _ = run("train", "grpo", settings[0], "--dry-run", *settings[1:])
    assert code == 0
    assert "dry run: the config is fine" in out
    assert "train" not in trainer.calls


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("trainer.sed=3", "meshrl: unknown key trainer.sed: did you mean trainer.seed? (command line)"),
        ("trainer.seed=x", "meshrl: trainer.seed must be int, not 'x' (command line)"),
        ("trainer.nnodes=2", "meshrl: trainer.nnodes=2 needs trainer.backend=ray, not local"),
        (
            "global_profiler.tool=torch",
            "meshrl: global_profiler.tool=torch needs steps to profile: set global_profiler.steps=[3]",
        ),
        ("trainer.timeline_steps=[2]", "meshrl: trainer.timeline_steps has no effect without trainer.timeline=true"),
        ("data.val_files=nowhere.jsonl", "meshrl: data.val_files: there is no nowhere.jsonl"),
    ],
)
def test_config_problems_are_2_with_one_line_each(
    run: Run, settings: list[str], trainer: Any, word: str, line: str
) -> None:
    assert run("train", "grpo", *settings, word) == (2, "", f"{line}\n")
    assert trainer.calls == {}


def test_missing_recipe_is_2(run: Run) -> None:
    code, _, err = run("train", "no_such_recipe")
    assert code == 2
    assert "no recipe 'no_such_recipe'" in err


def test_dry_run_shows_units_also_when_something_is_not_supported(run: Run) -> None:
    key = "actor_rollout_ref.model.use_liger=true"
    code, out, err = run("train", "qwen2_7b_fsdp_8gpu", "--dry-run", "--skip-files", key)
    assert code == 2
    assert "actor: fsdp2 on 8 ranks = dp 2 * cp 1 * sp 4; weights sharded over 8" in out
    assert err.splitlines()
    assert all(line.startswith("meshrl: not supported yet: ") for line in err.splitlines())


def test_a_failing_run_is_1_with_its_traceback(run: Run, settings: list[str], trainer: Any) -> None:
    trainer.outcome = RuntimeError("no more memory")
    code, _, err = run("train", "grpo", *settings)
    assert code == 1
    assert "Traceback" in err
    assert err.endswith("meshrl: the run failed: RuntimeError: no more memory\n")


def test_a_failing_reward_is_told_without_our_traceback(
    run: Run, settings: list[str], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshrl.rewards.results import RewardError

    trainer.outcome = RewardError("it failed\n  own.py:3 in compute_score: raise")
    code, _, err = run("train", "grpo", *settings)
    assert code == 1
    assert err == f"meshrl: the run failed: RewardError: {trainer.outcome}\n"
    monkeypatch.setenv("MESHRL_TRACEBACK", "1")
    assert "Traceback" in run("train", "grpo", *settings)[2]


def test_a_config_error_of_the_run_is_2(run: Run, settings: list[str], trainer: Any) -> None:
    from meshrl.config import ConfigError

    trainer.outcome = ConfigError(["one", "two"])
    assert run("train", "grpo", *settings) == (2, "", "meshrl: one\nmeshrl: two\n")


def test_ctrl_c_is_130(run: Run, settings: list[str], trainer: Any) -> None:
    trainer.outcome = KeyboardInterrupt()
    assert run("train", "grpo", *settings) == (130, "", "meshrl: interrupted\n")


def test_a_pipe_that_breaks_in_a_run_is_a_failure_of_infrastructure(
    run: Run, settings: list[str], trainer: Any
) -> None:
    trainer.outcome = BrokenPipeError(32, "Broken pipe")
    code, _, err = run("train", "grpo", *settings)
    assert code == 75
    assert err.endswith("meshrl: the run failed: BrokenPipeError: [Errno 32] Broken pipe\n")


def test_config_prints_the_tree_with_sources(run: Run, tmp_path: Path) -> None:
    code, out, err = run("config", "grpo", "actor_rollout_ref.rollout.n=4", "--only", "actor_rollout_ref.rollout")
    assert (code, err) == (0, "")
    assert "    n: 4  # from command line\n" in out
    assert "    temperature: 1.0  # default\n" in out
    assert "trainer" not in out.replace("the trainer", "")
    (tmp_path / "again.yaml").write_text(out)
    assert run("config", str(tmp_path / "again.yaml"), "--only", "actor_rollout_ref.rollout")[0] == 0


def test_config_documents_and_knows_sft(run: Run) -> None:
    out = run("config", "--sft", "--doc", "--only", "data.max_length")[1]
    assert out == "data:\n  # Longest prompt plus response, in tokens.\n  max_length: 1024  # default\n"


def test_other_spellings_are_noted(run: Run) -> None:
    code, _, err = run("config", "actor_rollout_ref.rollout.tensor_parallel_size=2", "--only", "trainer.seed")
    assert code == 0
    assert "note: actor_rollout_ref.rollout.tensor_parallel_size is read as" in err


def test_report_says_where_it_is_or_what_is_missing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("meshrl.telemetry.report")
    fake.write_report = lambda run_dir: Path(run_dir) / "report.html"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    assert run("report", str(tmp_path)) == (0, f"wrote {tmp_path}/report.html\n", "")

    def fail(run_dir: str) -> Path:
        raise ValueError(f"{run_dir} has no steps")

    fake.write_report = fail  # type: ignore[attr-defined]
    assert run("report", "x") == (1, "", "meshrl: x has no steps\n")
    code, _, err = run("report", "x", "--out", "y.html")
    assert (code, "--out is for comparisons" in err) == (1, True)


def test_several_runs_are_compared(run: Run, tmp_path: Path) -> None:
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    out = tmp_path / "both.html"
    assert run("report", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out))[0] == 0
    assert "Comparison of 2 runs" in out.read_text()
    code, _, err = run("report", str(tmp_path / "one"), str(tmp_path / "three"))
    assert (code, "there is no run folder" in err) == (1, True)


def test_watch_says_where_and_ends_when_interrupted(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(server: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", interrupted)
    code, out, _ = run("watch", str(tmp_path / "not yet"), "--port", "0")
    assert (code, "http://127.0.0.1:" in out) == (0, True)
    code, _, err = run("watch", str(tmp_path), "--port", "99999")
    assert (code, "choose another with --port" in err) == (1, True)


# In a process of its own


def process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout


def test_help_is_quick_and_light() -> None:
    loaded, seconds = process(
        "import sys, time\nfrom meshrl.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'omegaconf', 'numpy', 'yaml', 'ray', 'rich', 'transformers'} & set(sys.modules)))\n"
        "print(time.process_time())\n"
    ).splitlines()[-2:]
    assert loaded == "[]"
    assert float(seconds) < 1.0  # of the processor: others may be using it, too


CODE = "reward.name=code"


def test_dry_run_says_which_sandbox_would_run(run: Run, settings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Backend("landlock", "/usr/bin/python3", ("bwrap: it is not installed",))
    monkeypatch.setattr(code_tests, "chosen_backend", lambda **wanted: backend)
    code, out, _ = run("train", "grpo", *settings, CODE, "--dry-run")
    assert code == 0
    assert f"programs (reward.kwargs) run in the sandbox {backend.describe()}\n" in out
    functions = ["reward.name=null", "reward.functions={tests: {name: code}, exact_match: 1}"]
    assert (
        "programs (reward.functions.tests.kwargs) run in" in run("train", "grpo", *settings, *functions, "--dry-run")[1]
    )
    assert "sandbox" not in run("train", "grpo", *settings, "--dry-run")[1]


def test_dry_run_refuses_programs_that_nothing_would_keep_in(
    run: Run, settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("train", "grpo", *settings, CODE, "reward.kwargs.sandbox=bwarp", "--dry-run")
    assert code == 2
    assert err == "meshrl: reward.kwargs: there is no sandbox 'bwarp': use auto, bwrap, namespaces, landlock, none\n"
    assert "the config is fine" not in out

    def none(**wanted: Any) -> Backend:
        raise SandboxError("nothing here can keep a program from reading the trainer's files")

    monkeypatch.setattr(code_tests, "chosen_backend", none)
    code, out, err = run("train", "grpo", *settings, CODE, "--dry-run")
    assert code == 2
    assert err == "meshrl: reward.kwargs: nothing here can keep a program from reading the trainer's files\n"
    assert "the config is fine" not in out
    assert run("train", "grpo", *settings, CODE, "--dry-run", "--skip-files")[0] == 0


def test_dry_run_imports_nothing_heavy() -> None:
    loaded = process(
        "import sys\nfrom meshrl.cli import main\n"
        "code = main(['train', 'grpo', '--dry-run', '--skip-files'])\n"
        "print(code, sorted({'torch', 'numpy', 'ray', 'transformers'} & set(sys.modules)))\n"
    )
    assert loaded.endswith("0 []\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m meshrl.cli config | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "0\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.n_gpus_per_node=2"], ["meshrl.workers.actor"]),
        (["trainer.n_gpus_per_node=1"], []),
        (
            ["trainer.n_gpus_per_node=1", "actor_rollout_ref.hybrid_engine=false"],
            ["meshrl.workers.actor", "meshrl.workers.generation"],
        ),
        (["trainer.n_gpus_per_node=2", "trainer.backend=ray"], []),
    ],
)
def test_workers_processes_import_while_the_command_does(
    run: Run, monkeypatch: pytest.MonkeyPatch, overrides: list[str], expected: list[str]
) -> None:
    order: list[str] = []
    fake = types.ModuleType("meshrl.trainer.launch")
    fake.train = lambda *_: order.append("train")  # type: ignore[attr-defined]
    halves = types.ModuleType("meshrl.trainer.replay")
    halves.rollout_only = halves.train_only = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "meshrl.trainer.launch", fake)
    monkeypatch.setitem(sys.modules, "meshrl.trainer.replay", halves)
    monkeypatch.setattr("meshrl.config.ensure_runnable", lambda *_: None)
    monkeypatch.setattr("meshrl.controller.warm_up", lambda *modules: order.extend(modules))
    assert run("train", "demo_grpo", *overrides)[0] == 0
    assert order == [*expected, "train"]

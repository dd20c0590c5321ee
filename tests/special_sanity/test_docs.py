"""The documentation does what it says: every fenced block of every page is run (docs_runner.py says how)."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from docs_runner import LANGUAGES, Runner, blocks_of, commands_of
from rich.console import Console

import meshrl.agents.calculator_task
import meshrl.tools.doctor.measure
import meshrl.tools.verify
import meshrl.trainer.calculator_demo
import meshrl.trainer.demo
from meshrl.agents.calculator_task import make_calculator_model
from meshrl.config import validate_training
from meshrl.controller import warm_up
from meshrl.data.row_files import write_tables
from meshrl.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
MOST_NOT_RUN = 8  # blocks that need what a test machine does not have
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return float(solution_str.strip() == ground_truth)


def brevity(data_source, solution_str, ground_truth, extra_info):
    return -float(len(solution_str))
"""
THINKING = "{{ messages[-1].content }}={% if enable_thinking is false %} {% endif %}"
CAPS = [
    "trainer.total_training_steps=1",
    "trainer.val_before_train=false",
    "data.train_batch_size=16",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.rollout.n=4",
]
# The shape of Qwen3-1.7B: weight_sync.md plans with the real one.
QWEN3_1_7B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(autouse=True)
def all_packages(monkeypatch):
    """Dry runs of the pages pass without vLLM and SGLang, whose keys they show."""
    monkeypatch.setattr(validate_training, "is_installed", lambda package: True)


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    """A folder with a tiny model, data, a reward function and a short run of the demo, under the pages' names."""
    warm_up("transformers.models.qwen3.modeling_qwen3")  # the model's class: else every worker imports it
    folder = tmp_path_factory.mktemp("docs")
    make_tiny_model(folder / "MODEL", "0123456789abcdefghijklmnopqrstuvwxyz>+= ", max_position_embeddings=32768)
    make_calculator_model(folder / "CHAT_MODEL", max_position_embeddings=32768)
    (folder / "examples").symlink_to(ROOT / "examples", target_is_directory=True)
    for name in ("JUDGE_MODEL", "TEACHER", "models/Qwen2.5-1.5B"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(folder / "MODEL", target_is_directory=True)
    shutil.copytree(folder / "MODEL", folder / "models/Qwen3-0.6B")
    (folder / "models/Qwen3-0.6B/chat_template.jinja").write_text(THINKING)
    rows = [
        {"prompt": f"{a}+{a}=", "ground_truth": str(2 * a), "data_source": "sums", "extra_info": {"level": a}}
        for a in range(1024)  # a batch of the recipes
    ]
    demos = [{"prompt": f"{a}+{a}=", "response": str(2 * a)} for a in range(256)]
    pairs = [{"prompt": f"{a}+{a}=", "chosen": str(2 * a), "rejected": str(3 * a)} for a in range(256)]
    judged = [{"prompt": f"{a}+{a}=", "response": str(2 * a + a % 2), "label": a % 2 == 0} for a in range(256)]
    write_tables(
        folder, {"train": rows, "test": rows[:64], "demos": demos, "math": rows, "pairs": pairs, "judged": judged}
    )
    (folder / "data").mkdir()
    import pandas

    for name in ("train", "test", "code", "TRAIN", "TEST", "data/train", "data/test"):
        pandas.DataFrame(rows).to_parquet(folder / f"{name}.parquet")
    (folder / "my_reward.py").write_text(REWARD)
    (folder / "Qwen3-1.7B").mkdir()
    (folder / "Qwen3-1.7B" / "config.json").write_text(json.dumps(QWEN3_1_7B))
    short_run(folder)
    return folder


def short_run(folder):
    """Two steps of the demo with checkpoints and kept batches, as RUN_DIR; RUN_DIR2 is its like."""
    keep = ["trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.keep_batches_megabytes=100"]
    with pytest.MonkeyPatch.context() as patch:
        shorten_demos(patch)
        patch.setattr("meshrl.telemetry.report.write_curves", lambda *_: None)  # see docs_runner.py
        run = meshrl.trainer.demo.main(folder / "demo", overrides=keep, console=Console(quiet=True))
    (folder / "RUN_DIR").symlink_to(run, target_is_directory=True)
    shutil.copytree(run, folder / "RUN_DIR2")


@pytest.fixture
def page_runner(scene, tmp_path, monkeypatch):
    """A runner in a folder of its own, with what is in the scene; demos take a step where the page says nothing."""
    for thing in scene.iterdir():
        (tmp_path / thing.name).symlink_to(thing)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shorten_demos(monkeypatch)
    families = {"qwen3": meshrl.tools.verify.FAMILIES["qwen3"]}
    monkeypatch.setattr(meshrl.tools.verify, "FAMILIES", families)
    measure_briefly(monkeypatch)
    runner = Runner(ROOT)
    yield runner
    runner.close()


def measure_briefly(patch):
    """Small products, few times: tests/doctor looks at the numbers."""
    product = meshrl.tools.doctor.measure.matmul_tflops
    patch.setattr(meshrl.tools.doctor.measure, "MINIMUM_SECONDS", 0.01)
    patch.setattr(meshrl.tools.doctor.measure, "matmul_tflops", lambda device, dtype, size: product(device, dtype, 64))


def shorten_demos(patch):
    """Demos on less data, and of a step or two."""
    for module in (meshrl.trainer.demo, meshrl.trainer.calculator_demo):
        patch.setattr(module, "load_config", capped(module.load_config))
    for module in (meshrl.trainer.demo, meshrl.agents.calculator_task):
        patch.setattr(module, "PROMPTS", 640)
        patch.setattr(module, "HELD_OUT", 32)


def capped(load):
    """Shorter demos: one step unless the page says how many, of few samples, no validation before it, a warm-up of a
    step."""

    def load_capped(name, overrides, kind):
        said = [word for word in overrides if word.startswith("trainer.total_training_steps=")]
        caps = CAPS[1:] if said else CAPS
        return load(name, [*overrides, *(CAPS[:1] if "sft" in name else caps)], kind)

    return load_capped


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_runs(page, page_runner):
    for block in blocks_of(page):
        if block.not_run is None:
            try:
                page_runner.run(block)
            except BaseException as error:
                error.add_note(f"in the block at {name_of(page)}:{block.line}")
                raise


def test_blocks_have_a_language_and_few_are_not_run():
    blocks = [block for page in PAGES for block in blocks_of(page)]
    unknown = [f"{name_of(b.page)}:{b.line}: '{b.language}'" for b in blocks if b.language not in LANGUAGES]
    assert not unknown
    not_run = [f"{name_of(b.page)}:{b.line}: {b.not_run}" for b in blocks if b.not_run is not None]
    assert len(not_run) <= MOST_NOT_RUN, not_run
    assert len(blocks) > 60


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "assert 1 == 2"),
        ("python", ">>> 1 + 1\n3"),
        ("bash", "meshrl config grpo no.such.key=1"),
        ("bash", "meshrl train grpo ... trainer.no_such_key=1"),
        ("bash", "false"),
        ("bash", "pip install 'meshrl[nothing]'"),
        ("bash", "make nothing"),
        ("console", "$ meshrl config grpo --only algorithm.adv_estimator\n  adv_estimator: gae"),
        ("yaml", "data: {no_such_key: 1}"),
        ("json", "{1}"),
        ("text", "meshrl train grpo"),
    ],
)
def test_a_wrong_block_is_seen(page_runner, language, text):
    with pytest.raises((AssertionError, ValueError, NameError)):
        getattr(page_runner, f"run_{language}")(text)


def test_every_page_has_its_place_in_the_site():
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = set(re.findall(r"[\w/]+\.md", str(nav)))
    pages = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert listed == pages


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"`{3}.*?`{3}", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        assert not target.startswith("http") or "github.com/meshrl" not in target
        if not target.startswith(("http", "#")):
            path, _, anchor = target.partition("#")
            file = page.parent / path
            assert file.exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.+)$", file.read_text(), re.M)
                assert anchor in {re.sub(r"[^\w -]", "", h).lower().strip().replace(" ", "-") for h in headings}, target


def test_commands_are_cut_right():
    assert commands_of("a \\\n    b # c\n# d\n\ne") == ["a b # c", "e"]

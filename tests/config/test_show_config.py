"""A printed config reads back as the same config, and says where values came from."""

from pathlib import Path

import pytest

from meshrl.config import ConfigError, PPOConfig, load_config, quick_yaml
from meshrl.config.keys import leaves
from meshrl.config.load import ROOTS
from meshrl.config.reference import DOCS, PAGES, reference
from meshrl.config.show import as_recipe, to_yaml

ODD_VALUES = [
    "trainer.experiment_name='null'",
    "trainer.project_name='a: b # c'",
    "data.train_files=['x y.parquet','1e-3','été.jsonl']",
    "actor_rollout_ref.actor.optim.lr=3.3e-7",
    "actor_rollout_ref.model.override_config={rope: {theta: 1e6}, tie: true, name: 'no'}",
    "trainer.total_training_steps=12",
    "trainer.default_local_dir=runs/\\${x}",
    "data.val_files=['\\${a}', 'b\\\\\\${c}\\${']",
    "actor_rollout_ref.model.override_config.text='\\${d}'",
]


@pytest.mark.parametrize("with_sources", [True, False])
def test_printed_config_reads_back(tmp_path: Path, with_sources: bool) -> None:
    loaded = load_config("grpo", ODD_VALUES)
    assert loaded.config.data.val_files == ["${a}", "b\\${c}${"]
    text = to_yaml(loaded.config, loaded.sources if with_sources else None, docs=with_sources)
    (tmp_path / "again.yaml").write_text(text)
    assert load_config(tmp_path / "again.yaml").config == loaded.config
    assert load_config(tmp_path / "again.yaml", ["trainer.seed=4"]).config != loaded.config


@pytest.mark.parametrize("root", ROOTS.values())
def test_the_text_holds_the_recipe(root: type) -> None:
    config = load_config("grpo", ODD_VALUES).config if root is PPOConfig else root()
    assert as_recipe(config) == quick_yaml.parsed(to_yaml(config))


def test_a_printed_config_still_follows(tmp_path: Path) -> None:
    loaded = load_config("grpo", ["actor_rollout_ref.actor.clip_ratio=0.3"])
    (tmp_path / "again.yaml").write_text(to_yaml(loaded.config))
    again = load_config(tmp_path / "again.yaml", ["actor_rollout_ref.actor.clip_ratio=0.5"]).config
    assert again.actor_rollout_ref.actor.clip_ratio_high == 0.5


def test_lines_say_where_values_came_from() -> None:
    loaded = load_config("grpo", ["trainer.seed=3"])
    lines = to_yaml(loaded.config, loaded.sources).splitlines()
    assert "  seed: 3  # from command line" in lines
    assert "  seed: null  # 3, follows trainer.seed" in lines
    assert "  max_prompt_length: 512  # default" in lines
    assert any(line.startswith("    n: 8  # from grpo.yaml:") for line in lines)


def test_only_a_part_and_documentation() -> None:
    text = to_yaml(PPOConfig(), only="trainer.deadlines", docs=True)
    assert text == (
        "trainer:\n  deadlines:\n"
        "    # Seconds the workers may take to start.\n    start: 600.0\n"
        "    # Seconds one call to the workers may take.\n    call: 7200.0\n"
        "    # Seconds a collective between workers may take.\n    collective: 600.0\n"
        "    # Seconds after SIGTERM within which the step is finished and saved.\n    stop: 60.0\n"
    )
    assert to_yaml(PPOConfig(), only="trainer.seed") == "trainer:\n  seed: 1\n"
    with pytest.raises(ConfigError, match=r"did you mean trainer.deadlines\?"):
        to_yaml(PPOConfig(), only="trainer.deadline")


def test_generated_pages_are_current() -> None:
    for name, page in PAGES.items():
        assert (DOCS / name).read_text(encoding="utf-8") == page(), "run: python -m meshrl.config.reference"


def test_reference_has_every_key() -> None:
    text = reference()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == sum(len(leaves(root)) for root in ROOTS.values())
    assert all(row.replace("\\|", "").count("|") == 5 for row in rows)

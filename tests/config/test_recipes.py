"""The shipped recipes load, fit their cluster and the published shape of their model; a wrong size is found."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from meshrl.config import BatchUnits, PPOConfig, PreferenceConfig, SFTConfig, check_config, load_config, unsupported
from meshrl.config.model_folder import written_stages
from meshrl.config.recipe import SHIPPED, shipped_recipes

ACTOR = "actor_rollout_ref.actor"

# name: GPUs, data-parallel size, rollout replicas, published layers and heads, an override that cannot divide
TEMPLATES = {
    "grpo": (8, 8, 8, 12, 12, f"{ACTOR}.fsdp_config.fsdp_size=3"),
    "qwen2_7b_fsdp_8gpu": (8, 2, 4, 28, 28, f"{ACTOR}.ulysses_sequence_parallel_size=3"),
    "qwen2_7b_megatron_8gpu": (8, 2, 4, 28, 28, f"{ACTOR}.megatron.tensor_model_parallel_size=3"),
    "qwen2_32b_megatron_32gpu": (32, 2, 8, 64, 40, f"{ACTOR}.megatron.pipeline_model_parallel_size=6"),
    "llama_70b_megatron_32gpu": (32, 4, 8, 80, 64, "actor_rollout_ref.rollout.tensor_model_parallel_size=3"),
    "qwen2_72b_megatron_64gpu": (64, 2, 8, 80, 64, f"{ACTOR}.megatron.context_parallel_size=3"),
    "deepseek_671b_megatron_128gpu": (128, 2, 4, 61, 128, "trainer.nnodes=15"),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_fits_its_cluster(name: str) -> None:
    gpus, dp, replicas, _, _, _ = TEMPLATES[name]
    config = load_config(name).config
    assert check_config(config, check_files=False) == []
    rollout = config.actor_rollout_ref.rollout
    assert config.trainer.world_size == gpus
    assert BatchUnits.from_config(config).dp_size == dp
    assert gpus // rollout.tensor_model_parallel_size == replicas


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_with_a_size_that_does_not_divide(name: str) -> None:
    problems = check_config(load_config(name, [TEMPLATES[name][-1]]).config, check_files=False)
    assert problems
    assert all("must be divisible by" in problem for problem in problems)


@pytest.mark.parametrize("name", TEMPLATES)
def test_template_fits_its_model(name: str, make_model: Callable[..., Path], tmp_path: Path) -> None:
    _, _, _, layers, heads, _ = TEMPLATES[name]
    (tmp_path / "train.jsonl").write_text('{"prompt": "6 * 7"}\n' * 1024)
    overrides = [f"data.train_files={tmp_path}/train.jsonl", "reward.name=exact_match"]
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 32768}
    overrides.append(f"actor_rollout_ref.model.path={make_model(**shape)}")
    config = load_config(name, overrides).config
    assert check_config(config) == []
    if config.actor_rollout_ref.actor.strategy == "megatron":
        make_model(**{**shape, "num_hidden_layers": layers + 1})
        assert len(check_config(config)) == 1


@pytest.mark.parametrize("name", ["qwen2_72b_megatron_64gpu", "deepseek_671b_megatron_128gpu"])
def test_written_out_pipelines_are_balanced(name: str) -> None:
    megatron = load_config(name).config.actor_rollout_ref.actor.megatron
    chunks = written_stages(megatron.override_transformer_config["pipeline_model_parallel_layout"])
    pp = megatron.pipeline_model_parallel_size
    layers = [sum(chunk.count("t") for chunk in chunks[stage::pp]) for stage in range(pp)]
    assert sum(layers) == TEMPLATES[name][3]
    assert max(layers) - min(layers) <= 1
    assert chunks[0].startswith("E")
    assert chunks[-1].endswith("L")


def test_every_recipe_opens_with_a_comment_that_says_what_it_is() -> None:
    assert set(TEMPLATES) <= set(shipped_recipes())
    for name in shipped_recipes():
        assert (SHIPPED / f"{name}.yaml").read_text().startswith("# "), name


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_loads_and_is_supported(name: str) -> None:
    roots = dict.fromkeys(("dpo", "kto", "reward_model"), PreferenceConfig)
    config = load_config(name, root=roots.get(name, SFTConfig if "sft" in name else PPOConfig)).config
    assert check_config(config, check_files=False) == []
    assert unsupported(config) == []


def test_the_recipe_in_the_docs_is_fine(tmp_path: Path) -> None:
    docs = Path(__file__).parents[2] / "docs" / "config.md"
    (example,) = re.findall(r"```yaml\n(.*?)```", docs.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "my_grpo.yaml").write_text(example, encoding="utf-8")
    config = load_config(tmp_path / "my_grpo.yaml").config
    assert check_config(config, check_files=False) == []
    assert unsupported(config) == []
    assert config.trainer.experiment_name == "8-samples"

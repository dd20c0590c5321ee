"""Every causal language family of the installed Transformers: computed as Transformers does, or refused by its name.

A family goes through generation (what `generate`, `serve` and the judge open), the rollout beside a trainer, training
on packed and on padded samples, and the dry run. What the dry run lets pass agrees with each sample's own forward by
Transformers to 1e-5; everything else it refuses, with the family's name and the reason. There is no third outcome.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from tiny_families import UNBUILT, VOCABULARY, families, tiny_config, tiny_model
from torch import Tensor
from transformers import AutoModelForTokenClassification, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES

from meshrl.config import PPOConfig, load_config, validate_training
from meshrl.config.engine import EngineConfig, MixedPrecisionConfig, ModelConfig, OptimConfig
from meshrl.config.families import FAMILIES, SEEING, gpu_problem
from meshrl.config.rollout import RolloutConfig
from meshrl.config.validate import check_config
from meshrl.data.batch import DataProto
from meshrl.engines.fsdp.fsdp_engine import FSDPEngine
from meshrl.models.loading import VALUE_HEAD, named_weights
from meshrl.models.saving import save_hf_folder
from meshrl.models.tiny import char_tokenizer
from meshrl.rollout.base import Rollout
from meshrl.rollout.build import EngineOptions, build_rollout, open_rollout
from meshrl.rollout.embedded.capacity import attending_layers, cache_shape
from meshrl.rollout.requests import SamplingParams

pytestmark = pytest.mark.slow  # not part of `make test-quick`

# Longer than the windows and chunks of the tiny models, unequal, and of few tokens a step.
PROMPTS, RESPONSES = [5, 3, 9, 2], [6, 9, 4, 10]
TOKENS_OF_A_STEP = 8
# The family, and what makes it another one than its defaults.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("granitemoehybrid", {"layer_types": ["attention", "attention"]}),
    ("gpt_bigcode", {"multi_query": False}),
    ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "layer_types": None}),
    ("lfm2", {"layer_types": ["full_attention", "full_attention"], "num_hidden_layers": 2}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    ("mistral", {"sliding_window": None}),
    ("gpt2", {"attn_pdrop": 0.1}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": False, "use_qkv_bias": True}),
    ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 2.0], "long_factor": [2.0, 3.0],
        "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5}}),
]  # fmt: skip
CASES = [*((family, {}) for family in families() if family not in UNBUILT), *VARIANTS]
NAMES = [f"{family}-{'-'.join(fields)}".rstrip("-") for family, fields in CASES]


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """A process group of one rank, and quick products of tiny matrices."""
    if dist.is_initialized():  # by the tests of another file in this process
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    was, torch.backends.mkldnn.enabled = torch.backends.mkldnn.enabled, False
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity_warning()
    torch.backends.mkldnn.enabled = was
    dist.destroy_process_group()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """Makes a tiny model by Transformers' own attention, and its folder."""

    def make(config: PretrainedConfig) -> tuple[PreTrainedModel, Path]:
        model = tiny_model(config, "eager")
        save_hf_folder(tmp_path / "model", named_weights(model).items(), model)
        config.save_pretrained(tmp_path / "model")  # some models are of a part of it
        char_tokenizer("".join(chr(ord("0") + i) for i in range(VOCABULARY - 2))).save_pretrained(tmp_path / "model")
        return model, tmp_path / "model"

    return make


@pytest.fixture
def dry_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """The lines of a dry run on a folder."""
    monkeypatch.setattr(validate_training, "is_installed", lambda package: True)
    (tmp_path / "train.jsonl").write_text('{"prompt": "6 * 7"}\n' * 64)

    def check(folder: Path, *overrides: str) -> list[str]:
        settings = [
            f"data.train_files={tmp_path / 'train.jsonl'}",
            f"actor_rollout_ref.model.path={folder}",
            "reward.name=exact_match",
            "data.max_prompt_length=10",
            "data.max_response_length=10",
            "data.train_batch_size=16",
            "actor_rollout_ref.actor.ppo_mini_batch_size=16",
            *overrides,
        ]
        config: PPOConfig = load_config("grpo", settings).config
        return check_config(config)

    return check


def samples() -> DataProto:
    """Random samples with prompts padded on the left and responses on the right, and the prompts' seeds."""
    generator = torch.Generator().manual_seed(3)
    width = max(PROMPTS)
    ids = torch.zeros(len(PROMPTS), width + max(RESPONSES), dtype=torch.long)
    mask, responses = torch.zeros_like(ids), torch.zeros(len(PROMPTS), max(RESPONSES), dtype=torch.long)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        ids[row, width - prompt : width + response] = torch.randint(
            3, VOCABULARY, (prompt + response,), generator=generator
        )
        mask[row, width - prompt : width + response], responses[row, :response] = 1, 1
    meta = {"temperature": 1.0, "use_dynamic_bsz": True, "max_token_len": 1000, "calculate_entropy": True}
    tensors = {"input_ids": ids, "attention_mask": mask, "response_mask": responses}
    return DataProto.from_dict(tensors, meta_info=meta)


@torch.no_grad()
def each_alone(model: PreTrainedModel, data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the responses, by Transformers' own forward over each sample without padding."""
    log_probs = torch.zeros(data["response_mask"].shape)
    entropies = torch.zeros_like(log_probs)
    for row, count in enumerate(data["response_mask"].sum(1).tolist()):
        tokens = data["input_ids"][row][data["attention_mask"][row].bool()]
        log_p = model(input_ids=tokens[None], use_cache=False).logits[0].log_softmax(-1)[-count - 1 : -1]
        log_probs[row, :count] = log_p.gather(-1, tokens[-count:, None])[:, 0]
        entropies[row, :count] = -(log_p.exp() * log_p).sum(-1)
    return log_probs, entropies


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def trained(folder: Path, packs: bool) -> FSDPEngine:
    """A training engine in this process."""
    model = ModelConfig(path=str(folder), use_remove_padding=packs)
    config = EngineConfig()
    config.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32")
    engine = FSDPEngine(model, config, OptimConfig(), device=torch.device("cpu"), total_steps=1)
    engine.initialize()
    return engine


def check_training(engine: FSDPEngine, reference: PreTrainedModel) -> None:
    """The engine's log-probs and entropies, and that it trains with the same numbers."""
    data = samples()
    wanted = each_alone(reference, dict(data.batch.items()))
    found = engine.forward(data)
    close(found["log_probs"], wanted[0])
    close(found["entropys"], wanted[1])

    if reference.config.to_dict().get("attn_pdrop"):
        return

    def loss(outputs: dict[str, Tensor], _: DataProto) -> tuple[Tensor, dict[str, Tensor]]:
        value = outputs["log_probs"].sum()
        return value, {"sum": value.detach()}

    with torch.enable_grad():
        metrics = engine.forward_backward_batch(data, loss).metrics
    assert metrics["sum"] == pytest.approx(float(wanted[0].sum()), rel=1e-5)


def check_rollout(rollout: Rollout, reference: PreTrainedModel) -> None:
    """The log-probs that come with sampled answers, of which two share each prompt."""
    data, width = samples(), max(PROMPTS)
    prompts = {name: data.batch[name][:, :width].repeat_interleave(2, 0) for name in ("input_ids", "attention_mask")}
    seeds = torch.arange(2 * len(PROMPTS))
    out = rollout.generate_sequences(
        DataProto.from_dict(prompts | {"seeds": seeds}), SamplingParams(max_tokens=10, stop_token_ids=(1, 7, 20))
    )
    answers = dict(out.batch.items())
    close(answers["rollout_log_probs"], each_alone(reference, answers)[0])


def check_generation(folder: Path, reference: PreTrainedModel) -> None:
    """What `generate`, `serve` and the judge open."""
    opened = open_rollout(folder, EngineOptions(device="cpu", max_num_batched_tokens=TOKENS_OF_A_STEP))
    check_rollout(opened.rollout, reference)
    assert has_place_on_gpu(opened.rollout) == (gpu_problem(json.loads((folder / "config.json").read_text())) is None)
    opened.rollout.close()


def has_place_on_gpu(rollout: Any) -> bool:
    """Whether a cache that is laid out before the first token has the shape of the keys and values that came."""
    _, *planned = cache_shape(rollout.hf_model, None)
    stores = rollout.runner.cache.stores
    found = [[keys.shape[1], keys.shape[3], values.shape[3]] for keys, values in stores.values()]
    assert sorted(stores) == attending_layers(rollout.hf_model)
    return all(one == planned for one in found) and planned[1] == planned[2]


def beside(engine: FSDPEngine, folder: Path) -> Rollout:
    """The rollout of a trainer in this process, with its weights."""
    config = RolloutConfig(dtype="float32", max_num_batched_tokens=TOKENS_OF_A_STEP)
    tokenizer = char_tokenizer("0123456789")
    rollout = build_rollout(
        config, engine.model_config, engine.hf_model, tokenizer, device=torch.device("cpu"), can_share=True
    )
    rollout.update_weights(engine.per_tensor_params(), 1)
    return rollout


NAMED = (
    "use_remove_padding",
    "rollout.name",
    "override_config",
    "over 16 tokens",
    "another family",
    "checkpointing=false",
)


def refusals(problems: list[str], family: str) -> list[str]:
    """The lines of a dry run, all of which name the family or the field, and what to change."""
    for problem in problems:
        assert any(word in problem for word in NAMED), problem
        assert f" {family} model" in problem or "the model has " in problem or "of the model's rotary" in problem, (
            problem
        )
    return problems


PADDED = ("actor_rollout_ref.model.use_remove_padding=false",)


@pytest.mark.parametrize(("family", "fields"), CASES, ids=NAMES)
def test_a_family_is_computed_or_refused(
    family: str, fields: dict[str, Any], write: Callable[..., Any], dry_run: Callable[..., list[str]]
) -> None:
    reference, folder = write(tiny_config(family, **fields))
    packed = refusals(dry_run(folder, "actor_rollout_ref.rollout.name=vllm"), family)
    padded = refusals(dry_run(folder, "actor_rollout_ref.rollout.name=vllm", *PADDED), family)
    whole = refusals(dry_run(folder), family)
    generates = not any("rollout.name=embedded" in problem for problem in whole)
    if generates:
        check_generation(folder, reference)
    else:
        with pytest.raises(ValueError, match=f"cannot generate with a {family} model"):
            open_rollout(folder, EngineOptions(device="cpu"))
    for problems, packs in ((packed, True), (padded, False)):
        if not problems:
            engine = trained(folder, packs)
            check_training(engine, reference)
            if not dry_run(folder, *(() if packs else PADDED)):
                check_rollout(beside(engine, folder), reference)
        elif all("family" in problem or "use_remove_padding" in problem for problem in problems):
            with pytest.raises(ValueError, match=f"samples of a {family} model cannot"):
                trained(folder, packs)


@pytest.mark.parametrize("family", UNBUILT)
def test_what_cannot_be_built_tiny_is_refused(
    family: str, tmp_path: Path, write: Callable[..., Any], dry_run: Callable[..., list[str]]
) -> None:
    _, folder = write(tiny_config("llama"))
    shape = json.loads((folder / "config.json").read_text()) | {"model_type": family}
    (folder / "config.json").write_text(json.dumps(shape))
    for overrides in ((), PADDED):
        problems = refusals(dry_run(folder, *overrides), family)
        assert any("take a model of another family" in problem for problem in problems)
        assert any("rollout.name=embedded cannot generate" in problem for problem in problems)


def test_an_unknown_family_is_refused(write: Callable[..., Any], dry_run: Callable[..., list[str]]) -> None:
    _, folder = write(tiny_config("llama"))
    shape = json.loads((folder / "config.json").read_text()) | {"model_type": "newest"}
    (folder / "config.json").write_text(json.dumps(shape))
    packing, generating = dry_run(folder)
    assert "samples of a newest model cannot share a row (its model_type has no row in meshrl's table" in packing
    assert "rollout.name=embedded cannot generate with a newest model" in generating


REFUSED = [
    ("gemma2", {}, "it soft-caps attention scores"),
    ("gpt_oss", {}, "its attention has sinks"),
    ("llama4", {}, "its layers attend within chunks"),
    ("llama4_text", {}, "its layers attend within chunks"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "carry a state"),
    ("granitemoehybrid", {"layer_types": ["mamba", "attention"]}, "layers of the kind mamba"),
    ("qwen3", {"layer_types": ["chunked_attention", "full_attention"]}, "layers of the kind chunked_attention"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "in both directions (use_bidirectional_attention)"),
    ("diffllama", {}, "rollout.name=embedded cannot generate with a diffllama model (its layers attend twice"),
    ("gpt2", {}, "attn_pdrop=0.1, which samples that share a row are not trained with"),
    ("jetmoe", {}, "enable_gradient_checkpointing=false"),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 16}},
        "is over 16 tokens",
    ),
]


@pytest.mark.parametrize(("family", "fields", "words"), REFUSED, ids=[family for family, _, _ in REFUSED])
def test_config_json_is_enough(
    family: str, fields: dict[str, Any], words: str, write: Callable[..., Any], dry_run: Callable[..., list[str]]
) -> None:
    _, folder = write(tiny_config("llama"))
    shape = json.loads((folder / "config.json").read_text()) | {"model_type": family} | fields
    (folder / "config.json").write_text(json.dumps(shape))
    assert any(words in problem for problem in dry_run(folder))


def test_a_cache_on_a_gpu(write: Callable[..., Any], dry_run: Callable[..., list[str]]) -> None:
    """Keys and values of unequal size have a place on a CPU only; the dry run knows it where the device is named."""
    _, folder = write(tiny_config("deepseek_v3"))
    assert dry_run(folder, "trainer.device=cpu") == []
    (problem,) = dry_run(folder, "trainer.device=cuda")
    assert "cannot generate with a deepseek_v3 model on a GPU (its keys have 12 numbers and its values 8" in problem
    assert dry_run(folder, "trainer.device=cuda", "actor_rollout_ref.rollout.name=vllm") == []


def test_the_judge_is_asked_too(tmp_path: Path, write: Callable[..., Any], dry_run: Callable[..., list[str]]) -> None:
    _, folder = write(tiny_config("llama"))
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "config.json").write_text('{"model_type": "gpt_oss"}')
    problems = dry_run(folder, "reward.name=judge", f"reward.judge.path={tmp_path / 'judge'}")
    assert any("reward.judge.engine=embedded cannot generate with a gpt_oss model" in problem for problem in problems)


def test_a_library_may_add_a_family(
    tmp_path: Path, write: Callable[..., Any], dry_run: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = write(tiny_config("llama"))
    shape = json.loads((folder / "config.json").read_text()) | {"model_type": "newest"}
    (folder / "config.json").write_text(json.dumps(shape))
    monkeypatch.delitem(FAMILIES, "newest", raising=False)
    library = tmp_path / "newest_family.py"
    library.write_text("from meshrl.config.families import FAMILIES, Family\nFAMILIES['newest'] = Family()\n")
    assert dry_run(folder, f"actor_rollout_ref.model.external_lib={library}") == []
    del FAMILIES["newest"]


def test_the_table_is_that_of_the_installed_transformers() -> None:
    """A new version's families need rows; most of them can be built here."""
    assert sorted(FAMILIES) == sorted({*families(), *SEEING})
    assert len(families()) - len(UNBUILT) >= 150
    computed = [family for family, row in FAMILIES.items() if not row.reasons]
    assert {"cohere", "cohere2", "granite", "stablelm", "nemotron", "minicpm3", "gemma3"} <= set(computed)
    assert len(computed) >= 45
    assert set(UNBUILT) <= {family for family, row in FAMILIES.items() if row.packed and row.padded}


def test_the_rows_know_who_scores() -> None:
    """A critic or reward model needs a head with this name."""
    for family, row in FAMILIES.items():
        if family not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES or family in (*UNBUILT, "qwen3_5"):
            assert not row.scores, family
            continue
        with torch.device("meta"):
            model = AutoModelForTokenClassification.from_config(tiny_config(family))
        assert row.scores == hasattr(model, VALUE_HEAD), family


# A row without what it says, and a weight that moved: the comparison has to notice.
SPOILT: dict[str, dict[str, Any]] = {
    "granite": {"divided_by": ("", 1.0)},
    "cohere2": {"multiplied_by": ("", 1.0)},
    "minicpm3": {"divided_by": ("", 1.0)},
    "gemma3_text": {"capped_by": ("", None)},
    "phimoe": {"window_in_mask": False},
    "gemma2": {"attention": "sdpa"},
    "bert": {"padded": ""},
}


@pytest.mark.parametrize("family", [*SPOILT, "llama"])
def test_the_comparison_notices(family: str, write: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    reference, folder = write(tiny_config(family))
    if family == "llama":
        with torch.no_grad():
            reference.model.layers[0].self_attn.v_proj.weight[0] += 1e-2
    else:
        monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], **SPOILT[family]))
    row, differ = FAMILIES[family], pytest.raises(AssertionError, match="not close")
    if not (row.packed and row.padded):
        with differ:
            check_training(trained(folder, packs=not row.packed), reference)
    if "rollout" not in row.reasons:
        with differ:
            check_generation(folder, reference)

"""The embedded rollout cut over ranks gives the tokens and log-probs of one process."""

import pytest
import torch
import torch.distributed as dist
from process_group import ON_GPU, own_device

from meshrl.models.loading import named_weights
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import Request, SamplingParams

SHAPE = {
    "vocab_size": 41,  # not divisible by the ranks
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16 if ON_GPU else 8,  # from 16 on a step is a recorded graph
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
}


def model_of(name: str, fields: dict, seed: int = 7):
    import transformers

    import meshrl.parallel.attention

    config = getattr(transformers, name)(**(SHAPE | fields))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        attention = meshrl.parallel.attention.ATTENTION_NAME
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=attention
        ).eval()


def generated(
    name: str, fields: dict, alone: bool, spreads: bool = False
) -> tuple[list[list[int]], list[list[float]], int]:
    """Answers before and after an update in the middle, and how many numbers this rank's layers hold."""
    group = None if alone else dist.group.WORLD
    rollout = EmbeddedRollout(
        model_of(name, fields).to(own_device()),
        pad_token_id=0,
        num_blocks=30,
        block_size=16 if ON_GPU else 4,
        rank_group=group,
        spreads_experts=spreads,
    )
    rollout.update_weights(named_weights(model_of(name, fields)).items(), 0)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 41, (n,), generator=generator).tolist() for n in (5, 1, 17, 9, 3)]
    requests = [Request(f"r{i}", tuple(p), SamplingParams(15, n=2), i) for i, p in enumerate(prompts)]
    answers = rollout.complete(requests)
    rollout.update_weights(named_weights(model_of(name, fields, seed=8)).items(), 1)
    answers += rollout.complete(requests)
    size = sum(p.numel() for p in rollout.hf_model.model.layers.parameters())
    return [a.token_ids for a in answers], [a.log_probs for a in answers], size


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Qwen3Config", {"tie_word_embeddings": True}),
        ("LlamaConfig", {"tie_word_embeddings": False}),
        ("Qwen2Config", {"num_key_value_heads": 1}),  # fewer key heads than ranks
        ("MistralConfig", {"sliding_window": 4}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_two_ranks_give_what_one_gives(ranks, name, fields):
    compare(ranks, name, fields)


MIXTURES = [
    ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}),
    ("MixtralConfig", {"num_local_experts": 6, "num_experts_per_tok": 3}),
    (
        "DeepseekV3Config",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1}
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 12, "kv_lora_rank": 8}
        | {
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16 if ON_GPU else 8,
            "num_key_value_heads": 4,
            "head_dim": 8,
        },
    ),
]


@pytest.mark.parametrize(("name", "fields"), MIXTURES, ids=lambda x: x if isinstance(x, str) else "")
def test_two_ranks_with_half_of_the_experts_each_give_what_one_gives(ranks, name, fields):
    compare(ranks, name, fields, True)


def seen_and_generated(
    folder: str, images: list[bytes], alone: bool, spreads: bool = False
) -> tuple[list[list[int]], list[list[float]], int]:
    """The same of a model that sees; every prompt has none to two images, and the second round's tower is another."""
    from meshrl.config.engine import ModelConfig
    from meshrl.models.loading import load_model
    from meshrl.models.vision import find_sight, language_model
    from meshrl.parallel.attention import ATTENTION_NAME

    model = load_model(folder, ATTENTION_NAME).to(own_device())
    sight = find_sight(model.config, ModelConfig(path=folder))
    rollout = EmbeddedRollout(
        model, pad_token_id=0, num_blocks=40, block_size=16 if ON_GPU else 4, sight=sight, spreads_experts=spreads,
        rank_group=None if alone else dist.group.WORLD,
    )  # fmt: skip
    requests = []
    for number, shown in enumerate([(), images[:1], images[:2], images[1:3], images[2:]]):
        ids = [5 + number]
        for one in shown:
            ids += [11, *[sight.image_token] * sight.reader.num_tokens(one), 12]
        requests.append(Request(f"r{number}", (*ids, 7, 8), SamplingParams(10, n=2), number, tuple(shown)))
    answers = []
    for version, factor in enumerate((1.0, 1.5)):
        weights = named_weights(load_model(folder, ATTENTION_NAME))
        changed = ((n, w.detach() * factor if "visual" in n else w) for n, w in weights.items())
        rollout.update_weights(changed, version)
        answers += rollout.complete(requests)
    size = sum(p.numel() for p in language_model(rollout.hf_model).layers.parameters())
    return [a.token_ids for a in answers], [a.log_probs for a in answers], size


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl_moe"])
def test_two_ranks_see_what_one_sees(ranks, seeing_folder, image, family):
    given = str(seeing_folder(family)), [image(16, 24, 1), image(8, 8, 2), image(24, 8, 3)]
    compared(ranks, seen_and_generated, *given, spreads=[True] if family.endswith("moe") else [])


def compare(ranks, name, fields, *spreads):
    compared(ranks, generated, name, fields, spreads=spreads)


def compared(ranks, generating, *given, spreads):
    ((tokens, log_probs, size),) = ranks(1).run(generating, *given, True)
    assert len({tuple(answer) for answer in tokens}) > len(tokens) // 2
    for found_tokens, found_log_probs, found_size in ranks(2).run(generating, *given, False, *spreads):
        assert found_tokens == tokens
        for mine, wanted in zip(found_log_probs, log_probs, strict=True):
            assert mine == pytest.approx(wanted, abs=2e-5)
        assert found_size < 0.75 * size


def refused(fields: dict, name: str = "Qwen3Config", spreads: bool = False) -> str:
    try:
        EmbeddedRollout(model_of(name, fields), pad_token_id=0, rank_group=dist.group.WORLD, spreads_experts=spreads)
    except ValueError as error:
        return str(error)
    return ""


def test_shapes_that_cannot_be_cut_are_refused(ranks):
    assert all("attention heads (3)" in m for m in ranks(2).run(refused, {"num_attention_heads": 3}))
    assert all("inner width (49)" in m for m in ranks(2).run(refused, {"intermediate_size": 49}))
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert all("cannot be split" in m for m in ranks(2).run(refused, moe, "Qwen3MoeConfig"))


def test_experts_that_cannot_be_spread_are_refused(ranks):
    assert all("no experts that can be spread over 2" in m for m in ranks(2).run(refused, {}, "Qwen3Config", True))
    odd = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    assert all("5 experts must be divisible" in m for m in ranks(2).run(refused, odd, "Qwen3MoeConfig", True))

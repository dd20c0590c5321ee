"""A trainer's weights in rollouts that are cut over its ranks: the tokens and log-probs are those of one process."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from process_group import own_device
from sync_trials import fsdp_engine, multiply
from test_pool_sync import both, factor, join, meet, train_fsdp
from test_rollout_tensor_parallel import model_of

from meshrl.data.batch import DataProto
from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
from meshrl.rollout.requests import SamplingParams

LENGTH = 5
SAMPLING = SamplingParams(max_tokens=LENGTH, temperature=0.8)
VERSIONS = (1, 2)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
CASES = {
    "tied": ("Qwen3Config", {"tie_word_embeddings": True}, 2, 2, {}),
    "biases, two rollouts": (
        "LlamaConfig",
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        4,
        2,
        {},
    ),
    "one key head on two ranks each": ("Qwen2Config", {"num_key_value_heads": 2}, 4, 4, {"fsdp_size": 2}),
    "experts spread over two rollouts": ("Qwen3MoeConfig", EXPERTS, 4, 2, {"spreads": True}),
    "adapters": ("Qwen3Config", {"tie_word_embeddings": True, "num_key_value_heads": 1}, 2, 2, {"lora_rank": 4}),
    "adapters, shared sequences": (
        "Qwen3Config",
        {"tie_word_embeddings": True},
        2,
        2,
        {"lora_rank": 4, "ulysses_sequence_parallel_size": 2},
    ),
}


def prompts_of(number: int) -> DataProto:
    """Different prompts for every rollout, of unequal lengths, some asked twice, more than run at once."""
    generator = torch.Generator().manual_seed(number)
    ids, mask = torch.randint(2, 41, (5, 11), generator=generator), torch.ones(5, 11, dtype=torch.long)
    for row, padding in enumerate((0, 3, 3, 10, 7)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    ids[2] = ids[1]
    return DataProto.from_dict({"input_ids": ids, "attention_mask": mask, "seeds": torch.arange(5) + 100 * number})


def trained_and_generated(folder: Path, tp: int, options: dict):
    """For each version: what this rank's rollout answered and the trainer's whole weights; and this rank's share."""
    from meshrl.config.engine import ModelConfig
    from meshrl.config.rollout import RolloutConfig
    from meshrl.parallel.mesh import contiguous_group
    from meshrl.rollout.base import TAGS
    from meshrl.rollout.build import build_rollout
    from meshrl.weights.colocated import policy_sync

    spread = tp if options.pop("spreads", False) else 1
    engine = fsdp_engine(folder, **options)
    with torch.no_grad():
        for name, param in engine.module.named_parameters():
            if ".lora_" in name:
                param.fill_(0.1)  # the second matrix starts at zero
    rollout = build_rollout(
        RolloutConfig(dtype="float32", max_num_seqs=4, response_length=LENGTH, expert_parallel_size=spread),
        ModelConfig(), engine.hf_model,
        SimpleNamespace(pad_token_id=0), device=own_device(), can_share=False,
        rank_group=contiguous_group(tp, 60.0),
    )  # fmt: skip
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=True, delta=False, deadline=60.0, adapters="merged")
    found = []
    for version in VERSIONS:
        multiply(engine, 1.1)
        sync(rollout, version)
        answers = rollout.generate_sequences(prompts_of(dist.get_rank() // tp), SAMPLING)
        whole = {name: tensor.detach().clone() for name, tensor in engine.per_tensor_params()}
        found.append((dict(answers.batch), whole if dist.get_rank() == 0 else None))
        rollout.release(TAGS)
        sync.forget()
        rollout.resume(TAGS)
    return found, sum(p.numel() for p in rollout.hf_model.parameters())


def log_probs_by_hand(model, batch) -> torch.Tensor:
    """Log-probs of the responses, a row at a time, by Hugging Face's own forward."""
    out = torch.zeros_like(batch["rollout_log_probs"])
    for row in range(len(out)):
        kept = batch["attention_mask"][row].bool()
        ids = batch["input_ids"][row][kept][None]
        count = int(batch["response_mask"][row].sum())
        with torch.no_grad():
            scores = (model(ids).logits[0, :-1] / SAMPLING.temperature).log_softmax(-1)
        out[row, :count] = scores.gather(1, ids[0, 1:, None])[-count:, 0]
    return out


@pytest.mark.parametrize("case", CASES)
def test_a_cut_rollout_generates_with_the_trainers_weights(ranks, tmp_path, case):
    from transformers import AutoModelForCausalLM

    name, fields, world, tp, options = CASES[case]
    model = model_of(name, fields)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=torch.Generator().manual_seed(param.numel())) * 0.02)
    model.save_pretrained(tmp_path)
    found = ranks(world).run(trained_and_generated, tmp_path, tp, options)
    size = sum(p.numel() for p in model.parameters())
    assert all(part < (0.65 if tp == 2 else 0.4) * size for _, part in found)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32)
    for at in range(len(VERSIONS)):
        weights = found[0][0][at][1]
        one = EmbeddedRollout(model_of(name, fields), pad_token_id=0)
        one.update_weights(weights.items(), 0)
        reference.load_state_dict(weights, strict=False)
        for rank, (versions, _) in enumerate(found):
            batch = versions[at][0]
            if rank % tp == 0:  # the ranks of a rollout answer alike
                alone = one.generate_sequences(prompts_of(rank // tp), SAMPLING).batch
                expected = log_probs_by_hand(reference, batch)
            assert torch.equal(batch["responses"], alone["responses"])
            assert set(batch["versions"].unique().tolist()) <= {-1, VERSIONS[at]}
            torch.testing.assert_close(batch["rollout_log_probs"], expected, rtol=1e-5, atol=1e-5)
        # The comparison would see one version for the other.
        other = found[0][0][1 - at][0]
        assert (log_probs_by_hand(reference, other) - other["rollout_log_probs"]).abs().max() > 1e-3


def differing(tokens: list[list[int]]) -> str:
    rollout = EmbeddedRollout(model_of("Qwen3Config", {}), pad_token_id=0, num_blocks=4, rank_group=dist.group.WORLD)
    try:
        rollout.parallel.check_in_step(torch.tensor(tokens[dist.get_rank()]))
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_sampled_different_tokens_are_an_error_on_all(ranks):
    assert ranks(2).run(differing, [[5, 6, 7], [5, 6, 7]]) == ["", ""]
    assert all("different tokens" in text for text in ranks(2).run(differing, [[5, 6, 7], [5, 7, 6]]))


def taken_and_generated(folder: Path, address: str, trainers: int) -> tuple[list[dict], list[int], int]:
    """A rollout with spread experts in a pool of its own: answers of each version, bytes that came, bytes it keeps."""
    from meshrl.models.loading import empty_model
    from meshrl.parallel.attention import ATTENTION_NAME
    from meshrl.weights.disaggregated import connect_rollout

    rank, size = dist.get_rank(), dist.get_world_size()
    rollout = EmbeddedRollout(
        empty_model(folder, ATTENTION_NAME, dtype=torch.float32), pad_token_id=0, max_num_seqs=4, num_blocks=40,
        rank_group=dist.group.WORLD, spreads_experts=True, device=own_device(),
    )  # fmt: skip
    sync = connect_rollout(rollout, join(address, trainers + rank, trainers + size), trainers)
    found, received = [], []
    for version in VERSIONS:
        received.append(sync(rollout, version).traffic.received)
        found.append(dict(rollout.generate_sequences(prompts_of(0), SAMPLING).batch))
    sync.close()
    return found, received, sum(p.nbytes for p in rollout.hf_model.parameters())


def test_spread_experts_in_a_pool_of_their_own(ranks, pool_ranks, tmp_path):
    model, point = model_of("Qwen3MoeConfig", EXPERTS), meet()
    model.save_pretrained(tmp_path)
    _, found = both(
        (ranks(2), train_fsdp, tmp_path, point.address, 2, VERSIONS, {}, {}),
        (pool_ranks(2), taken_and_generated, tmp_path, point.address, 2),
    )
    for at, version in enumerate(VERSIONS):
        one = EmbeddedRollout(model_of("Qwen3MoeConfig", EXPERTS), pad_token_id=0)
        weights = {name: param.detach() * factor(version) for name, param in model.named_parameters()}
        one.update_weights(weights.items(), 0)
        alone = one.generate_sequences(prompts_of(0), SAMPLING).batch
        for batches, received, kept in found:
            assert torch.equal(batches[at]["responses"], alone["responses"])
            torch.testing.assert_close(
                batches[at]["rollout_log_probs"], alone["rollout_log_probs"], rtol=1e-5, atol=1e-5
            )
            assert received[at] == kept < 0.75 * sum(p.nbytes for p in model.parameters())
    assert (found[0][0][0]["rollout_log_probs"] - found[0][0][1]["rollout_log_probs"]).abs().max() > 1e-3

"""Weights from real sharded engines into rollouts, on real processes: the logits are those of one process, twice."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from process_group import own_device
from sync_trials import (
    BUCKET,
    IDS,
    PlainRollout,
    blank_lm,
    fsdp_engine,
    logits_of,
    multiplied,
    multiply,
    one_process_logits,
)


def fsdp_to_copies(folder: Path, carrier: str, options: dict) -> tuple[list[torch.Tensor], dict]:
    """Each rank's rollout is a whole module."""
    from meshrl.weights import connect as connecting

    connecting.MEGABYTE = BUCKET  # buckets of a few messages for models this small
    engine = fsdp_engine(folder, **options)
    model = blank_lm(folder)
    sync = connecting.connect(
        engine, connecting.rollout_params(model), bucket_megabytes=1, carrier=carrier, deadline=40.0
    )
    rollout, logits = PlainRollout(), []
    for version in (1, 2):
        with multiplied(engine, 1 + 0.1 * version):
            report = sync(rollout, version)
            logits.append(logits_of(model))
    assert rollout.version == 2
    sync.close()
    return logits, report.metrics() | {"hops": len(sync.plan.hops), "missing": sync.plan.missing()[dist.get_rank()]}


CASES = [
    ("qwen2", 4, "shared_memory", {}),
    ("qwen3", 4, "process_group", {"fsdp_size": 2}),
    ("qwen3", 2, "auto", {"ulysses_sequence_parallel_size": 2}),
    ("qwen3_moe", 4, "auto", {"ulysses_sequence_parallel_size": 2, "context_parallel_size": 2}),
    ("qwen2", 4, "auto", {"ulysses_sequence_parallel_size": 4, "fsdp_size": 2}),
    ("qwen2", 2, "auto", {"strategy": "fsdp", "ulysses_sequence_parallel_size": 2}),
    ("qwen3_moe", 2, "process_group", {}),
    ("qwen2", 2, "process_group", {"strategy": "fsdp"}),
    ("qwen3", 4, "shared_memory", {"strategy": "fsdp", "fsdp_size": 2}),
]


@pytest.mark.parametrize(("family", "world", "carrier", "options"), CASES)
def test_fsdp_to_whole_copies(ranks, sync_folders, family, world, carrier, options):
    found = ranks(world).run(fsdp_to_copies, sync_folders[family], carrier, options)
    for version in (1, 2):
        expected = one_process_logits(sync_folders[family], version)
        for logits, metrics in found:
            torch.testing.assert_close(logits[version - 1], expected, rtol=1e-5, atol=1e-5)
            assert metrics["weight_sync/received_bytes"] == metrics["missing"]
    # The comparison would see one version for the other.
    assert (one_process_logits(sync_folders[family], 1) - expected).abs().max() > 1e-2


def sync_to_tp(engine, folder: Path, axes: dict, staged: bool = False) -> list[dict[str, torch.Tensor]]:
    """Two versions into a tensor-parallel rollout's bare parameters, which come back."""
    from transformers import AutoConfig

    from meshrl.engines.megatron.weight_map import hf_tensors
    from meshrl.weights import connect as connecting
    from meshrl.weights.placement import RolloutLayout, local_tensors, rollout

    connecting.MEGABYTE = BUCKET
    hf_config, layout = AutoConfig.from_pretrained(folder), RolloutLayout(**axes)
    shapes = hf_tensors(hf_config)
    params, rank = {}, dist.get_rank()
    if rank < layout.world_size:
        blank = {name: torch.zeros(shape, device=own_device()) for name, shape in shapes.items()}
        params = local_tensors(rollout(shapes, hf_config, layout), rank, blank)
    sync = connecting.connect(
        engine, params, layout=layout, hf_config=hf_config, bucket_megabytes=1, deadline=40.0, staged=staged
    )
    rollout_engine, found = PlainRollout(), []
    for version in (1, 2):
        with multiplied(engine, 1 + 0.1 * version):
            report = sync(rollout_engine, version)
            assert report.traffic.received == sync.plan.missing()[rank]
            found.append({name: tensor.clone() for name, tensor in params.items()})
    sync.close()
    return found


def fsdp_to_tp(folder: Path, options: dict, axes: dict):
    return sync_to_tp(fsdp_engine(folder, **options), folder, axes, staged=axes.get("dp", 1) > 1)


def megatron_to_tp(trial, folder: Path, axes: dict):
    from meshrl.engines.engine_class import engine_class
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    try:
        engine = engine_class(trial.engine)(trial.model, trial.engine, None, device=own_device())
        engine.initialize()
        return sync_to_tp(engine, folder, axes)
    finally:
        leave_parallel_state()


def megatron_to_copies(trial, folder: Path):
    from meshrl.engines.engine_class import engine_class
    from meshrl.engines.megatron.parallel_state import leave_parallel_state
    from meshrl.weights import connect as connecting

    try:
        connecting.MEGABYTE = BUCKET
        engine = engine_class(trial.engine)(trial.model, trial.engine, None, device=own_device())
        engine.initialize()
        model = blank_lm(folder)
        sync = connecting.connect(engine, connecting.rollout_params(model), bucket_megabytes=1, deadline=40.0)
        rollout, logits = PlainRollout(), []
        for version in (1, 2):
            with multiplied(engine, 1 + 0.1 * version):
                sync(rollout, version)
                logits.append(logits_of(model))
        sync.close()
        return logits
    finally:
        leave_parallel_state()


def put_together(folder: Path, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The logits of a whole module, joined by hand from the parameters of tensor-parallel ranks."""
    model = blank_lm(folder)
    tp, kv_heads = len(parts), model.config.num_key_value_heads
    with torch.no_grad():
        for name, param in model.named_parameters():
            held = [part[name] for part in parts]
            if "k_proj" in name or "v_proj" in name:
                held = held[:: max(1, tp // kv_heads)]
            if name.endswith("experts.gate_up_proj"):
                count, height, width = param.shape
                halves = [h.view(count, 2, -1, width) for h in held]
                param.copy_(torch.cat(halves, 2).view(count, height, width))
            elif name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                param.copy_(torch.cat([h.view(*param.shape[:-1], -1) for h in held], -1))
            elif "norm" in name or name.endswith("gate.weight"):
                assert all(torch.equal(h, held[0]) for h in held)
                param.copy_(held[0].view_as(param))
            else:
                param.copy_(torch.cat(held)[: param.numel()].view_as(param))
        return logits_of(model)


def check_logits(folder, found, tp):
    for version in (1, 2):
        expected = one_process_logits(folder, version)
        parts = [versions[version - 1] for versions in found]
        for copy in range(0, len([part for part in parts if part]), tp):
            logits = put_together(folder, parts[copy : copy + tp])
            torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "options", "axes"),
    [
        ("qwen2", {}, {"tp": 2, "dp": 2}),
        ("qwen3", {"fsdp_size": 2}, {"tp": 4}),
        ("qwen3_moe", {}, {"tp": 2}),
        ("qwen2", {"strategy": "fsdp"}, {"tp": 2, "dp": 2}),
        ("qwen3", {"ulysses_sequence_parallel_size": 2}, {"tp": 2, "dp": 2}),
    ],
)
def test_fsdp_to_tensor_parallel(ranks, sync_folders, family, options, axes):
    found = ranks(4).run(fsdp_to_tp, sync_folders[family], options, axes)
    check_logits(sync_folders[family], found, axes["tp"])


@pytest.mark.parametrize(
    ("family", "world", "ours", "theirs"),
    [
        ("qwen2", 4, {"tp": 2, "pp": 2}, {"tp": 2}),
        ("qwen3", 4, {"tp": 2, "pp": 2}, {"tp": 4}),
        ("qwen3_moe", 4, {"ep": 4}, {"tp": 2}),
    ],
)
def test_megatron_to_tensor_parallel(megatron_ranks, sync_folders, family, world, ours, theirs):
    from megatron_trials import megatron_trial

    trial = megatron_trial(sync_folders[family], ours)
    found = megatron_ranks(world).run(megatron_to_tp, trial, sync_folders[family], theirs)
    check_logits(sync_folders[family], found, theirs["tp"])


@pytest.mark.parametrize(("family", "axes"), [("qwen3", {"pp": 2, "vpp": 2}), ("qwen3_moe", {"ep": 2})])
def test_megatron_to_whole_copies(megatron_ranks, make_lm, tmp_path, family, axes):
    from megatron_trials import layers_for, megatron_trial

    make_lm(family, "eager", num_hidden_layers=layers_for(axes)).save_pretrained(tmp_path)
    found = megatron_ranks(2).run(megatron_to_copies, megatron_trial(tmp_path, axes), tmp_path)
    for version in (1, 2):
        expected = one_process_logits(tmp_path, version)
        for logits in found:
            torch.testing.assert_close(logits[version - 1], expected, rtol=1e-5, atol=1e-5)


class CopyingRollout(PlainRollout):
    """Takes weights into a module of its own, and can lose them."""

    def __init__(self, model):
        super().__init__()
        self.hf_model = model

    def update_weights(self, weights, version):
        own = dict(self.hf_model.named_parameters())
        for name, tensor in weights:
            own.pop(name).data.copy_(tensor)
        assert not own
        self.version = version

    def lose(self):
        self.version = -1
        for param in self.hf_model.parameters():
            param.data.zero_()


def lora_to_copies(
    folder: Path, adapters: str, delta: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[int]]:
    """Merged by the sync, and by hand from whole tensors; and the bytes that came."""
    from meshrl.weights.colocated import policy_sync

    engine = fsdp_engine(folder, lora_rank=4)
    model, reference = blank_lm(folder), blank_lm(folder)
    rollout = CopyingRollout(model)
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=True, delta=delta, deadline=40.0, adapters=adapters)
    found, expected, received = [], [], []
    for version in (1, 2, 3):
        with torch.no_grad():
            generator = torch.Generator().manual_seed(version)
            for name, param in engine.module.named_parameters():
                if ".lora_B." in name:
                    whole = torch.randn(param.shape, generator=generator) * 0.1
                    local = param.to_local()
                    start = dist.get_rank() * -(-len(whole) // dist.get_world_size())
                    local.copy_(whole[start : start + len(local)])
            if version == 3:
                rollout.lose()
                sync.forget()
            received.append(sync(rollout, version).traffic.received)
            found.append(logits_of(model))
            whole = {n.removeprefix("hf_model."): p.full_tensor() for n, p in engine.module.named_parameters()}
            for name, param in reference.named_parameters():
                layer, kind = name.rsplit(".", 1)
                param.copy_(whole[name] if name in whole else whole[f"{layer}.base_layer.{kind}"])
                if kind == "weight" and f"{layer}.lora_A.default.weight" in whole:
                    up, down = (whole[f"{layer}.lora_{letter}.default.weight"] for letter in "BA")
                    param.add_(up @ down, alpha=16 / 4)
            expected.append(logits_of(reference))
    return found, expected, received


@pytest.mark.parametrize("adapters", ["merged", "alone"])
def test_adapters_arrive_merged(ranks, sync_folders, adapters):
    pytest.importorskip("peft")
    size = sum(p.numel() * 4 for p in blank_lm(sync_folders["qwen2"]).parameters())
    for found, expected, received in ranks(2).run(lora_to_copies, sync_folders["qwen2"], adapters):
        for logits, reference in zip(found, expected, strict=True):
            torch.testing.assert_close(logits, reference, rtol=1e-5, atol=1e-5)
        assert (found[0] - found[1]).abs().max() > 1e-2
        if adapters == "merged":
            assert received == [received[0]] * 3
        else:
            # The base comes once, also for a rollout that lost it: from then on matrices of rank 4 alone.
            assert received[0] > 0.4 * size
            assert received[1] == received[2] < 0.2 * received[0]
    if adapters == "alone":
        # Of the two matrices one has not changed.
        for found, expected, changed in ranks(2).run(lora_to_copies, sync_folders["qwen2"], adapters, True):
            torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-5)
            assert max(changed[1:]) < 0.8 * received[1]


def adapters_alone(folder: Path) -> tuple[dict, list[dict], dict, list[int]]:
    """What a rollout that takes adapters gets in three syncs, and the bytes of each."""
    from meshrl.weights.lora_sync import connect_adapters

    class Taking(PlainRollout):
        def __init__(self):
            super().__init__()
            self.base, self.adapters, self.bases = {}, [], 0

        def update_weights(self, weights, version):
            self.base = {name: tensor.clone() for name, tensor in weights}
            self.bases += 1

        def update_adapter(self, config, tensors, version):
            assert (config["r"], config["lora_alpha"]) == (4, 4)
            self.adapters.append({name: tensor.clone() for name, tensor in tensors.items()})
            self.version = version

    engine, rollout = fsdp_engine(folder, lora_rank=4), Taking()
    sync = connect_adapters(engine, bucket_megabytes=1, deadline=40.0)
    received = []
    for version in (1, 2, 3):
        with torch.no_grad():
            for name, param in engine.module.named_parameters():
                if ".lora_" in name:
                    param.add_(version)
        received.append(sync(rollout, version).traffic.received)
    whole = {n.removeprefix("hf_model."): p.full_tensor() for n, p in engine.module.named_parameters()}
    assert (rollout.bases, rollout.version) == (1, 3)
    return rollout.base, rollout.adapters, whole, received


def test_adapters_alone_after_the_base(ranks, sync_folders):
    pytest.importorskip("peft")
    for base, adapters, whole, received in ranks(2).run(adapters_alone, sync_folders["qwen2"]):
        for name, tensor in base.items():
            layer, kind = name.rsplit(".", 1)
            assert torch.equal(tensor, whole[name] if name in whole else whole[f"{layer}.base_layer.{kind}"])
        assert len(adapters) == 3
        assert not torch.equal(*(next(iter(held.values())) for held in adapters[1:]))
        for name, tensor in adapters[-1].items():
            theirs = name.removeprefix("base_model.model.").replace(".weight", ".default.weight")
            # The scaling (alpha 16 over rank 4) travels within the second matrix.
            assert torch.equal(tensor, whole[theirs] * (4 if ".lora_B." in name else 1))
        size = sum(tensor.numel() * 4 for tensor in base.values())
        assert max(received) < 0.3 * size


def whole_units(folder: Path) -> tuple[int, int, int]:
    """How many of FSDP1's units are whole at most while weights with adapters are streamed; if all are; all units."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    engine = fsdp_engine(folder, strategy="fsdp", lora_rank=4)
    params = [
        unit._handle.flat_param for unit in FullyShardedDataParallel.fsdp_modules(engine.module) if unit._has_params
    ]

    def count() -> int:
        return sum(param.size() != param._sharded_size for param in params)

    most = max(count() for _ in engine.per_tensor_params())
    with FullyShardedDataParallel.summon_full_params(engine.module, writeback=False):
        return most, count(), len(params)


def test_with_adapters_under_fsdp1_the_stream_gathers_layer_by_layer(ranks, sync_folders):
    """What peers have `layered_summon` for is the only way there is; everything at once is the control."""
    pytest.importorskip("peft")
    for most, at_once, units in ranks(2).run(whole_units, sync_folders["qwen2"]):
        assert most == 1
        assert at_once == units > 2


def into_embedded(folder: Path) -> list[list[float]]:
    """Log-probs of the embedded rollout's greedy answers after two syncs, and its refusal after a failed one."""
    from meshrl.models.loading import load_model
    from meshrl.parallel.attention import ATTENTION_NAME
    from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
    from meshrl.rollout.requests import Request, SamplingParams
    from meshrl.weights import connect as connecting
    from meshrl.weights.executor import Exchange
    from meshrl.weights.transports import SyncRefusedError

    connecting.MEGABYTE = BUCKET
    engine = fsdp_engine(folder)
    model = load_model(str(folder), ATTENTION_NAME, "lm", dtype=torch.float32).to(own_device())
    rollout = EmbeddedRollout(model, pad_token_id=0, num_blocks=64)
    sync = connecting.connect(engine, connecting.rollout_params(model), bucket_megabytes=1, deadline=40.0)
    found = []

    def answer(version):
        request = Request(f"r{version}", tuple(IDS[0].tolist()), SamplingParams(4, temperature=0.0))
        (done,) = rollout.complete([request])
        assert done.versions == [version] * 4
        return [done.token_ids, done.log_probs]

    for version in (1, 2):
        with multiplied(engine, 1 + 0.1 * version):
            sync(rollout, version)
            found.append(answer(version))
    pack = Exchange._pack

    def zeros(self, buffer, pieces):
        pack(self, buffer, pieces)
        buffer.zero_()

    Exchange._pack = zeros
    multiply(engine, 1.3)
    with pytest.raises(SyncRefusedError, match="differs from what ranks"):
        sync(rollout, 3)
    Exchange._pack = pack
    assert rollout.version == -1
    assert rollout.is_suspended()
    sync(rollout, 4)
    found.append(answer(4))
    sync.close()
    return found


def test_into_the_embedded_rollout(ranks, sync_folders):
    from transformers import AutoModelForCausalLM

    found = ranks(2).run(into_embedded, sync_folders["qwen3"], timeout=90)
    assert found[0] == found[1]
    for (tokens, log_probs), factor in zip(found[0], (1.1, 1.2, 1.3), strict=True):
        model = AutoModelForCausalLM.from_pretrained(
            sync_folders["qwen3"], attn_implementation="eager", dtype=torch.float32
        )
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(factor)
            logits = model(torch.cat([IDS, torch.tensor([tokens])], 1)).logits[0, IDS.shape[1] - 1 : -1]
        assert logits.argmax(-1).tolist() == tokens
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(log_probs), expected, rtol=1e-4, atol=1e-5)


class MisplacingRollout(CopyingRollout):
    """Loses one element of what it is given, once it is told to."""

    loses = False

    def update_weights(self, weights, version):
        super().update_weights(weights, version)
        if self.loses:
            with torch.no_grad():
                self.hf_model.model.norm.weight[3] += 1


def streamed_from_fsdp1(folder: Path, verify: bool) -> tuple[torch.Tensor, torch.Tensor, str, int, tuple[str, ...]]:
    """Logits of a right sync and of the trainer, the error of a wrong one, and what the rollout has after it."""
    from meshrl.weights.colocated import policy_sync
    from meshrl.weights.transports import SyncError

    engine = fsdp_engine(folder, strategy="fsdp", lora_rank=4)
    rollout, reference = MisplacingRollout(blank_lm(folder)), blank_lm(folder)
    sync = policy_sync(engine, rollout, bucket_megabytes=1, verify=verify, delta=False, deadline=40.0)
    sync(rollout, 1)
    with torch.no_grad():
        own = dict(reference.named_parameters())
        for name, tensor in engine.per_tensor_params():
            own[name].copy_(tensor)
    logits, expected = logits_of(rollout.hf_model), logits_of(reference)
    rollout.loses, text = True, ""
    try:
        sync(rollout, 2)
    except SyncError as error:
        text = str(error)
    return logits, expected, text, rollout.version, rollout.released


@pytest.mark.parametrize("verify", [True, False])
def test_what_a_stream_brought_is_compared_by_sums(ranks, sync_folders, verify):
    pytest.importorskip("peft")
    for rank, found in enumerate(ranks(2).run(streamed_from_fsdp1, sync_folders["qwen2"], verify)):
        logits, expected, text, version, released = found
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
        if verify:
            assert f"'model.norm.weight' differs from what was sent on rank {rank}" in text
            assert (version, released) == (-1, ("weights",))
        else:
            assert (text, version) == ("", 2)

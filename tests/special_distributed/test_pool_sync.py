"""Weights from one pool of processes to another: exact, while the rollouts generate, and after one of them died."""

import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from process_group import ProcessGroup, own_device
from sync_trials import BUCKET, IDS, PlainRollout, blank_lm, fsdp_engine, logits_of, multiplied, one_process_logits

from meshrl.weights.transports import SyncError, SyncTimeoutError

DEADLINE = 30.0
PATIENCE = 15.0
# What a process keeps from one call to the next.
kept = {}


def factor(version):
    return 1 + 0.1 * version


def meet():
    from meshrl.weights.disaggregated import MeetingPoint

    return MeetingPoint()


def both(*sides):
    """Runs (pool, function, arguments) of both pools at the same time; what each rank returned."""
    with ThreadPoolExecutor(len(sides)) as threads:
        runs = [threads.submit(pool.run, function, *arguments) for pool, function, *arguments in sides]
        return [run.result() for run in runs]


def join(address, rank, world):
    from meshrl.weights import disaggregated

    disaggregated.MEGABYTE = BUCKET
    return disaggregated.PoolGroup.join(address, rank, world, DEADLINE)


def train(engine, address, rollouts, versions, **options):
    """The trainers' side of some syncs, each of changed weights."""
    from meshrl.weights.disaggregated import connect_trainer

    group = join(address, dist.get_rank(), dist.get_world_size() + rollouts)
    sync = connect_trainer(engine, group, rollouts, bucket_megabytes=1, deadline=DEADLINE, **options)
    reports = []
    for version in versions:
        with multiplied(engine, factor(version)):
            reports.append(sync(None, version).metrics())
    sync.close()
    return reports, sync.sync.plan.feed, sync.sync.plan.received().tolist()


def train_fsdp(folder, address, rollouts, versions, options, settings):
    return train(fsdp_engine(folder, **options), address, rollouts, versions, **settings)


def train_megatron(trial, address, rollouts, versions, settings):
    from meshrl.engines.engine_class import engine_class
    from meshrl.engines.megatron.parallel_state import leave_parallel_state

    try:
        engine = engine_class(trial.engine)(trial.model, trial.engine, None, device=own_device())
        engine.initialize()
        return train(engine, address, rollouts, versions, **settings)
    finally:
        leave_parallel_state()


class Copy(PlainRollout):
    def __init__(self, folder):
        super().__init__()
        self.hf_model = blank_lm(folder)

    def logits(self):
        return logits_of(self.hf_model)


def take(folder, address, trainers, versions, staged=True):
    """A rollout's side: the logits of each version, and the bytes that came."""
    from meshrl.weights.disaggregated import connect_rollout

    rollout = Copy(folder)
    group = join(address, trainers + dist.get_rank(), trainers + dist.get_world_size())
    sync = connect_rollout(rollout, group, trainers, staged=staged)
    logits, received = [], []
    for version in versions:
        received.append(sync(rollout, version).traffic.received)
        logits.append(rollout.logits())
    assert rollout.version == versions[-1]
    sync.close()
    return logits, received


def check(folder, found, versions):
    for logits, _ in found:
        for version, mine in zip(versions, logits, strict=True):
            torch.testing.assert_close(mine, one_process_logits(folder, version), rtol=1e-5, atol=1e-5)
    # The comparison would see one version for the other.
    assert (found[0][0][0] - found[0][0][-1]).abs().max() > 1e-2


CASES = [
    ("qwen2", 2, 2, {}, {"carrier": "shared_memory"}, True),
    ("qwen3_moe", 2, 2, {"fsdp_size": 2}, {"carrier": "process_group"}, True),
    ("qwen3", 1, 3, {}, {}, True),
    ("qwen2", 1, 3, {}, {"carrier": "process_group", "delta": True}, True),
    ("qwen2", 2, 1, {"strategy": "fsdp"}, {"verify": False}, False),
    ("qwen3", 2, 2, {"ulysses_sequence_parallel_size": 2}, {}, True),
]


@pytest.mark.parametrize(("family", "trainers", "rollouts", "options", "settings", "staged"), CASES)
def test_exact_twice(ranks, pool_ranks, sync_folders, family, trainers, rollouts, options, settings, staged):
    folder, point, versions = sync_folders[family], meet(), (1, 2)
    told, found = both(
        (ranks(trainers), train_fsdp, folder, point.address, rollouts, versions, options, settings),
        (pool_ranks(rollouts), take, folder, point.address, trainers, versions, staged),
    )
    check(folder, found, versions)
    reports, feed, received = told[0]
    assert feed == ("chain" if rollouts > trainers else "direct")
    size = sum(p.numel() * 4 for p in blank_lm(folder).parameters())
    assert received[trainers:] == [size] * rollouts
    for _, bytes_taken in found:
        assert bytes_taken[0] == size
        assert bytes_taken[1] <= size
    if feed == "chain":
        assert reports[0]["weight_sync/sent_bytes"] == size  # once, however many copies


def test_megatron_exact_twice(megatron_ranks, pool_ranks, sync_folders):
    from megatron_trials import megatron_trial

    folder, point, versions = sync_folders["qwen2"], meet(), (1, 2)
    trial = megatron_trial(folder, {"tp": 2})
    _, found = both(
        (megatron_ranks(2), train_megatron, trial, point.address, 2, versions, {}),
        (pool_ranks(2), take, folder, point.address, 2, versions),
    )
    check(folder, found, versions)


def train_lora(folder, address, adapters):
    """Three versions of adapters; the logits that each amounts to, merged by hand from whole tensors."""
    from meshrl.weights.disaggregated import connect_trainer

    engine, reference = fsdp_engine(folder, lora_rank=4), blank_lm(folder)
    group = join(address, dist.get_rank(), dist.get_world_size() + 2)
    sync = connect_trainer(engine, group, 2, bucket_megabytes=1, deadline=DEADLINE, adapters=adapters)
    expected = []
    with torch.no_grad():
        for version in (1, 2, 3):
            for name, param in engine.module.named_parameters():
                if ".lora_B." in name:
                    param.add_(0.1)
            sync(None, version)
            whole = {n.removeprefix("hf_model."): p.full_tensor() for n, p in engine.module.named_parameters()}
            for name, param in reference.named_parameters():
                layer, kind = name.rsplit(".", 1)
                param.copy_(whole[name] if name in whole else whole[f"{layer}.base_layer.{kind}"])
                if kind == "weight" and f"{layer}.lora_A.default.weight" in whole:
                    up, down = (whole[f"{layer}.lora_{letter}.default.weight"] for letter in "BA")
                    param.add_(up @ down, alpha=16 / 4)
            expected.append(logits_of(reference))
    sync.close()
    return expected


class Taking(Copy):
    def update_weights(self, weights, version):
        own = dict(self.hf_model.named_parameters())
        for name, tensor in weights:
            own.pop(name).data.copy_(tensor)
        assert not own
        self.version = version


def take_lora(folder, address, staged):
    from meshrl.weights.disaggregated import connect_rollout

    rollout = Taking(folder)
    sync = connect_rollout(rollout, join(address, 2 + dist.get_rank(), 4), 2, staged=staged)
    logits, received = [], []
    for version in (1, 2, 3):
        received.append(sync(rollout, version).traffic.received)
        logits.append(rollout.logits())
    sync.close()
    return logits, received


@pytest.mark.parametrize(("adapters", "staged"), [("merged", True), ("alone", True), ("alone", False)])
def test_adapters_alone_or_merged(ranks, pool_ranks, sync_folders, adapters, staged):
    pytest.importorskip("peft")
    folder, point = sync_folders["qwen2"], meet()
    (expected, _), found = both(
        (ranks(2), train_lora, folder, point.address, adapters),
        (pool_ranks(2), take_lora, folder, point.address, staged),
    )
    size = sum(p.numel() * 4 for p in blank_lm(folder).parameters())
    for logits, received in found:
        for mine, theirs in zip(logits, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        assert (logits[0] - logits[1]).abs().max() > 1e-2
        if adapters == "merged":
            assert received == [size] * 3
        else:
            assert max(received) < 0.3 * size


def generate_and_take(folder, address, staged):
    """Answers while a second version comes; the exchange waits until more tokens have come, if they can."""
    from meshrl.models.loading import load_model
    from meshrl.parallel.attention import ATTENTION_NAME
    from meshrl.rollout.embedded.embedded_rollout import EmbeddedRollout
    from meshrl.rollout.requests import Request, SamplingParams
    from meshrl.weights.disaggregated import connect_rollout
    from meshrl.weights.executor import Exchange

    model = load_model(str(folder), ATTENTION_NAME, "lm", dtype=torch.float32).to(own_device())
    rollout = EmbeddedRollout(model, pad_token_id=0, num_blocks=64)
    sync = connect_rollout(rollout, join(address, 1, 2), 1, staged=staged)
    sync(rollout, 1)
    assert rollout.stats()["generated_tokens"] == 0
    step, unpack, seen = rollout.step, Exchange._unpack, []

    def step_until_new():
        if rollout.num_generated() > 60 and rollout.version == 1:
            time.sleep(0.005)  # most of the answers are there: the rest is for the new version
            return []
        time.sleep(0.002)
        return step()

    def unpack_later(self, buffer, pieces):
        start, end = rollout.num_generated(), time.monotonic() + 1.0
        while not seen and rollout.num_generated() < start + 4 and time.monotonic() < end:
            time.sleep(0.002)
        seen.append(rollout.num_generated() - start)
        unpack(self, buffer, pieces)

    rollout.step, Exchange._unpack = step_until_new, unpack_later
    prompt = tuple(IDS[0].tolist())
    requests = [Request(f"r{n}", prompt[: 4 + n], SamplingParams(40), seed=n) for n in range(3)]
    answers = []
    thread = threading.Thread(target=lambda: answers.extend(rollout.complete(requests)))
    thread.start()
    while rollout.num_generated() < 6:
        time.sleep(0.001)
    try:
        report = sync(rollout, 2)
    finally:
        Exchange._unpack = unpack
    thread.join(DEADLINE)
    sync.close()
    found = [(r.prompt_token_ids, a.token_ids, a.log_probs, a.versions) for r, a in zip(requests, answers, strict=True)]
    return found, seen[0], report.stall_seconds


@pytest.mark.parametrize("staged", [True, False])
def test_update_while_generating(ranks, pool_ranks, sync_folders, staged):
    from transformers import AutoModelForCausalLM

    folder, point = sync_folders["qwen3"], meet()
    _, ((answers, meanwhile, stall),) = both(
        (ranks(1), train_fsdp, folder, point.address, 1, (1, 2), {}, {}),
        (pool_ranks(1), generate_and_take, folder, point.address, staged),
    )
    # Beside the old weights the new ones arrive while tokens come; in their place they cannot.
    assert (meanwhile >= 4) == staged
    assert stall > 0
    if not staged:
        assert stall >= 1.0  # the exchange waited that long for tokens
    models = {}
    for version in (1, 2):
        models[version] = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for param in models[version].parameters():
                param.mul_(factor(version))
    both_versions = 0
    for prompt, tokens, log_probs, versions in answers:
        assert len(tokens) == 40
        assert versions == sorted(versions)
        both_versions += set(versions) == {1, 2}
        ids = torch.tensor([[*prompt, *tokens]])
        for version, model in models.items():
            with torch.no_grad():
                whole = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = whole.gather(1, torch.tensor(tokens)[:, None])[:, 0]
            mine = torch.tensor(versions) == version
            torch.testing.assert_close(torch.tensor(log_probs)[mine], expected[mine], rtol=1e-4, atol=1e-5)
            # Under the other version they would not be the same.
            assert not mine.all()
            assert (torch.tensor(log_probs)[~mine] - expected[~mine]).abs().max() > 1e-3
    assert both_versions == 3


def connect_one(folder, address, rank, carrier):
    """Each process is a pool of its own: rank 0 trains, the others generate."""
    from meshrl.weights.disaggregated import connect_rollout, connect_trainer

    group = join(address, rank, 3)
    if rank == 0:
        if "engine" not in kept:
            kept["engine"] = fsdp_engine(folder)
        deadline = 2 * PATIENCE if carrier == "shared_memory" else 4.0
        kept["sync"] = connect_trainer(kept["engine"], group, 2, bucket_megabytes=1, deadline=deadline, carrier=carrier)
    else:
        kept.setdefault("rollout", Copy(folder))
        kept["sync"] = connect_rollout(kept["rollout"], group, 1)


def sync_one(version, dies=False):
    """The version (or -1) and logits that this process then has; an error's text with the seconds it took."""
    from meshrl.weights.executor import Exchange

    engine, rollout = kept.get("engine"), kept.get("rollout")
    if dies:
        Exchange._unpack = lambda *_: os._exit(9)
    started = time.monotonic()
    try:
        with multiplied(engine, factor(version)) if engine is not None else nullcontext():
            kept["sync"](rollout, version)
        text = ""
    except SyncError as error:
        text = str(error)
    seconds = time.monotonic() - started
    return text, seconds, None if rollout is None else (rollout.version, rollout.logits())


def leave():
    kept.pop("sync").close()
    kept.clear()


@pytest.mark.parametrize("carrier", ["shared_memory", "process_group"])
def test_a_dead_rollout_is_seen_and_gets_the_current_version_when_it_is_back(sync_folders, carrier):
    folder, point = sync_folders["qwen2"], meet()
    pools = [ProcessGroup(1) for _ in range(3)]
    try:
        both(*((pool, connect_one, folder, point.address, rank, carrier) for rank, pool in enumerate(pools)))
        first = both(*((pool, sync_one, 1) for pool in pools))
        assert [found[0][0] for found in first] == ["", "", ""]
        with ThreadPoolExecutor(3) as threads:
            runs = [threads.submit(pool.run, sync_one, 2, rank == 2) for rank, pool in enumerate(pools)]
            with pytest.raises(AssertionError, match="exit code 9"):
                runs[2].result()
            left = [run.result()[0] for run in runs[:2]]
        for text, seconds, _ in left:
            assert re.search(r"rank \d (lost|gave up|died|waited for rank \d)", text), text
            # In memory that all see nobody waits for the deadline; over gloo, who does not talk to the dead one does.
            assert seconds < (PATIENCE if carrier == "shared_memory" else 2 * PATIENCE)
        # The one that is left generates with all of the old version.
        version, logits = left[1][2]
        assert version == 1
        torch.testing.assert_close(logits, one_process_logits(folder, 1), rtol=1e-5, atol=1e-5)
        assert "connections broke" in pools[1].run(sync_one, 2)[0][0]
        # A version that only one of them lacks, then one that is new to both.
        for version in (2, 3):
            if version == 2:
                point = meet()
                both(*((pool, connect_one, folder, point.address, rank, carrier) for rank, pool in enumerate(pools)))
            for text, _, held in (found[0] for found in both(*((pool, sync_one, version) for pool in pools))):
                assert text == ""
                if held is not None:
                    assert held[0] == version
                    torch.testing.assert_close(held[1], one_process_logits(folder, version), rtol=1e-5, atol=1e-5)
        for pool in pools:
            pool.run(leave)
    finally:
        for pool in pools:
            pool.close()


def late(folder, address):
    """A newcomer meets one that has the version: the latter is left alone."""
    from meshrl.weights.disaggregated import connect_rollout

    rank = 1 + dist.get_rank()
    rollout = Copy(folder)
    if rank == 1:
        rollout.version, updates = 4, []
        rollout.update_weights = lambda weights, version: updates.append(version)
    sync = connect_rollout(rollout, join(address, rank, 3), 1)
    sync(rollout, 4)
    logits = rollout.logits()
    try:
        sync(rollout, 4)
        text = ""
    except SyncError as error:
        text = str(error)
    sync.close()
    return rollout.version, logits, text, rank == 1 and updates


def test_a_newcomer_gets_the_version_that_others_have(ranks, pool_ranks, sync_folders):
    folder, point = sync_folders["qwen2"], meet()
    with ThreadPoolExecutor(2) as threads:
        training = threads.submit(ranks(1).run, train_until_refused, folder, point.address)
        found = pool_ranks(2).run(late, folder, point.address)
        assert "version 4 is not newer than the 4 there" in training.result()[0]
    assert [version for version, *_ in found] == [4, 4]
    assert found[0][3] == []
    torch.testing.assert_close(found[1][1], one_process_logits(folder, 4), rtol=1e-5, atol=1e-5)
    assert all("version 4 is not newer" in text for _, _, text, _ in found)


def train_until_refused(folder, address):
    try:
        train(fsdp_engine(folder), address, 2, (4, 4))
    except SyncError as error:
        return str(error)
    return ""


def join_late(address, rank, deadline):
    from meshrl.weights.disaggregated import PoolGroup

    started = time.monotonic()
    with pytest.raises(SyncTimeoutError) as caught:
        PoolGroup.join(address, rank, 3, deadline)
    return str(caught.value), time.monotonic() - started


def test_whoever_does_not_come_is_named(ranks, pool_ranks):
    point = meet()
    (a,), (b,) = both(
        (ranks(1), join_late, point.address, 0, 1.0),
        (pool_ranks(1), join_late, point.address, 2, 1.0),
    )
    for text, seconds in (a, b):
        assert "waited for ranks [1] to join until the deadline of 1 s" in text
        assert seconds < 8

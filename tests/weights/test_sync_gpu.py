"""Syncs on a real GPU: the kernel that copies and sums, within a process and through CUDA IPC between two."""

import multiprocessing

import numpy as np
import pytest
import torch
import torch.distributed as dist
from layouts import QWEN2, copies, fsdp2, random_tensors, tp

from meshrl.weights.executor import checksum
from meshrl.weights.placement import Shards, local_tensors
from meshrl.weights.planner import plan_reshard
from meshrl.weights.session import WORD_BYTES, WeightSync
from meshrl.weights.transports import SyncRefusedError

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
GPU = torch.device("cuda", 0)
PAIRS = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_one_kernel_copies_and_sums_as_torch_does(pair):
    from meshrl.weights import grouped

    torch.manual_seed(0)
    # Five that do not lie at whole words, by their widths, their strides, or the place where the last begins; four that
    # do; and two columns in one piece, which are turned.
    shapes = [(70, 1100), (33, 7), (5000, 1), (1, 3), (64, 512), (131, 1104), (1, 2048), (64, 8), (65, 1032)]
    shapes[:0] = [(4096, 1), (37, 1)]
    sources = [torch.randn(shape, device=GPU).to(pair[0]) for shape in shapes]
    targets = [
        torch.zeros(rows, cols + (0 if n < 2 else 9 if n < 6 else 8), device=GPU, dtype=pair[1])
        for n, (rows, cols) in enumerate(shapes)
    ]
    targets[6] = torch.zeros(64 * 520 + 1, device=GPU, dtype=pair[1])[1:].view(64, 520)
    targets[8] = torch.zeros(1, 2051, device=GPU, dtype=pair[1])  # one row: its stride does not matter
    table = np.array(
        [
            [s.data_ptr(), t.data_ptr(), *s.shape, s.stride(0), t.stride(0), 11 * n, 5 * n]
            for n, (s, t) in enumerate(zip(sources, targets, strict=True))
        ]
    )
    table[-1, grouped.TO] = 0  # only summed
    moves = grouped.Grouped(table, [pair] * len(shapes), GPU)
    found = {(batch.turned, batch.aligned): sorted(set(batch.numbers.tolist())) for batch in moves.batches}
    assert found == {
        (True, True): [0],
        (True, False): [1],
        (False, False): [*range(2, 7)],
        (False, True): [*range(7, 11)],
    }
    for with_sums in (True, True, True, False, False):  # launched, recorded, replayed
        for source, target in zip(sources, targets, strict=True):
            source.mul_(1.5)
            target.zero_()
        sums = moves.run(with_sums)
        for source, target in zip(sources[:-1], targets[:-1], strict=True):
            assert torch.equal(target[:, : source.shape[1]], source.to(pair[1]))
            assert not target[:, source.shape[1] :].any()
        assert not targets[-1].any()
        for number, source in enumerate(sources):
            expected = int(checksum(source, 11 * number, 5 * number, pair[1])) if with_sums else 0
            assert int(sums[number]) == expected


def one_process(**options):
    plan = plan_reshard(fsdp2(QWEN2, 1), tp(QWEN2, 1), itemsize=2, bucket_bytes=4096)
    blank = {name: torch.zeros(shape, dtype=torch.bfloat16, device=GPU) for name, shape in plan.source.tensors.items()}
    return WeightSync(
        plan,
        0,
        source=Shards(plan.source, 0, local_tensors(plan.source, 0, blank)),
        destination=Shards(plan.destination, 0, local_tensors(plan.destination, 0, blank)),
        dtypes=dict.fromkeys(plan.names, torch.bfloat16),
        **options,
    )


def whole_on_gpu(shapes, seed):
    return {name: t.to(GPU, torch.bfloat16) for name, t in random_tensors(shapes, seed=seed).items()}


def test_one_process_exact_twice_and_a_wrong_bit_is_seen(monkeypatch):
    sync = one_process()
    for version in range(1, 7):
        whole = whole_on_gpu(sync.plan.source.tensors, version)
        new = local_tensors(sync.plan.source, 0, whole)
        if version == 4:  # after a recording has been replayed, the trainer's memory moves
            sync.source = sync.source.with_tensors(new)
        for name, tensor in sync.source.tensors.items():
            tensor.copy_(new[name])
        report = sync.run(version)
        for name, value in local_tensors(sync.plan.destination, 0, whole).items():
            assert torch.equal(sync.destination.tensors[name], value)
    assert report.traffic.copied == sum(t.numel() * 2 for t in sync.source.tensors.values())
    from meshrl.weights.grouped import Grouped

    plain = Grouped.run

    def spoiled(self, with_sums=True):
        sums = plain(self, with_sums)
        next(iter(sync.destination.tensors.values())).view(torch.int16)[3] ^= 1
        return sums

    monkeypatch.setattr(Grouped, "run", spoiled)
    with pytest.raises(SyncRefusedError, match="differs"):
        sync.run(7)


def ipc_rank(connection, folder, rank, plan):
    from meshrl.weights.transports import CudaIpcCarrier

    blank = {name: torch.zeros(shape, dtype=torch.bfloat16, device=GPU) for name, shape in plan.source.tensors.items()}
    ours, theirs = (ranks.tolist() for ranks in (plan.source_ranks, plan.destination_ranks))
    sides = {}
    for kind, ranks in (("source", ours), ("destination", theirs)):
        placed = getattr(plan, kind)
        at = ranks.index(rank) if rank in ranks else None
        sides[kind] = None if at is None else Shards(placed, at, local_tensors(placed, at, blank))
    slot = max(plan.slot_bytes, WORD_BYTES)
    carrier = CudaIpcCarrier(folder, rank, slot, GPU)
    sync = WeightSync(
        plan, rank, **sides, dtypes=dict.fromkeys(plan.names, torch.bfloat16), carrier=carrier, deadline=60.0
    )
    wrong = 0
    for version in (1, 2):
        whole = whole_on_gpu(plan.source.tensors, version)
        if sync.source is not None:
            sync.source.tensors = local_tensors(plan.source, sync.source.rank, whole)
        sync.run(version)
        if sync.destination is not None:
            expected = local_tensors(plan.destination, sync.destination.rank, whole)
            wrong += sum(not torch.equal(sync.destination.tensors[name], value) for name, value in expected.items())
    connection.send(wrong)
    connection.recv()  # the others may still read this one's memory


@pytest.mark.parametrize("pair", ["spread", "chain"])
def test_two_processes_through_ipc(tmp_path, pair):
    if pair == "spread":
        plan = plan_reshard(fsdp2(QWEN2, 2), tp(QWEN2, 2), itemsize=2, bucket_bytes=4096)
    else:
        plan = plan_reshard(
            fsdp2(QWEN2, 1), copies(QWEN2, 2), itemsize=2, bucket_bytes=4096, destination_ranks=[1, 2], feed="chain"
        )
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in plan.ranks:
        ours, theirs = context.Pipe()
        process = context.Process(target=ipc_rank, args=(theirs, str(tmp_path), rank, plan))
        process.start()
        started.append((process, ours))
    answers = [ours.recv() if ours.poll(90) else "late" for _, ours in started]
    for process, ours in started:
        ours.send("done")
        process.join(20)
        process.kill()
    assert answers == [0] * len(plan.ranks)


def test_what_a_trainer_sends_to_host_memory_leaves_the_device(tmp_path):
    """A sync keeps nothing of the trainer's between two versions, into a module of ours and into other engines."""
    from transformers import Qwen3Config

    from meshrl.config.engine import EngineConfig, ModelConfig
    from meshrl.engines.engine_class import engine_class
    from meshrl.models.loading import new_causal_lm
    from meshrl.parallel.attention import ATTENTION_NAME
    from meshrl.weights.connect import connect, connect_stream, rollout_params

    Qwen3Config(
        vocab_size=4096, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64,
    ).save_pretrained(tmp_path)  # fmt: skip
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    config = EngineConfig()
    model = ModelConfig(path=str(tmp_path), random_init=True, enable_gradient_checkpointing=False)
    engine = engine_class(config)(model, config, None, device=GPU)
    engine.initialize()
    own = new_causal_lm(engine.hf_model.config, ATTENTION_NAME, torch.bfloat16).to(GPU)
    size = sum(param.nbytes for param in own.parameters())
    for sync in (connect(engine, rollout_params(own)), connect_stream(engine, own)):
        for version in (0, 1):
            engine.to(GPU)
            sync(None, version)
            before = torch.cuda.memory_allocated()
            engine.to("cpu")
            assert before - torch.cuda.memory_allocated() > 0.9 * size

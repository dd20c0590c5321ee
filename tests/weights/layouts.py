"""Small models' tensors on many layouts, and the ranks of a plan as threads."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import torch

from meshrl.engines.megatron.ranks import ParallelRanks
from meshrl.engines.megatron.weight_map import ModuleNames, hf_tensors
from meshrl.parallel.mesh import shard_layout
from meshrl.weights import placement
from meshrl.weights.placement import RolloutLayout, Shards, local_tensors, rollout
from meshrl.weights.planner import plan_reshard
from meshrl.weights.session import WORD_BYTES, WeightSync
from meshrl.weights.transports import Mailboxes

BASE = {
    "vocab_size": 41,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
QWEN2 = SimpleNamespace(model_type="qwen2", **BASE)
QWEN3 = SimpleNamespace(model_type="qwen3", **BASE | {"tie_word_embeddings": True})
MOE = SimpleNamespace(
    model_type="qwen3_moe", **BASE, num_experts=4, moe_intermediate_size=8, decoder_sparse_step=1, mlp_only_layers=[1]
)
LATENT = SimpleNamespace(
    model_type="deepseek_v3",
    **BASE | {"num_key_value_heads": 4},
    n_routed_experts=4,
    n_shared_experts=2,
    moe_intermediate_size=8,
    first_k_dense_replace=1,
    q_lora_rank=12,
    kv_lora_rank=8,
    qk_rope_head_dim=4,
    qk_nope_head_dim=6,
    v_head_dim=10,
)


def module_params(config):
    """Names and shapes as a Hugging Face module has them: the experts of a layer in two stacks."""
    params = {}
    for name, shape in hf_tensors(config).items():
        if ".experts." not in name:
            params[name] = shape
            continue
        block, _, kind, _ = name.rsplit(".", 3)
        experts = getattr(config, "num_experts", None) or config.n_routed_experts
        if kind == "down_proj":
            params[f"{block}.down_proj"] = (experts, *shape)
        else:
            params[f"{block}.gate_up_proj"] = (experts, 2 * shape[0], shape[1])
    return params


def fsdp2(config, world, fsdp_size=-1):
    return placement.fsdp2(module_params(config), shard_layout(world, fsdp_size), config.model_type)


def fsdp1(config, world, fsdp_size=-1, alignment=1):
    units: dict = {}
    for name, shape in module_params(config).items():
        unit = name.split(".")[2] if ".layers." in name else "root"
        units.setdefault(f"{unit}._flat_param", {})[name] = shape
    return placement.fsdp1(units, shard_layout(world, fsdp_size), config.model_type, alignment=alignment)


def megatron(config, world, experts="sequential", **axes):
    return placement.megatron(config, ParallelRanks(world_size=world, **axes), ModuleNames(experts=experts))


def copies(config, world):
    return placement.replicas(module_params(config), world, config.model_type)


def tp(config, tp=1, dp=1, ep=0, form="separate"):
    return rollout(hf_tensors(config), config, RolloutLayout(tp, dp, ep, form))


def random_tensors(shapes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


class ThreadGroup:
    """All ranks of a plan in this process, a thread each."""

    def __init__(self, source, destination, dtype=torch.float32, make_carrier=None, sync_class=WeightSync, **options):
        plan_options = {
            name: options.pop(name) for name in ("source_ranks", "destination_ranks", "feed") if name in options
        }
        bucket = options.pop("bucket_bytes", 4096)
        self.plan = plan_reshard(source, destination, itemsize=dtype.itemsize, bucket_bytes=bucket, **plan_options)
        self.dtypes = dict.fromkeys(self.plan.names, dtype)
        boxes = Mailboxes()
        slot = max(self.plan.slot_bytes, WORD_BYTES)
        make_carrier = make_carrier or boxes.carrier
        self.syncs = {}
        blank = {name: torch.zeros(shape, dtype=dtype) for name, shape in destination.tensors.items()}
        for rank in self.plan.ranks:
            ours, theirs = self._place(self.plan.source_ranks, rank), self._place(self.plan.destination_ranks, rank)
            self.syncs[rank] = sync_class(
                self.plan,
                rank,
                source=None if ours is None else Shards(source, ours, local_tensors(source, ours, self._blank(source))),
                destination=None
                if theirs is None
                else Shards(destination, theirs, local_tensors(destination, theirs, blank)),
                dtypes=self.dtypes,
                carrier=make_carrier(rank, slot),
                deadline=options.get("deadline", 20.0),
                **{name: value for name, value in options.items() if name != "deadline"},
            )

    @staticmethod
    def _blank(side):
        return {name: torch.zeros(shape) for name, shape in side.tensors.items()}

    @staticmethod
    def _place(ranks, rank):
        found = ranks.tolist()
        return found.index(rank) if rank in found else None

    def load(self, whole):
        """New weights on the source."""
        for sync in self.syncs.values():
            if sync.source is not None:
                sync.source.tensors = local_tensors(sync.source.placement, sync.source.rank, whole)

    def run(self, version, versions=None, rollouts=None):
        """All ranks at once; what each returned or raised."""
        results = {}

        def work(rank):
            try:
                results[rank] = self.syncs[rank].run((versions or {}).get(rank, version), (rollouts or {}).get(rank))
            except Exception as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in self.syncs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        return results

    def wrong(self, whole):
        """(rank, parameter) of the destination that are not bit for bit what the whole tensors give."""
        found = []
        for rank, sync in self.syncs.items():
            if sync.destination is None:
                continue
            side = sync.destination
            for name, tensor in local_tensors(side.placement, side.rank, whole).items():
                if not torch.equal(tensor, side.tensors[name]):
                    found.append((rank, name))
        return found


class PlainRollout:
    """As little of a rollout as a sync asks for."""

    def __init__(self):
        self.version, self.released = -1, ()

    def update_weights(self, weights, version):
        for _ in weights:
            pass
        self.version = version

    def release(self, tags):
        self.released = tuple(tags)

    def resume(self, tags):
        self.released = ()

"""The command `meshrl plan-sync`: the bytes that a weight sync between two layouts would move, from a config alone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshrl.weights.placement import Placement

FSDP_AXES = ("fsdp", "ddp")
MEGATRON_AXES = ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")
ROLLOUT_AXES = ("tp", "dp", "ep")
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1}


def add_plan_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `meshrl plan-sync` to a parser."""
    parser.add_argument("model", metavar="DIR", help="folder with the model's config.json; its weights are not read")
    parser.add_argument(
        "--train",
        required=True,
        metavar="AXES",
        help="training layout: fsdp=4,ddp=2 (sequence ranks are among these) or tp=2,pp=2,vpp=2,ep=4,dp=2",
    )
    parser.add_argument("--rollout", required=True, metavar="AXES", help="rollout layout: tp=2,dp=2 or tp=8,ep=8")
    parser.add_argument("--form", default="separate", help="rollout parameters: separate, or packed as in vLLM")
    parser.add_argument("--apart", action="store_true", help="trainer and rollout on different devices")
    parser.add_argument("--dtype", default="bf16", choices=tuple(ITEMSIZE), help="the rollout's dtype (default: bf16)")
    parser.add_argument("--bucket-megabytes", type=int, default=512, help="rollout.update_weights_bucket_megabytes")
    parser.add_argument("--feed", default="auto", help="auto, direct or chain")


def planned(arguments: argparse.Namespace) -> list[str]:
    """Plan the sync that the arguments describe, and return the plan as lines of text."""
    import time

    from meshrl.engines.megatron.weight_map import hf_tensors
    from meshrl.models.loading import load_model_config
    from meshrl.weights.placement import RolloutLayout, rollout
    from meshrl.weights.planner import MEGABYTE, plan_lines, plan_reshard

    started = time.perf_counter()
    config = load_model_config(arguments.model)
    axes = parse_axes(arguments.rollout, ROLLOUT_AXES)
    layout = RolloutLayout(axes.get("tp", 1), axes.get("dp", 1), axes.get("ep", 0), arguments.form)
    source = training_placement(config, arguments.train)
    target = rollout(hf_tensors(config), config, layout)
    start = source.world_size if arguments.apart else 0
    plan = plan_reshard(
        source,
        target,
        itemsize=ITEMSIZE[arguments.dtype],
        bucket_bytes=arguments.bucket_megabytes * MEGABYTE,
        destination_ranks=range(start, start + target.world_size),
        feed=arguments.feed,
    )
    return [*plan_lines(plan), f"planned in {time.perf_counter() - started:.2f} s"]


def training_placement(config: Any, text: str) -> Placement:
    """Return the placement of a training layout given as `axis=size,...`: FSDP2 if it names `fsdp`, else Megatron."""
    from meshrl.engines.megatron.ranks import ParallelRanks
    from meshrl.parallel.mesh import shard_layout
    from meshrl.rollout.weight_files import expected_shapes
    from meshrl.weights.placement import fsdp2, megatron

    if "fsdp" in text:
        axes = parse_axes(text, FSDP_AXES)
        shards = axes.get("fsdp", 1)
        params = {name: tuple(shape) for name, shape in expected_shapes(config).items()}
        return fsdp2(params, shard_layout(shards * axes.get("ddp", 1), shards), config.model_type)
    axes = parse_axes(text, MEGATRON_AXES)
    dense = axes.get("tp", 1) * axes.get("pp", 1) * axes.get("cp", 1)
    sparse = axes.get("ep", 1) * axes.get("etp", axes.get("tp", 1)) * axes.get("pp", 1)
    world = dense * axes.pop("dp", max(1, sparse // dense))
    sizes_by_axis: dict[str, Any] = dict(axes)
    return megatron(config, ParallelRanks(world_size=world, **sizes_by_axis))


def parse_axes(text: str, known: tuple[str, ...]) -> dict[str, int]:
    """Parse an axis list such as `tp=2,pp=4` into sizes by axis; raise a ValueError for other axes."""
    found: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in known or not size.isdigit() or int(size) < 1:
            raise ValueError(f"'{part}' is no axis of '{text}': use {', '.join(f'{axis}=N' for axis in known)}")
        if name in found:
            raise ValueError(f"'{text}' names the axis {name} twice: give its size once")
        found[name] = int(size)
    return found

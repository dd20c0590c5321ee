"""Checks of the layout of the reference, or teacher: its own on devices of its own, else the actor's."""

from meshrl.config.actor import OWN_LAYOUT
from meshrl.config.algorithm_checks import uses_reference
from meshrl.config.layout import engine_problems
from meshrl.config.names import ACTOR, REF
from meshrl.config.pools import ranks_of
from meshrl.config.root import PPOConfig
from meshrl.config.tree import get_value


def reference_layout_problems(config: PPOConfig) -> list[str]:
    """On devices of its own the reference may have a layout of its own, on the policy's it has the actor's."""
    ref, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    engine, problems = ref.engine(actor), []
    if ref.has_own_devices:
        problems = engine_problems(engine, REF, ranks_of(config, ref), REF)
    for below in OWN_LAYOUT:
        own, theirs = get_value(ref, below), get_value(actor, below)
        if own in (None, theirs):
            continue
        if not ref.has_own_devices:
            problems.append(
                f"{REF}.{below}={own} must say what {ACTOR}.{below} says ({theirs}): on the policy's devices a "
                f"reference runs in the actor's engine. Leave it out, or give the reference devices ({REF}.nnodes)"
            )
        elif below != "strategy" and below.startswith("megatron.") != (engine.strategy == "megatron"):
            problems.append(f"{REF}.{below}={own} has no effect with {REF}.strategy={engine.strategy}")
    return problems


def reads_the_other_engine(config: PPOConfig) -> bool:
    """Whether the reference runs, with the actor's settings of it, in the other engine than the actor."""
    policy = config.actor_rollout_ref
    found = {engine.strategy == "megatron" for engine in (policy.actor, policy.ref.engine(policy.actor))}
    return uses_reference(config) and len(found) == 2

"""Checks of `actor.router_replay`: which models have routes, and which rollouts say what theirs were."""

from meshrl.config.model_folder import EXPERT_COUNTS, read_model_config
from meshrl.config.names import ACTOR, MODEL, ROLLOUT
from meshrl.config.root import PPOConfig

MODE = f"{ACTOR}.router_replay.mode"


def replay_problems(config: PPOConfig) -> list[str]:
    """Routes to replay must have been recorded."""
    policy = config.actor_rollout_ref
    mode, rollout = policy.actor.router_replay.mode, policy.rollout
    if mode == "R2" and config.algorithm.rollout_correction.bypass_mode:
        return [
            f"{MODE}=R2 replays the routes of the pass for old log-probs, which bypass_mode=true leaves out: set R3, "
            "or algorithm.rollout_correction.bypass_mode=false"
        ]
    if mode == "R3" and rollout.name == "vllm" and rollout.as_server:
        return [
            f"not supported yet: {MODE}=R3 with {ROLLOUT}.as_server=true, for vLLM's server does not say where its "
            "tokens went: set as_server=false, R2, or another rollout"
        ]
    return []


def replay_file_problems(config: PPOConfig) -> list[str]:
    """Only a model with experts has routes."""
    policy = config.actor_rollout_ref
    if policy.actor.router_replay.mode == "disabled":
        return []
    found = read_model_config(policy.model)
    if not found or any(found.get(name) for name in (*EXPERT_COUNTS, "moe_num_experts")):
        return []
    return [
        f"{MODE}={policy.actor.router_replay.mode} is for mixtures of experts, and {MODEL}.path={policy.model.path} "
        f"({found.get('model_type')}) has no experts: set disabled"
    ]

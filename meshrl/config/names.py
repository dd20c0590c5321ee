"""The longest names of sections, where keys are spoken of."""

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"

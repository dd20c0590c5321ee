"""The longest names of sections, where keys are spoken of."""

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
# Where a value came from that was given beside a recipe.
COMMAND_LINE = "command line"

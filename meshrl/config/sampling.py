"""How tokens are drawn and where answers end, in training and in validation: what the keys ask of each other."""

from meshrl.config.errors import Note
from meshrl.config.names import ROLLOUT
from meshrl.config.rollout import RolloutConfig, ValKwargs
from meshrl.config.root import PPOConfig
from meshrl.config.tree import changed_keys, get_value


def sampling_problems(config: PPOConfig) -> list[str]:
    """Settings of `rollout` and `rollout.val_kwargs` that leave no token, never end, or do nothing."""
    rollout = config.actor_rollout_ref.rollout
    problems = []
    for prefix, settings in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        greedy = "do_sample=false" if not settings.do_sample else "temperature=0" if not settings.temperature else None
        if greedy and settings.n > 1:
            problems.append(f"{prefix}.{greedy} gives {prefix}.n={settings.n} equal responses: sample, or set n=1")
        if settings.top_k == 0:
            problems.append(f"{prefix}.top_k=0 leaves no token; -1 keeps all")
        if settings.top_p == 0:
            problems.append(f"{prefix}.top_p=0 leaves no token; 1.0 keeps all")
        if settings.repetition_penalty == 0:
            problems.append(f"{prefix}.repetition_penalty=0 must be above 0; 1.0 is none")
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        problems.append(f"{ROLLOUT}.val_kwargs.do_sample=true needs val_kwargs.temperature > 0")
    if not rollout.val_kwargs.do_sample:
        names = [f"{ROLLOUT}.val_kwargs.{name}" for name in ("temperature", "top_k", "top_p", "min_p")]
        problems += [
            Note(f"{name} has no effect with {ROLLOUT}.val_kwargs.do_sample=false, which takes the likeliest token")
            for name in names
            if name in changed_keys(config, name) and get_value(config, name)
        ]
    if rollout.multi_turn.enable and (rollout.ignore_eos or rollout.val_kwargs.ignore_eos):
        name = f"{ROLLOUT}.ignore_eos" if rollout.ignore_eos else f"{ROLLOUT}.val_kwargs.ignore_eos"
        problems.append(f"{name}=true leaves a turn without end: it does not go with {ROLLOUT}.multi_turn.enable")
    problems += _ending_problems(ROLLOUT, rollout, config.data.max_response_length)
    own = rollout.val_kwargs
    if (own.stop, own.min_tokens, own.ignore_eos) != (rollout.stop, rollout.min_tokens, rollout.ignore_eos):
        problems += _ending_problems(f"{ROLLOUT}.val_kwargs", own, config.data.max_response_length)
    if config.algorithm.mask_truncated_responses and rollout.ignore_eos and not rollout.stop:
        problems.append(
            f"algorithm.mask_truncated_responses=true with {ROLLOUT}.ignore_eos=true and no {ROLLOUT}.stop leaves no "
            "answer to learn from: all end at the length limit"
        )
    return problems


def _ending_problems(prefix: str, settings: RolloutConfig | ValKwargs, longest: int) -> list[str]:
    least, problems = settings.min_tokens or 0, []
    if any(not text for text in settings.stop or []):
        problems.append(f"{prefix}.stop={settings.stop} has an empty text, which every answer holds: leave it out")
    if least > longest:
        problems.append(f"{prefix}.min_tokens ({least}) must be at most data.max_response_length ({longest})")
    if settings.ignore_eos and least and not settings.stop:
        problems.append(f"{prefix}.min_tokens={least} has no effect with {prefix}.ignore_eos=true and no {prefix}.stop")
    return problems

"""What must hold between the ways of reading and ordering the training data."""

from meshrl.config.data_files import prompts_of_a_batch
from meshrl.config.functions import load_function
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SFTConfig
from meshrl.config.tree import changed_keys


def data_problems(config: PPOConfig) -> list[str]:
    """Mixing, streaming and samplers: what they ask for, and what does not go together."""
    return [
        *_weight_problems(config),
        *_streaming_problems(config),
        *_sampler_problems(config),
        *sample_problems(config),
    ]


def sample_problems(config: PPOConfig | SFTConfig) -> list[str]:
    """How many rows are taken of the files."""
    data, batch = config.data, prompts_of_a_batch(config)
    problems = [
        f"data.{name}=0 leaves no row; -1 takes all"
        for name in ("train_max_samples", "val_max_samples")
        if getattr(data, name) == 0
    ]
    if 0 < data.train_max_samples < batch:
        problems.append(f"data.train_max_samples ({data.train_max_samples}) is fewer than one batch of {batch}")
    return problems


def _weight_problems(config: PPOConfig) -> list[str]:
    weights, files = config.data.train_weights, config.data.train_files
    if not weights:
        return []
    if files and len(weights) != len(files):
        return [f"data.train_weights has {len(weights)} entries for {len(files)} data.train_files: give one each"]
    return [] if sum(weights) > 0 else ["data.train_weights are all 0: nothing would be drawn"]


def _streaming_problems(config: PPOConfig) -> list[str]:
    if not config.data.streaming:
        changed = changed_keys(config, "data.shuffle_buffer")
        return [f"{name} has no effect without data.streaming=true" for name in changed]
    problems = []
    if config.trainer.total_training_steps is None:
        problems.append("data.streaming=true does not know how many rows there are: set trainer.total_training_steps")
    filters = config.algorithm.filter_groups
    if filters.enable and filters.max_num_gen_batches == 0:
        problems.append("data.streaming=true has no epoch to bound: set algorithm.filter_groups.max_num_gen_batches")
    if config.data.train_max_samples >= 0:
        problems.append("data.train_max_samples does not go with data.streaming=true, which has no end: leave it at -1")
    if config.data.filter_overlong_prompts_workers > 1:
        problems.append("data.filter_overlong_prompts_workers has no effect with data.streaming=true")
    return problems


def _sampler_problems(config: PPOConfig) -> list[str]:
    sampler, data = config.data.sampler, config.data
    if (sampler.class_path is None) != (sampler.class_name is None):
        return ["data.sampler.class_path and class_name go together: set both"]
    if sampler.class_path is not None and (data.streaming or data.train_weights):
        other = "streaming" if data.streaming else "train_weights"
        return [f"data.sampler and data.{other} both say which prompts come next: choose one"]
    return []


def sampler_file_problems(config: PPOConfig) -> list[str]:
    """A sampler class that is not there."""
    sampler = config.data.sampler
    if sampler.class_path is None or sampler.class_name is None:
        return []
    try:
        load_function(sampler.class_path, sampler.class_name)
    except ValueError as error:
        return [f"data.sampler: {error}"]
    return []

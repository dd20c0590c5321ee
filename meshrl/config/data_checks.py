"""What must hold between the ways of reading and ordering the training data."""

from meshrl.config.data_files import prompts_of_a_batch
from meshrl.config.functions import load_function, positional_problem
from meshrl.config.root import PPOConfig
from meshrl.config.sft import SupervisedConfig
from meshrl.config.tree import changed_keys


def data_problems(config: PPOConfig) -> list[str]:
    """Mixing, streaming, samplers and custom classes: what they ask for, and what does not go together."""
    return [
        *_weight_problems(config),
        *_streaming_problems(config),
        *_sampler_problems(config),
        *_custom_problems(config),
        *sample_problems(config),
    ]


def sample_problems(config: PPOConfig | SupervisedConfig) -> list[str]:
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


def _custom_problems(config: PPOConfig) -> list[str]:
    custom, data = config.data.custom_cls, config.data
    if (custom.path is None) != (custom.name is None):
        return ["data.custom_cls.path and name go together: set both"]
    if custom.path is None:
        return []
    problems = ["data.custom_cls gives all rows at once: data.streaming must be false"] if data.streaming else []
    if data.train_weights:
        problems.append("data.train_weights are for files that are read here: data.custom_cls says itself what comes")
    return problems


def custom_class_problems(config: PPOConfig) -> list[str]:
    """A class of rows that is not there, or cannot be used as one."""
    custom = config.data.custom_cls
    if custom.path is None or custom.name is None:
        return []
    try:
        found = load_function(custom.path, custom.name)
    except ValueError as error:
        return [f"data.custom_cls: {error}"]
    if problem := positional_problem(found, "files, tokenizer, config"):
        return [f"data.custom_cls: {custom.name} {problem}"]
    missing = [name for name in ("__len__", "__getitem__") if isinstance(found, type) and not hasattr(found, name)]
    return [f"data.custom_cls: {custom.name} has no {' and no '.join(missing)}"] if missing else []


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

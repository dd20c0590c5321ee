"""`meshrl migrate`: translate a script or config of verl into a command of this package, with a line for every change.

    script ── read, not run ──► words ── rules over several keys ──► key by key ──► our words ──► checked

`verl_names` translates single keys, as for every command. This file has the rules that need the whole command.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from meshrl.config import quick_yaml
from meshrl.config.keys import ACTOR, MODEL, REF, ROLLOUT, ConfigError
from meshrl.config.load import ROOTS, Loaded, load_config, parse_override, settings_of
from meshrl.config.recipe import VERL_CONFIGS, read_recipes
from meshrl.config.validate import check_config, check_notes, unsupported
from meshrl.config.validate_algorithm import SEQUENCE_LOSSES
from meshrl.config.verl_names import canonical, read_setting
from meshrl.tools.migrate.shell_script import read_script

TURNS, ASYNC = f"{ROLLOUT}.multi_turn", "async_training"


@dataclass(frozen=True)
class Program:
    """One of verl's programs: the matching command of this package, verl's config, and verl's differing defaults."""

    command: str
    config: str
    defaults: Mapping[str, Any] = field(default_factory=dict)


PROMPTS = ("data.prompt_key", "data.response_key", "data.prompt_as_message")
APART = {f"{ROLLOUT}.free_cache_engine": False, "algorithm.rollout_correction.bypass_mode": True}
PROGRAMS = {
    "verl.trainer.main_ppo": Program("train", "ppo_trainer"),
    "verl.trainer.fsdp_sft_trainer": Program(
        "sft",
        "sft_trainer",
        {
            "data.prompt_key": "question",
            "data.response_key": "answer",
            "data.prompt_as_message": True,
            "optim.betas": [0.9, 0.95],
            "optim.lr_warmup_steps_ratio": 0.1,
            "optim.lr_scheduler_type": "cosine",
            "trainer.n_gpus_per_node": 8,
        },
    ),
    "verl.trainer.sft_trainer": Program(
        "sft",
        "sft_trainer_engine",
        {"data.messages_key": "messages", "optim.lr": 1e-3, "trainer.n_gpus_per_node": 1},
    ),
    "verl.experimental.fully_async_policy.fully_async_main": Program("train", "fully_async_ppo_trainer"),
    "verl.experimental.one_step_off_policy.main_ppo": Program("train", "one_step_off_ppo_trainer", APART),
}
PROGRAMS["verl.trainer.sft_trainer_ray"] = PROGRAMS["verl.trainer.sft_trainer"]
# Keys of verl's fully asynchronous trainer whose product is the batch size here, with the defaults of verl's config.
STEPS = {
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ASYNC}.require_batches": 1,
    f"{ASYNC}.trigger_parameter_sync_step": 4,
}
OFF_POLICY = {f"{ASYNC}.staleness_threshold": 0.1, f"{ASYNC}.use_rollout_log_probs": True}


@dataclass
class Migration:
    """A command of this package, with records of all changes, losses and problems of its translation."""

    command: str
    settings: dict[str, Any] = field(default_factory=dict)  # by verl's names; after `_translate` by ours
    changes: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    to_do: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def loads(self) -> bool:
        """True if nothing was lost and the config's checks accept the command."""
        return not self.losses and not self.problems

    @property
    def words(self) -> list[str]:
        """The settings of the command as `key=value` overrides."""
        return [f"{name}={as_word(value)}" for name, value in self.settings.items()]

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a key by verl's name, or a default."""
        return self.settings.get(name, default)

    def put(self, name: str, value: Any, why: str) -> None:
        """Set a key, and record the reason as a change if the value is new."""
        if self.settings.get(name) != value:
            self.settings[name] = value
            self.changes.append(f"{name}={as_word(value)}: {why}")

    def drop(self, name: str, why: str) -> Any:
        """Remove a key, record the reason as a change if there was a value, and return the value."""
        value = self.settings.pop(name, None)
        if value is not None:
            self.changes.append(f"{name}={as_word(value)} is left out: {why}")
        return value


@dataclass(frozen=True)
class Written:
    """A value that is kept exactly as the script writes it, such as an unexpanded shell variable."""

    text: str


def as_word(value: Any) -> str:
    """Return a value as the text of an override."""
    if isinstance(value, Written):
        return value.text
    if isinstance(value, bool | None):
        return {True: "true", False: "false", None: "null"}[value]
    return str(value) if isinstance(value, str | int | float) else json.dumps(value)


def migrate_file(
    path: Path, variables: Mapping[str, str], overrides: Sequence[str], arguments: list[str] | None
) -> tuple[list[Migration], list[str]]:
    """Migrate all training commands of a script, or a config file; also return remarks on unreadable parts."""
    if path.suffix in (".yaml", ".yml"):
        return [migrate_config(path, overrides)], []
    commands, remarks = read_script(path.read_text(encoding="utf-8"), variables, arguments)
    found = []
    for call in commands:
        if (started := training_command(call)) is not None:
            program, launcher, words = started
            found.append(migrate(program, launcher, [*words, *overrides], path.parent))
    if not found:
        raise ConfigError([f"{path} starts none of verl's programs: {', '.join(PROGRAMS)}", *remarks])
    return found, remarks


def migrate_config(path: Path, overrides: Sequence[str]) -> Migration:
    """Migrate a YAML config of verl; the program is guessed from the config's keys."""
    text = path.read_text(encoding="utf-8")
    is_sft = not re.search(r"^(actor_rollout_ref|algorithm|critic):|ppo_\w*trainer", text, flags=re.MULTILINE)
    name = "sft_trainer" if is_sft else "ppo_trainer"
    if is_sft:
        program = "fsdp_sft_trainer" if "partial_pretrain" in text else "sft_trainer"
    else:
        program = "main_ppo"
    return migrate(f"verl.trainer.{program}", {}, ["--config-name", str(path.resolve()), *overrides], path.parent, name)


def training_command(call: Sequence[str]) -> tuple[str, dict[str, str], list[str]] | None:
    """Return (program, options of its launcher, arguments) if a command line starts one of verl's programs."""
    for at, word in enumerate(call):
        dotted = word.removesuffix(".py").replace("/", ".").strip(".") if word.endswith(".py") else word
        program = next((name for name in PROGRAMS if dotted == name or f".{dotted}".endswith(f".{name}")), None)
        if program is not None and (word.endswith(".py") or call[at - 1] == "-m"):
            launcher = re.findall(r"--(nnodes|nproc[-_]per[-_]node)[= ](\S+)", " ".join(call[:at]))
            return program, {name.replace("-", "_"): value for name, value in launcher}, list(call[at + 1 :])
    return None


def migrate(
    program: str, launcher: Mapping[str, str], words: Sequence[str], folder: Path = Path(), base: str | None = None
) -> Migration:
    """Migrate one command of verl. Configs that the command names are searched from `folder` upwards."""
    known = PROGRAMS[program]
    migration = Migration(known.command)
    options, overrides = _hydra_options(words)
    _read_config(migration, options, base or known.config, folder)
    for word in overrides:
        _take(migration, word)
    _place(migration, launcher)
    for name, value in known.defaults.items():
        if not any(canonical(given) == name for given in migration.settings) and not _reads_messages(migration, name):
            migration.put(name, value, f"the default of verl's {program.rpartition('.')[2]}")
    for rule in RULES[known.command]:
        rule(migration)
    if program.endswith("fully_async_main"):
        _fully_async(migration)
    elif "one_step_off_policy" in program:
        _one_step_off(migration)
    _translate(migration)
    _check(migration)
    return migration


def _reads_messages(migration: Migration, name: str) -> bool:
    """Return whether a default is a prompt key that has no effect, because whole conversations are read."""
    return name in PROMPTS and migration.get("data.multiturn.enable") in (True, "true", "True")


def _hydra_options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the arguments of a command into Hydra's own options and overrides."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    waiting = None
    short = {"-cn": "--config-name", "-cp": "--config-path"}
    for word in words:
        name, equals, value = word.partition("=")
        name = short.get(name, name)
        if waiting is not None:
            options[waiting], waiting = word, None
        elif name in ("--config-name", "--config-path", "--config-dir"):
            if equals:
                options[name] = value
            else:
                waiting = name
        elif word.strip() and not word.startswith("--"):
            overrides.append(word)
    return options, overrides


def _read_config(migration: Migration, options: Mapping[str, str], base: str, folder: Path) -> None:
    """Add the settings of the config that the command names."""
    name = options.get("--config-name", base)
    path = options.get("--config-path", options.get("--config-dir", ""))
    short = name.removesuffix(".yaml")
    file = _config_file(short, path, folder)
    if file is None and short not in VERL_CONFIGS:
        migration.losses.append(f"--config-name={name}: there is no such file in {path or folder}; give it as YAML")
        return
    for recipe in read_recipes(file or short):
        for setting in settings_of(recipe, ROOTS[migration.command]):
            if setting.value is not None:
                migration.settings[setting.name] = setting.value
    _resolve(migration)
    if migration.settings:
        migration.changes.append(f"{Path(name).name}: its keys stand in the command")


def _resolve(migration: Migration) -> None:
    """Replace OmegaConf's `${other.key}` by the other key's value; drop a value that follows an unset key."""
    for name, value in list(migration.settings.items()):
        if not isinstance(value, str) or "${" not in value:
            continue
        for _ in range(4):  # a referenced value may refer to another key
            value = re.sub(r"\$\{([\w.]+)\}", lambda m: as_word(migration.settings.get(m[1], m[0])), value)
        if "${" in value:
            migration.drop(name, "it follows a key that is not set")
        else:
            migration.settings[name] = value


def _config_file(name: str, path: str, folder: Path) -> Path | None:
    if Path(f"{name}.yaml").is_absolute():
        return Path(f"{name}.yaml") if Path(f"{name}.yaml").is_file() else Path(name)
    relative = re.sub(r"^\$\{?PWD\}?/?", "", path) if path else ""
    for above in (folder, *folder.resolve().parents, Path()):
        if (file := above / relative / f"{name}.yaml").is_file() and path:
            return file
    return None


def _take(migration: Migration, word: str) -> None:
    """Apply one override with verl's meaning: a later override wins."""
    if word.startswith("~"):
        name = word[1:].partition("=")[0]
        gone = [key for key in migration.settings if f"{key}.".startswith(f"{name}.")]
        for key in gone:
            del migration.settings[key]
        return
    name, equals, text = word.partition("=")
    if not equals:
        migration.losses.append(f"{word}: no key=value")
        return
    if "$" in text:
        migration.settings[name.lstrip("+")] = Written(text)
        return
    try:
        settings = parse_override(word, ROOTS[migration.command])
    except ConfigError as error:
        migration.losses += error.problems
        return
    for setting in settings:
        migration.settings.pop(setting.name, None)
        plain = len(settings) == 1 and setting.name == name.lstrip("+") and isinstance(setting.value, float)
        migration.settings[setting.name] = Number(setting.value, text) if plain else setting.value


class Number(float):
    """A float that is printed as it was written."""

    text: str

    def __new__(cls, value: float, text: str) -> "Number":
        made = super().__new__(cls, value)
        made.text = text.strip()
        return made

    def __str__(self) -> str:
        return self.text


def _place(migration: Migration, launcher: Mapping[str, str]) -> None:
    """Set the number of processes from torchrun's options, and Ray as the backend for several machines."""
    for option, name in (("nproc_per_node", "trainer.n_gpus_per_node"), ("nnodes", "trainer.nnodes")):
        text = launcher.get(option)
        if (text is not None and text != "1") or (text and option == "nproc_per_node"):
            value = int(text) if text.isdigit() else Written(text)
            migration.put(name, value, f"torchrun's --{option}")
    machines = [migration.get(name, 1) for name in ("trainer.nnodes", "rollout.nnodes", f"{ROLLOUT}.nnodes")]
    if any(isinstance(number, Written) or (isinstance(number, int) and number > 1) for number in machines):
        migration.put("trainer.backend", "ray", "several machines are reached by Ray")


# ---- rules that need several keys


def _least_rate(migration: Migration) -> None:
    """Replace a minimum learning rate by its ratio to the peak rate, as this package expects it."""
    for optim in ("optim", f"{ACTOR}.optim", "critic.optim"):
        least, peak = (migration.get(f"{optim}.{name}") for name in ("min_lr", "lr"))
        if isinstance(least, int | float) and isinstance(peak, int | float) and least and peak:
            migration.drop(f"{optim}.min_lr", "it is a share of lr here")
            migration.put(f"{optim}.min_lr_ratio", float(f"{least / peak:.6g}"), f"min_lr {least} of lr {peak}")


def _megatron_names(migration: Migration) -> None:
    """With engine=megatron, move keys of section `engine` to `engine.megatron`, also keys that FSDP shares."""
    if migration.get("engine") != "megatron":
        return
    for name in ("param_offload", "optimizer_offload", "grad_offload", "context_parallel_size", "dtype"):
        if f"engine.{name}" in migration.settings:
            value = migration.settings.pop(f"engine.{name}")
            migration.put(f"engine.megatron.{name}", value, f"engine.{name} of Megatron's engine")


def _sequence_loss(migration: Migration) -> None:
    """Set the loss aggregation that verl uses for sequence losses: a mean over sequences, whatever loss_agg_mode is."""
    loss = migration.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    name = f"{ACTOR}.loss_agg_mode"
    if loss in SEQUENCE_LOSSES and migration.get(name, "token-mean") == "token-mean":
        migration.put(name, "seq-mean-token-mean", f"what verl computes for {loss} whatever the key says")


def _converted_weights(migration: Migration) -> None:
    """Replace Megatron checkpoints by Hugging Face folders, and add the commands that convert them."""
    roles = {ACTOR: MODEL, REF: f"{REF}.model", "critic": "critic.model", "reward_model": "reward_model.model"}
    folders: dict[str, Any] = {}
    for role, model in roles.items():
        uses = migration.get(f"{role}.megatron.use_dist_checkpointing") is True
        if not uses or f"{role}.megatron.dist_checkpointing_path" not in migration.settings:
            continue
        path = migration.drop(f"{role}.megatron.dist_checkpointing_path", "it is converted before the run, see to do")
        migration.drop(f"{role}.megatron.use_dist_checkpointing", "weights are read from Hugging Face folders")
        folders[role] = path
        out = f"{as_word(path).rstrip('/')}-hf"
        like = as_word(migration.get(model + ".path", migration.get(f"{MODEL}.path", "MODEL")))
        step = f"meshrl convert {as_word(path)} {out} --like {like}"
        if step not in migration.to_do:
            migration.to_do.append(step)
        if role != REF or path != folders.get(ACTOR):
            migration.put(f"{model}.path", out, f"the weights of {as_word(path)} as a Hugging Face folder")
            if role == ACTOR and like != "MODEL":
                migration.put(f"{MODEL}.tokenizer_path", like, "the tokenizer of the model as it was")


def _server(migration: Migration) -> None:
    """Use one vLLM server for a tensor-parallel rollout with tool turns or with stale samples.

    The ranks of one rollout cannot receive turns at the same time, unless one server represents all ranks.
    """
    cut = migration.get(f"{ROLLOUT}.tensor_model_parallel_size", 1)
    ahead = migration.get(f"{ASYNC}.staleness_threshold") or migration.get(f"{ASYNC}.max_staleness")
    is_cut = migration.get(f"{ROLLOUT}.name") == "vllm" and isinstance(cut, int) and cut > 1
    if is_cut and (migration.get(f"{TURNS}.enable") is True or ahead):
        migration.put(f"{ROLLOUT}.as_server", True, "one server for all ranks of a rollout")


def _spread_experts(migration: Migration) -> None:
    """Set vLLM's tensor parallelism to its expert parallelism, because vLLM spreads experts over the same ranks."""
    spread, cut = migration.get(f"{ROLLOUT}.expert_parallel_size", 1), f"{ROLLOUT}.tensor_model_parallel_size"
    if migration.get(f"{ROLLOUT}.name") == "vllm" and isinstance(spread, int) and spread > 1:
        migration.put(cut, spread, f"vLLM spreads experts over as many ranks ({spread}) as cut the rest")


def _validation(migration: Migration) -> None:
    """Enable sampling in validation if val_kwargs.temperature is positive: verl's agent loop ignores do_sample."""
    temperature, name = migration.get(f"{ROLLOUT}.val_kwargs.temperature"), f"{ROLLOUT}.val_kwargs.do_sample"
    if isinstance(temperature, int | float) and temperature > 0:
        migration.put(name, True, f"verl validates at val_kwargs.temperature={temperature} whatever do_sample says")


def _no_adapters(migration: Migration) -> None:
    """Drop the settings of adapters whose rank is 0."""
    for model in (MODEL, "critic.model", "model"):
        ranks = [migration.get(f"{model}.{name}") for name in ("lora_rank", "lora.rank")]
        if any(rank not in (None, 0) for rank in ranks) or migration.get(f"{model}.lora_adapter_path"):
            continue
        names = ("lora_alpha", "target_modules", "exclude_modules")
        for name in (*(f"{model}.{name}" for name in names), *_below(migration, f"{model}.lora.")):
            migration.drop(name, "there is no adapter")


def _below(migration: Migration, prefix: str) -> list[str]:
    return [name for name in migration.settings if name.startswith(prefix)]


def _checkpoints(migration: Migration) -> None:
    """Add the model to checkpoints, which must suffice to continue; drop a resume folder that verl does not read."""
    for role in (ACTOR, "critic"):
        name = f"{role}.checkpoint.save_contents"
        contents = migration.get(name)
        if isinstance(contents, list) and contents and "model" not in contents:
            migration.put(name, ["model", *contents], "a checkpoint must hold the model to go on from")
    if migration.get("trainer.resume_mode", "auto") != "resume_path" and migration.get("trainer.resume_from_path"):
        migration.drop("trainer.resume_from_path", "verl too reads it with trainer.resume_mode=resume_path only")


def _profiler(migration: Migration) -> None:
    """Drop the profiler's settings if no steps are set, because verl then profiles nothing."""
    if not migration.get("global_profiler.steps") and not migration.get("trainer.profile_steps"):
        for name in _below(migration, "global_profiler."):
            migration.drop(name, "without steps verl profiles nothing either")


def _reward(migration: Migration) -> None:
    """Add a note to choose a reward function: verl chooses it by the data's source, this package by name."""
    names = ("custom_reward_function.path", "reward.custom_reward_function.path", "reward.name")
    if not any(migration.get(name) for name in names) and migration.get("reward_model.enable") is not True:
        migration.to_do.append(
            "set reward.name=math_verify (for answers such as GSM8K's and MATH's) or custom_reward_function.path: verl "
            "chooses a function by the data's source, here one is named"
        )


def _clips(migration: Migration) -> None:
    """Set both clip bounds to verl's defaults: in verl, clip_ratio alone does not change the bounds."""
    clip = migration.get(f"{ACTOR}.clip_ratio")
    sides = [f"{ACTOR}.clip_ratio_{side}" for side in ("low", "high")]
    if clip is not None and clip != 0.2:
        for side in sides:
            if side not in migration.settings:
                migration.put(side, 0.2, f"verl's default, which clip_ratio={as_word(clip)} does not change there")


def _conversations(migration: Migration) -> None:
    """Drop the settings of conversations unless data.multiturn.enable is on, as in verl."""
    if "data.multiturn.enable" in migration.settings and migration.get("data.multiturn.enable") not in (True, "true"):
        for name in _below(migration, "data.multiturn."):
            migration.drop(name, "data.multiturn.enable is off")


def _critic(migration: Migration) -> None:
    """Drop the critic's engine in runs without a critic, because verl's configs choose an engine in any case."""
    if migration.get("algorithm.adv_estimator", "gae") != "gae" and migration.get("critic.enable") is not True:
        migration.drop("critic.strategy", "there is no critic")


def _one_step_off(migration: Migration) -> None:
    if migration.get("rollout.nnodes") or migration.get(f"{ROLLOUT}.nnodes"):
        migration.put("actor_rollout_ref.hybrid_engine", False, "the rollout has devices of its own")
        migration.put(f"{ASYNC}.max_staleness", 1, "one step off policy")
        _server(migration)


def _fully_async(migration: Migration) -> None:
    """Translate batch sizes and step counts of verl's fully asynchronous trainer.

    verl counts samples, and counts updates between two weight syncs. In this package every step syncs the weights.
    """
    migration.put("actor_rollout_ref.hybrid_engine", False, "the rollout has devices of its own")
    for name, value in OFF_POLICY.items():
        migration.settings.setdefault(name, value)
    sizes = [migration.settings.get(name, default) for name, default in STEPS.items()]
    for name in list(STEPS)[1:]:
        migration.drop(name, "it is a part of data.train_batch_size")
    migration.drop("data.gen_batch_size", "prompts are begun as devices are free")
    migration.settings.pop("data.train_batch_size", None)  # verl has 0 here; the value is set below
    if not all(isinstance(size, int) for size in sizes):
        migration.losses.append(f"{' * '.join(STEPS)} must be numbers to know data.train_batch_size")
        return
    batch = math.prod(sizes)
    words = " * ".join(f"{name.rpartition('.')[2]} {size}" for name, size in zip(STEPS, sizes, strict=True))
    migration.put("data.train_batch_size", batch, f"{words}: prompts between two syncs of the weights")
    total = migration.settings.pop("rollout.total_rollout_steps", None)
    if isinstance(total, int):
        steps = max(1, total // batch)
        migration.put("trainer.total_training_steps", steps, f"rollout.total_rollout_steps {total} / {batch}")
    if (freq := migration.drop("rollout.test_freq", "trainer.test_freq counts syncs of the weights here")) is not None:
        migration.put("trainer.test_freq", freq, "rollout.test_freq")
    save, updates = migration.get("trainer.save_freq", -1), sizes[2]
    if isinstance(save, int) and save > 0 and updates > 1:
        migration.put("trainer.save_freq", max(1, save // updates), f"{save} updates are so many steps of {updates}")
    if migration.settings.pop(f"{ASYNC}.compute_prox_log_prob", False) is True:
        migration.settings[f"{ASYNC}.use_rollout_log_probs"] = False
        migration.changes.append(f"{ASYNC}.compute_prox_log_prob=true: old log-probs are the trainer's own")
    if not migration.get(f"{ASYNC}.staleness_threshold"):
        migration.drop(f"{ASYNC}.partial_rollout", "nothing is begun early")
    _server(migration)


Rule = Callable[[Migration], None]
RULES: dict[str, tuple[Rule, ...]] = {
    "train": (
        _least_rate,
        _no_adapters,
        _sequence_loss,
        _converted_weights,
        _spread_experts,
        _server,
        _validation,
        _checkpoints,
        _profiler,
        _reward,
        _clips,
        _critic,
    ),
    "sft": (_conversations, _no_adapters, _least_rate, _megatron_names),
}


# ---- translation of single keys, and the final checks


def _translate(migration: Migration) -> None:
    """Translate verl's names and values into this package's.

    Keys that cannot be set here are recorded as losses. Keys that are ignored here are recorded as changes.
    """
    given, migration.settings = migration.settings, {}
    made: list[tuple[int, str, Any]] = []
    for name, value in given.items():
        reading = read_setting(name, value)
        word = f"{name}={as_word(value)}"
        if reading.problem and not reading.needs:
            migration.losses.append(reading.problem)
        elif reading.name is None:
            if reading.note:
                migration.changes.append(f"{word} is left out: {reading.note.partition(': ')[2]}")
        elif reading.agrees or reading.over_ranks or reading.needs:
            made.append((0, name, value))  # read later, when all keys are known
        elif problem := _unknown(reading.name, migration.command):
            migration.losses.append(problem.replace(" (command line)", f", for {word}"))
        else:
            changed = reading.name != name or reading.value != value
            if changed:
                migration.changes.append(f"{word} is now {reading.name}={as_word(reading.value)}")
            made.append((-reading.weak, reading.name, reading.value))
    # Weak entries come first, so that other entries for the same key override them.
    for _, ours, value in sorted(made, key=lambda entry: entry[0]):
        migration.settings.pop(ours, None)
        migration.settings[ours] = value


@cache
def _unknown(name: str, command: str) -> str | None:
    """Return the reason why a key of this name cannot be set, or None."""
    try:
        load_config(None, [f"{name}=null"], ROOTS[command])
    except ConfigError as error:
        if error.problems[0].startswith(("unknown key", f"{name} is a section")):
            return error.problems[0]
    return None


def _check(migration: Migration) -> None:
    """Load the migrated command, and record its problems and notes."""
    try:
        words = [word for word in migration.words if "$" not in word or _is_text(word, migration.command)]
        loaded: Loaded[Any] = load_config(None, words, ROOTS[migration.command])
    except ConfigError as error:
        migration.problems = error.problems
        return
    config = loaded.config
    migration.problems = [*unsupported(config), *check_config(config, check_files=False)]
    migration.notes = [*loaded.notes, *check_notes(config, loaded.sources)]


def _is_text(word: str, command: str) -> bool:
    """Return whether a value that the shell fills in may stay unexpanded for the checks."""
    try:
        load_config(None, [word], ROOTS[command])
    except ConfigError:
        return False
    return True


# ---- rendering as text


def script_text(migration: Migration) -> str:
    """Return the command as a shell script, preceded by a comment line for each change and each loss."""
    command = " \\\n    ".join([f"meshrl {migration.command}", *map(_quoted, migration.words)])
    return "\n".join([*_comments(migration), command])


def yaml_text(migration: Migration) -> str:
    """Return the settings as a YAML recipe, preceded by the same comment lines."""
    tree: dict[str, Any] = {}
    for name, value in migration.settings.items():
        *above, last = name.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value.text if isinstance(value, Written) else float(value) if isinstance(value, Number) else value
    return "\n".join([*_comments(migration), quick_yaml.as_text(tree, sort_keys=False).rstrip("\n")])


def _comments(migration: Migration) -> list[str]:
    parts = (
        ("changed", migration.changes), ("lost", migration.losses), ("to do", migration.to_do),
        ("still refused", migration.problems), ("note", migration.notes),
    )  # fmt: skip
    return [f"# {title}: {line}" for title, lines in parts for line in lines]


def _quoted(word: str) -> str:
    """Quote a word for the shell. Variables in the word can still be expanded."""
    if re.fullmatch(r"[\w@%+=:,./-]+", word):
        return word
    if "$" not in word:
        return "'" + word.replace("'", "'\"'\"'") + "'"
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'

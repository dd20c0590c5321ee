"""The `meshrl` command. Heavy modules are imported only by the command that needs them, so `--help` is fast."""

import argparse
import os
import select
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import meshrl
from meshrl.environment import SUPERVISED_PIPE, TRACEBACK, switch
from meshrl.imports import importing
from meshrl.serving.serve_command import add_generate_options, add_serve_options
from meshrl.telemetry.report_command import add_report_options, add_timeline_options, add_watch_options
from meshrl.tools.doctor.doctor_command import add_doctor_options
from meshrl.tools.plan.plan_command import add_options as add_planner_options
from meshrl.weights.sync_command import add_plan_options

if TYPE_CHECKING:
    from meshrl.config import Loaded
    from meshrl.config.trainer import RunConfig

CONFIG_PROBLEM, RUN_ERROR, INTERRUPTED = 2, 1, 130
OVERRIDES_HELP = "recipe file or shipped name, then overrides such as trainer.seed=2"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    0: success; 1: the run failed; 2: config or usage; 75: infrastructure failed; 130: interrupted; 143: stopped by
    SIGTERM.
    """
    arguments = _parse(argv)
    try:
        with_traceback = switch(TRACEBACK)
    except ValueError as error:
        _complain(str(error))
        return CONFIG_PROBLEM
    command: Callable[[argparse.Namespace], int | None] = arguments.command
    try:
        return command(arguments) or 0
    except KeyboardInterrupt as error:
        _complain(f"interrupted{f': {error}' * bool(str(error))}")
        return INTERRUPTED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():  # as in `meshrl config | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        problems = getattr(error, "problems", None)  # ConfigError, without importing the config for it
        if problems is not None:
            if with_traceback:
                sys.stderr.write(traceback.format_exc())
            for problem in problems:
                _complain(problem)
            # A service that did not answer may answer later (exit code 75); other problems with the config will stay.
            tried = _exit_code_of(error)
            return CONFIG_PROBLEM if tried == RUN_ERROR else tried
        tip = _advice(error)
        if with_traceback or not (tip or getattr(error, "needs_no_traceback", False)):
            sys.stderr.write(traceback.format_exc())
        _complain(f"the run failed: {type(error).__name__}: {error}")
        if tip:
            _complain(tip)
        return _exit_code_of(error)
    except BaseException as error:
        if (code := getattr(error, "exit_code", None)) is None:
            raise
        _complain(str(error))  # an end that was requested, such as by SIGTERM
        return int(code)


def _reader_has_gone() -> bool:
    """Return whether standard output is a pipe that its reader has closed.

    A run has other pipes, to its workers, whose errors must not end the command silently.
    """
    try:
        output = sys.stdout.fileno()
    except OSError:  # not a real file
        return False
    poll = select.poll()
    poll.register(output, 0)
    return bool(poll.poll(0))  # `poll` always reports errors and hang-ups


def _exit_code_of(error: Exception) -> int:
    """Return 75 if infrastructure ended the run, because the same command may work later; otherwise 1.

    The check is skipped if no run was started, so that errors of light commands import nothing heavy.
    """
    if "meshrl.trainer.launch" not in sys.modules:
        return RUN_ERROR
    from meshrl.trainer.fault_tolerance import INFRASTRUCTURE_EXIT, kind_of

    return INFRASTRUCTURE_EXIT if kind_of(error).may_be_tried_again else RUN_ERROR


def _advice(error: Exception) -> str | None:
    """Return what to do about a machine that ran out of room or memory, or None."""
    if "meshrl.trainer.launch" not in sys.modules:
        return None
    from meshrl.trainer.fault_tolerance import advice

    return advice(error)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    # argparse takes positionals only in one block, but overrides may also follow an option.
    stray = [word for word in rest if word.startswith("-") or not hasattr(arguments, "words")]
    if stray:
        dashed = next((w for w in stray if "." in w.partition("=")[0] and hasattr(arguments, "words")), None)
        hint = f"; keys are set without dashes: {dashed.lstrip('-').partition('=')[0]}=VALUE" if dashed else ""
        parser.error(f"unrecognized arguments: {' '.join(stray)}{hint}")
    if rest:
        arguments.words += rest
    if getattr(arguments, "config_name", None):
        arguments.words = _named_config(parser, arguments)
    elif getattr(arguments, "config_path", None):
        parser.error("--config-path needs --config-name")
    return arguments


def _named_config(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """Return the command's words with the recipe that Hydra's options name in front."""
    from meshrl.config.recipe import is_recipe

    words: list[str] = arguments.words
    if words and is_recipe(words[0]):
        parser.error(f"--config-name={arguments.config_name} and the recipe {words[0]}: name one of them")
    name = arguments.config_name.removesuffix(".yaml")
    file = os.path.join(arguments.config_path or "", f"{name}.yaml")
    return [file if os.path.isfile(file) else name, *words]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshrl", description="RL post-training for language models on any device mesh."
    )
    parser.add_argument("--version", action="version", version=f"meshrl {meshrl.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def add(name: str, command: Callable[[argparse.Namespace], int | None], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        return added

    _hydra_options(_run_options(add("train", _train, "train a policy with reinforcement learning"), halves=True))
    _hydra_options(_run_options(add("sft", _sft, "fine-tune a model on demonstrations"), halves=False))
    _run_options(
        add("prefer", _prefer, "learn from compared or judged answers: DPO, KTO, reward models"),
        halves=False,
    )
    _demo_options(add("demo", _demo, "train a tiny model on a toy task, from nothing to a picture"))
    _config_options(add("config", _config, "print a resolved config, with where each value came from"))
    _verify_options(add("verify", _verify, "check that a layout computes what one process computes"))
    add_serve_options(add("serve", _serve, "serve a model over HTTP as OpenAI's API does"))
    add_generate_options(add("generate", _generate, "answer the prompts of a file; goes on where it was ended"))
    add_planner_options(add("plan", _plan, "show what a recipe will take on some devices: memory, traffic, time"))
    add_plan_options(add("plan-sync", _plan_sync, "show what a weight sync between two layouts moves"))
    add_doctor_options(add("doctor", _doctor, "look whether this machine and its cluster are fit for a run"))
    _convert_options(
        add("convert", _convert, "turn a checkpoint into a Hugging Face folder, or such a folder into a checkpoint")
    )
    _migrate_options(add("migrate", _migrate, "turn a script or config of verl into a command for this package"))
    _replay_options(add("replay", _replay, "take a past step of a run again and compare its numbers; explain a token"))
    add_timeline_options(add("timeline", _timeline, "draw what every process did in a step"))
    add_report_options(add("report", _report, "draw the curves and the report of a run, or compare several runs"))
    add_watch_options(add("watch", _watch, "serve the report of a run on this machine, live"))
    return parser


def _hydra_options(parser: argparse.ArgumentParser) -> None:
    """Add the options by which verl's scripts name a config."""
    parser.add_argument("--config-name", "-cn", metavar="NAME", help="a recipe, by the words of verl's scripts")
    parser.add_argument("--config-path", "-cp", metavar="DIR", help="the folder of that recipe")


def _run_options(parser: argparse.ArgumentParser, halves: bool) -> argparse.ArgumentParser:
    parser.add_argument("words", nargs="*", metavar="RECIPE key=value", help=OVERRIDES_HELP)
    parser.add_argument("--dry-run", action="store_true", help="check everything, print layout and batch units, end")
    parser.add_argument(
        "--skip-files", action="store_true", help="with --dry-run: don't look for data, model and packages"
    )
    parser.add_argument(
        "--supervise", action="store_true", help="start the run again if it is killed (trainer.max_restarts)"
    )
    if halves:
        half = parser.add_mutually_exclusive_group()
        half.add_argument("--rollout-only", action="store_true", help="generate and score batches, train nothing")
        half.add_argument("--train-only", metavar="BATCH", help="train on a kept batch (or a folder of them)")
    return parser


def _demo_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides for the demo's recipe")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, data and sampling")
    parser.add_argument("--control", action="store_true", help="coin-toss rewards: must not learn")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo", help="how to learn (default: grpo)")
    parser.add_argument("--task", choices=("sort", "calculator"), default="sort", help="calculator: GRPO with a tool")
    parser.add_argument("--out", default="outputs/demo", metavar="DIR", help="folder for the results")


def _config_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="RECIPE key=value", help=OVERRIDES_HELP)
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--sft", dest="kind", action="store_const", const="sft", help="a config of meshrl sft")
    other.add_argument("--prefer", dest="kind", action="store_const", const="prefer", help="a config of meshrl prefer")
    parser.set_defaults(kind="train")
    parser.add_argument("--only", default="", metavar="PREFIX", help="only keys below this one")
    parser.add_argument("--doc", action="store_true", help="with a line of documentation per key")


def _verify_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="key=value", help="engine keys, such as context_parallel_size=2")
    parser.add_argument("--strategy", default="fsdp2", help="training engine (default: fsdp2)")
    parser.add_argument("--world", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--model", metavar="DIR", help="take the shape of this model; default: four tiny families")
    parser.add_argument(
        "--layers",
        type=int,
        help="with --model: keep this many layers (default: 2; with linear attention at least one of each kind)",
    )


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", help="a run's folder, a checkpoint (global_step_N), a Hugging Face folder, or Megatron's torch_dist"
    )
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--role", choices=("actor", "critic", "model"), help="of a checkpoint (default: the policy)")
    parser.add_argument("--dtype", help="of the weights, such as bf16 (default: as stored)")
    parser.add_argument("--adapter", action="store_true", help="LoRA: peft's folder instead of merged weights")
    parser.add_argument("--like", metavar="DIR", help="for Megatron's: a Hugging Face folder of the same model")
    parser.add_argument("--shard-mb", type=int, help="largest file (default: 4096)")
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="make plain data of a run's folder, checkpoint, batch or weights that are pickles, which run what they "
        "say when they are read",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is at OUT")


def _migrate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="SCRIPT.sh|CONFIG.yaml", help="it is read, and nothing in it is run")
    parser.add_argument(
        "words", nargs="*", metavar="NAME=value key.of.verl=value", help="the script's variables, and further overrides"
    )
    parser.add_argument("--args", nargs="+", metavar="ARG", help="the script's own arguments, $1 and so on")
    parser.add_argument("--yaml", action="store_true", help="print a recipe instead of a command")


def _replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="folder of the run")
    parser.add_argument("step", type=int, help="the step")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides of the run's config")
    parser.add_argument("--token", metavar="SAMPLE,TOKEN", help="explain this token of this sample, both from 0")


def _train(arguments: argparse.Namespace) -> int | None:
    from meshrl.config.rl import num_devices

    _end_with_parent()
    loaded = _load(arguments.words, "train")
    if _ready(loaded, arguments):
        if arguments.supervise:
            return _supervised("train", arguments, loaded)
        apart = [] if loaded.config.actor_rollout_ref.hybrid_engine else ["meshrl.workers.generation"]
        _warm_up(loaded.config.trainer, num_devices(loaded.config), "meshrl.workers.actor", *apart)
        with importing():
            from meshrl.trainer.launch import train
            from meshrl.trainer.replay import rollout_only, train_only

        if arguments.rollout_only:
            _say(f"batches: {rollout_only(loaded.config, loaded.sources)}")
        elif arguments.train_only:
            train_only(loaded.config, arguments.train_only, loaded.sources)
        else:
            train(loaded.config, loaded.sources)
    return None


def _warm_up(trainer: "RunConfig", processes: int, *modules: str) -> None:
    """Let the process from which local workers are forked import their modules, while this process imports its own."""
    if trainer.backend == "local" and (processes > 1 or len(modules) > 1):
        from meshrl.controller import warm_up

        warm_up(*modules)


def _end_with_parent() -> None:
    """End a run that `--supervise` has started if the supervising command ends."""
    if SUPERVISED_PIPE in os.environ:
        from meshrl.trainer.fault_tolerance import end_with_parent

        end_with_parent()


def _supervised(command: str, arguments: argparse.Namespace, loaded: "Loaded[Any]") -> int:
    """Run the command as a supervised child and return its exit code.

    Options that select a part of a run are refused, because only the command and its words are passed to the child.
    """
    if getattr(arguments, "rollout_only", False) or getattr(arguments, "train_only", None):
        from meshrl.config.keys import ConfigError

        raise ConfigError(["--supervise is for whole runs, without --rollout-only and --train-only"])
    from meshrl.trainer.fault_tolerance import supervise

    return supervise([command, *arguments.words], loaded.config.trainer, _complain)


def _sft(arguments: argparse.Namespace) -> int | None:
    return _train_supervised("sft", "meshrl.workers.supervised_worker", arguments)


def _prefer(arguments: argparse.Namespace) -> int | None:
    return _train_supervised("prefer", "meshrl.workers.supervised_worker", arguments)


def _train_supervised(command: str, worker: str, arguments: argparse.Namespace) -> int | None:
    _end_with_parent()
    loaded = _load(arguments.words, command)
    if _ready(loaded, arguments):
        if arguments.supervise:
            return _supervised(command, arguments, loaded)
        _warm_up(loaded.config.trainer, loaded.config.trainer.world_size, worker)
        with importing():
            from meshrl.trainer.launch import train_supervised

        train_supervised(loaded.config, loaded.sources)
    return None


def _demo(arguments: argparse.Namespace) -> None:
    if arguments.task == "calculator":
        if arguments.control or arguments.algorithm != "grpo":
            from meshrl.config.keys import ConfigError

            raise ConfigError(["meshrl demo --task calculator has no --control and learns by grpo only"])
        with importing():
            from meshrl.trainer.calculator_demo import main as calculator

        calculator(arguments.out, seed=arguments.seed, overrides=arguments.words)
        return
    with importing():
        from meshrl.trainer.demo import main as demo

    options = {"seed": arguments.seed, "control": arguments.control, "algorithm": arguments.algorithm}
    demo(arguments.out, **options, overrides=arguments.words)


def _verify(arguments: argparse.Namespace) -> int:
    from meshrl.tools.verify import verify

    if arguments.layers is not None and arguments.model is None:
        from meshrl.config.keys import ConfigError

        raise ConfigError([f"--layers {arguments.layers} is for the shape of your own model: give it with --model DIR"])
    overrides = [f"strategy={arguments.strategy}", *arguments.words]
    if "strategy=megatron" in overrides:
        import torch

        from meshrl.config.keys import ConfigError

        if not torch.cuda.is_available():
            raise ConfigError(["strategy=megatron needs CUDA devices, and torch sees none here: use fsdp2 on a CPU"])
    layers = {} if arguments.layers is None else {"layers": arguments.layers}
    same = verify(arguments.world, overrides, model=arguments.model, **layers)
    return 0 if same else RUN_ERROR


def _config(arguments: argparse.Namespace) -> None:
    from meshrl.config.show import to_yaml

    loaded = _load(arguments.words, arguments.kind)
    _say(to_yaml(loaded.config, loaded.sources, only=arguments.only, docs=arguments.doc).rstrip("\n"))


def _serve(arguments: argparse.Namespace) -> int | None:
    from meshrl.config.keys import told_without_traceback
    from meshrl.models.hub import folder_of
    from meshrl.rollout.build import open_rollout
    from meshrl.serving.serve import check_address, serve
    from meshrl.serving.serve_command import engine_options, server_settings

    with told_without_traceback():
        settings, options = server_settings(arguments), engine_options(arguments)
    try:
        check_address(arguments.host, arguments.port)
        opened = open_rollout(folder_of(arguments.model, _note), options)
        serve(opened, settings, arguments.host, arguments.port, _say)
    except (OSError, ValueError, ImportError) as error:
        _complain(str(error))
        return RUN_ERROR
    return None


def _generate(arguments: argparse.Namespace) -> int | None:
    from meshrl.config.keys import told_without_traceback
    from meshrl.models.hub import folder_of
    from meshrl.serving.offline import Job, generate
    from meshrl.serving.serve_command import engine_options, sampling_params

    with told_without_traceback():
        params, options = sampling_params(arguments), engine_options(arguments)
        arguments.model = folder_of(arguments.model, _note)
        job = Job.from_arguments(arguments, params)
    try:
        report = generate(job, options)
    except (OSError, ValueError, ImportError) as error:
        _complain(str(error))
        return RUN_ERROR
    _say(report)
    return None


def _plan(arguments: argparse.Namespace) -> int | None:
    from meshrl.tools.plan.plan_command import planned

    try:
        _say(planned(arguments, lambda line: _complain(f"{line} ...")))
    except (OSError, ValueError) as error:
        for line in str(error).splitlines():
            _complain(line)
        return CONFIG_PROBLEM
    return None


def _plan_sync(arguments: argparse.Namespace) -> int | None:
    from meshrl.weights.sync_command import planned

    try:
        _say("\n".join(planned(arguments)))
    except (OSError, ValueError) as error:
        _complain(str(error))
        return CONFIG_PROBLEM
    return None


def _doctor(arguments: argparse.Namespace) -> int:
    from meshrl.tools.doctor.doctor_command import doctor

    try:
        return doctor(arguments, _say)
    except (OSError, ValueError) as error:
        _complain(str(error))
        return CONFIG_PROBLEM


def _convert(arguments: argparse.Namespace) -> int | None:
    from meshrl.trainer.convert import convert

    try:
        _say(convert(arguments))
    except (OSError, ValueError, RuntimeError) as error:
        _complain(f"nothing was converted: {error}")
        return RUN_ERROR
    return None


def _migrate(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from meshrl.config.keys import ConfigError
    from meshrl.tools.migrate.migrate import migrate_file, script_text, yaml_text

    named = [word.partition("=") for word in arguments.words]
    variables = {name: value for name, equals, value in named if equals and name.isidentifier()}
    overrides = [word for word in arguments.words if word.partition("=")[0] not in variables]
    try:
        migrations, remarks = migrate_file(Path(arguments.file), variables, overrides, arguments.args)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([str(error)]) from error
    _say("\n".join(f"# not known: {remark}" for remark in remarks) or f"# from {arguments.file}")
    for migration in migrations:
        _say(yaml_text(migration) if arguments.yaml else script_text(migration))
    return 0 if all(migration.loads for migration in migrations) else CONFIG_PROBLEM


def _replay(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from meshrl.config.keys import ConfigError, told_without_traceback
    from meshrl.trainer.replay import replay, show

    with told_without_traceback():
        token = _sample_and_token(arguments.token) if arguments.token else None
    try:
        replayed = replay(arguments.run_dir, arguments.step, token, arguments.words)
        show(replayed, token, Console())
    except ConfigError:
        raise
    except (OSError, ValueError, IndexError) as error:
        _complain(str(error))
        return RUN_ERROR
    return RUN_ERROR if replayed.differences else 0


def _sample_and_token(text: str) -> tuple[int, int]:
    sample, comma, token = text.partition(",")
    if not (comma and sample.isdecimal() and token.isdecimal()):
        raise ValueError(f"--token {text!r} must be two numbers from 0, SAMPLE,TOKEN, such as 3,17")
    return int(sample), int(token)


def _report(arguments: argparse.Namespace) -> int | None:
    from meshrl.telemetry.report_command import write_pages

    try:
        _say(write_pages(arguments))
    except (OSError, ValueError) as error:
        _complain(str(error))
        return RUN_ERROR
    return None


def _watch(arguments: argparse.Namespace) -> int | None:
    from meshrl.telemetry.report_command import watch_run

    try:
        watch_run(arguments, _say)
    except (OSError, ValueError) as error:
        _complain(str(error))
        return RUN_ERROR
    return None


def _timeline(arguments: argparse.Namespace) -> int | None:
    from meshrl.telemetry.report_command import drawn_timeline

    try:
        path = drawn_timeline(arguments)
    except (OSError, ValueError) as error:
        _complain(str(error))
        return RUN_ERROR
    _say(f"wrote {path}")
    return None


def _load(words: Sequence[str], command: str) -> "Loaded[Any]":
    """Load the config of a command; the first word is the recipe unless it sets a key."""
    from meshrl.config import load_config
    from meshrl.config.load import ROOTS
    from meshrl.config.recipe import is_recipe

    has_recipe = bool(words) and is_recipe(words[0])
    loaded: Loaded[Any] = load_config(
        words[0] if has_recipe else None, words[1:] if has_recipe else words, ROOTS[command]
    )
    for note in loaded.notes:
        _complain(f"note: {note}")
    return loaded


def _ready(loaded: "Loaded[Any]", arguments: argparse.Namespace) -> bool:
    """Check the config and return True; on a dry run print the layout instead, and return False."""
    from meshrl.config import check_config, ensure_runnable
    from meshrl.config.show import summary_lines
    from meshrl.config.validate import check_notes
    from meshrl.models.hub import resolve_models

    if not arguments.skip_files:
        resolve_models(loaded.config, loaded.sources, _note, may_download=not arguments.dry_run)
    for note in check_notes(loaded.config, loaded.sources):
        _complain(f"note: {note}")
    if not arguments.dry_run:
        if arguments.skip_files:
            from meshrl.config.keys import ConfigError

            raise ConfigError(["--skip-files is for --dry-run: a run needs its data, model and packages"])
        ensure_runnable(loaded.config)
        return True
    if not check_config(loaded.config, check_files=False):
        _say("\n".join(summary_lines(loaded.config)))
    ensure_runnable(loaded.config, check_files=not arguments.skip_files)
    if not arguments.skip_files:
        for line in _sandboxes(loaded.config):
            _say(line)
    _say("dry run: the config is fine")
    return False


def _sandboxes(config: Any) -> Iterator[str]:
    """Yield which sandbox would run the programs that the reward function `code` scores; raise if none would."""
    from meshrl.config.keys import told_without_traceback
    from meshrl.config.reward import built_in_arguments

    reward = getattr(config, "reward", None)  # fine-tuning has none
    for where, kwargs in (built_in_arguments(reward, "code") if reward is not None else {}).items():
        from meshrl.rewards.functions import describe_sandbox

        with told_without_traceback(where):
            found = describe_sandbox(kwargs)
        yield f"programs ({where}) run in the sandbox {found}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _note(text: str) -> None:
    _complain(f"note: {text}")


def _complain(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(f"meshrl: {text}\n")


if __name__ == "__main__":
    sys.exit(main())

"""Record the commands that the scripts of a verl checkout run: `python extract_verl_scripts.py CHECKOUT`.

Bash itself runs each script, in a copy of the checkout, with a PATH on which every command is a fake: those that start
verl write down their arguments, and all others do nothing. The result is `verl_scripts.json`, which the tests read.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

OUT = Path(__file__).with_name("verl_scripts.json")
FOLDERS = ("examples", "tests/special_e2e", "tests/special_npu", "verl/experimental")
# Configs of verl whose keys are recorded, and the files that their sections come from.
CONFIGS = {
    "_generated_ppo_trainer": {},
    "_generated_ppo_megatron_trainer": {},
    "sft_trainer": {},
    "sft_trainer_engine": {"model": "model/hf_model", "engine": "engine/fsdp", "optim": "optim/fsdp"},
}
# Programs of verl that train, and what the scripts are called here.
KINDS = {
    "verl.trainer.main_ppo": "ppo",
    "verl.trainer.fsdp_sft_trainer": "sft",
    "verl.trainer.sft_trainer": "sft",
    "verl.trainer.sft_trainer_ray": "sft",
    "verl.experimental.fully_async_policy.fully_async_main": "async",
    "verl.experimental.one_step_off_policy.main_ppo": "async",
}
STARTERS = ("python", "python3", "torchrun", "ray", "accelerate", "srun", "nohup", "sudo", "timeout")
# Commands that scripts compute words with; everything else does nothing.
REAL = ("basename", "dirname", "cat", "tr", "cut", "sed", "grep", "head", "tail", "seq", "expr", "wc", "awk")
RECORDER = """#!/bin/bash
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n\\0'; } >> "$RECORD"
"""
HOME = "/home/user"
# What scripts read that they do not set: the cluster's size, and paths that their user fills in.
FROM_THE_USER = {
    "ARNOLD_WORKER_GPU": "8", "ARNOLD_WORKER_NUM": "4", "SLURM_GPUS_PER_NODE": "8", "SLURM_NNODES": "4",
    "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8", "sp_size": "4", "use_kl_loss": "True",
    "gsm8k_train_path": "gsm8k/train.parquet", "gsm8k_test_path": "gsm8k/test.parquet", "data_path": "train.parquet",
    "TRAIN_DATA_PATH": "train.parquet", "TEST_DATA_PATH": "test.parquet", "LLM": "MODEL", "HF_MODEL_PATH": "MODEL",
    "DIST_CKPT_PATH": "dist_ckpt",
    "aime24_test_path": "aime24/test.parquet", "NNODES": "4", "GPUS_PER_NODE": "8",
}  # fmt: skip
# It hands all that it is given to verl and says nothing by itself.
EMPTY = ("tests/special_e2e/run_test.sh",)


def fakes(folder: Path) -> None:
    """Fill a folder that becomes PATH."""
    for name in STARTERS:
        (folder / name).write_text(RECORDER)
        (folder / name).chmod(0o755)
    for name in REAL:
        if (found := shutil.which(name)) is not None:
            (folder / name).symlink_to(found)
    (folder / "date").write_text("#!/bin/bash\necho 2026\n")
    (folder / "date").chmod(0o755)
    for name in ("bash", "sh"):
        (folder / name).symlink_to("/bin/bash")
    for name in ("mkdir", "rm", "cp", "mv", "ln", "chmod", "sleep", "tee", "pip", "pip3", "huggingface-cli", "hf",
                 "kill", "curl", "wget", "git", "touch", "nvidia-smi", "pkill", "hostname", "nproc", "ssh", "sbatch",
                 "scontrol", "lsof"):  # fmt: skip
        if not (folder / name).exists():
            (folder / name).write_text("#!/bin/bash\nexit 0\n")
            (folder / name).chmod(0o755)


def run_script(work: Path, script: str, commands: Path, scratch: Path) -> list[list[str]]:
    """The command lines that a script starts, with each of its variables at its default."""
    record = scratch / "record"
    record.unlink(missing_ok=True)
    text = (work / script).read_text()
    # What a script looks for on its machine is not here: it goes on without.
    (work / script).write_text(re.sub(r'^\s*set [-+].*$|^\w+=""$', "", text, flags=re.MULTILINE))
    # Scripts that want the number of processes and a folder say so by their first test.
    arguments = ["8", "checkpoints"] if "$#" in text else []
    code = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    has_default = set(re.findall(r"\$\{(\w+):?[-=]", code))
    given = {name: value for name, value in FROM_THE_USER.items() if name not in has_default}
    environment = given | {
        "PATH": str(commands), "HOME": HOME, "RECORD": str(record), "PWD": str(work), "USER": "user",
        "BASH_ENV": str(scratch / "prelude"), "LANG": "C.UTF-8",
    }  # fmt: skip
    (scratch / "prelude").write_text("command_not_found_handle() { return 0; }\nexport -f command_not_found_handle\n")
    try:
        subprocess.run(
            ["/bin/bash", script, *arguments], cwd=work, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=60, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        print(f"{script}: no end after 60 s", file=sys.stderr)
    if not record.exists():
        return []
    calls = record.read_bytes().decode().split("\0\n\0")
    return [[word.replace(str(work), "/verl") for word in call.split("\0")] for call in calls if call]


def training_command(call: list[str]) -> tuple[str, dict[str, str], list[str]] | None:
    """(module, options of the launcher, words) of a call that trains."""
    for at, word in enumerate(call):
        module = word if word in KINDS and call[at - 1] == "-m" else None
        if module is None and word.endswith(".py"):
            dotted = word.removesuffix(".py").removeprefix("/verl/").removeprefix("./").replace("/", ".")
            module = next((known for known in KINDS if dotted == known or dotted.endswith(f".{known}")), None)
        if module is not None:
            launcher = " ".join(call[:at])
            found = re.findall(r"--(nnodes|nproc[-_]per[-_]node)[= ](\S+)", launcher)
            return module, {name.replace("-", "_"): value for name, value in found}, call[at + 1 :]
    return None


def yaml_files(checkout: Path, words: list[str], script: str) -> dict[str, str]:
    """The YAML file that `--config-path` and `--config-name` name, if it is not one of verl's own bases."""
    options = hydra_options(words)
    name, path = options.get("config-name"), options.get("config-path")
    if name is None:
        return {}
    name = name.removesuffix(".yaml")
    folders = [path.replace("/verl/", "", 1), str(Path(script).parent / path)] if path else []
    folders += ["verl/trainer/config", "verl/experimental/fully_async_policy/config",
                "verl/experimental/one_step_off_policy/config"]  # fmt: skip
    for folder in folders:
        file = checkout / folder / f"{name}.yaml"
        if file.is_file() and name not in ("ppo_trainer", "ppo_megatron_trainer"):
            return {name: file.read_text()}
    return {}


def hydra_options(words: list[str]) -> dict[str, str]:
    """`--config-name=x` and `--config-name x`, without the dashes."""
    options = {}
    for at, word in enumerate(words):
        if word in ("--config-name", "--config-path") and at + 1 < len(words):
            options[word[2:]] = words[at + 1]
        elif word.startswith(("--config-name=", "--config-path=")):
            name, _, value = word[2:].partition("=")
            options[name] = value
    return options


def flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys of a config and their values."""
    for name, value in values.items():
        if name in ("defaults", "hydra", "_target_"):
            continue
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        elif value != "???":
            yield f"{prefix}{name}", None if isinstance(value, str) and "$" in value else value


def default_words(checkout: Path) -> dict[str, list[str]]:
    """Every key of verl's own configs with its default, as an override."""
    folder = checkout / "verl/trainer/config"
    found = {}
    for name, groups in CONFIGS.items():
        values = yaml.safe_load((folder / f"{name}.yaml").read_text())
        for place, file in groups.items():
            values[place] = yaml.safe_load((folder / f"{file}.yaml").read_text())
        found[name] = [f"{key}={json.dumps(value)}" for key, value in flat(values)]
    return found


def extract(checkout: Path) -> dict[str, Any]:
    """All runs of all scripts; words stand once in a table."""
    table: dict[str, int] = {}
    runs, yamls = [], {}
    scripts = [str(path.relative_to(checkout)) for folder in FOLDERS for path in (checkout / folder).rglob("*.sh")]
    with tempfile.TemporaryDirectory() as folder:
        commands = Path(folder) / "commands"
        commands.mkdir()
        fakes(commands)
        work = Path(folder) / "verl"
        shutil.copytree(checkout, work, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        for script in sorted(set(scripts) - set(EMPTY)):
            seen = []
            for call in run_script(work, script, commands, Path(folder)):
                if (command := training_command(call)) is None or command in seen:
                    continue
                seen.append(command)
                module, launcher, words = command
                yamls |= yaml_files(checkout, words, script)
                runs.append({
                    "script": script, "module": module, "launcher": launcher,
                    "words": [table.setdefault(word, len(table)) for word in words],
                })  # fmt: skip
            if not seen and any(module in (checkout / script).read_text() for module in KINDS):
                print(f"{script}: nothing was started", file=sys.stderr)
    commit = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    made = {"commit": commit.stdout.strip(), "yamls": yamls, "defaults": default_words(checkout)}
    return made | {"words": list(table), "runs": runs}


if __name__ == "__main__":
    extracted = extract(Path(sys.argv[1]).resolve())
    lines = [f' "{name}": {json.dumps(extracted[name])}' for name in ("commit", "yamls", "defaults")]
    lines.append(' "words": [\n' + ",\n".join(f"  {json.dumps(word)}" for word in extracted["words"]) + "\n ]")
    lines.append(' "runs": [\n' + ",\n".join(f"  {json.dumps(run)}" for run in extracted["runs"]) + "\n ]")
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    counts = {kind: sum(KINDS[run["module"]] == kind for run in extracted["runs"]) for kind in set(KINDS.values())}
    print(counts, f"{len(extracted['words'])} words", os.path.getsize(OUT))

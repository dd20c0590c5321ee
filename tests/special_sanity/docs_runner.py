"""Runs the fenced blocks of a page as a reader would, in one process and in a folder that has what the pages speak of.

| language | what is done |
|---|---|
| python | executed, a page's blocks in one scope; `>>>` lines as a doctest; `# name.py` above also writes that file |
| bash | every command, see `run_command` |
| console | commands after `$`, whose output must be what stands below (`...` for lines or words left out) |
| yaml | loaded as a recipe, or, where the first line names a file, written to it |
| json | parsed |
| text | pictures and output: nothing, but it must not hide commands |

A block that cannot be run says so itself, visibly, in its first line: `# not run here: why`.
"""

import contextlib
import doctest
import io
import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from meshrl.cli import _parse, main
from meshrl.config import ConfigError, PPOConfig, SFTConfig, load_config
from meshrl.controller import ClassWithInitArgs, Dispatch, ResourcePool, Worker, create_worker_group, register

LANGUAGES = {"python", "bash", "console", "yaml", "json", "text"}
NOT_RUN = re.compile(r"^\s*# not run here: (.+)")
NAMED = re.compile(r"^# ([\w/]+\.(?:py|yaml))\b")
# What `...` stands for in commands (docs/training.md says so).
USUAL = "actor_rollout_ref.model.path=MODEL data.train_files=[train.jsonl] custom_reward_function.path=my_reward.py"


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def not_run(self) -> str | None:
        """Why it cannot be run, if it says so."""
        match = NOT_RUN.match(self.text)
        return match[1] if match else None


def blocks_of(page):
    """All fenced blocks of a page."""
    found, begin, lines = [], None, []
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"^\s*(`{3,})(.*)$", line)
        if fence and begin is None:
            begin, language, lines = number, fence[2].strip(), []
        elif fence:
            found.append(Block(page, begin, language, "\n".join(lines)))
            begin = None
        elif begin is not None:
            lines.append(line)
    assert begin is None, f"{page}:{begin}: the block is never closed"
    return found


class Serving(Worker):
    """A warm process for a server in the background; tests/rollout/server starts one as its users do."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def serve(self, words, file):
        """Runs in the file's folder until SIGTERM; what the command says is in the file. Returns the exit code."""
        os.chdir(file.parent)
        with file.open("w", buffering=1) as said, contextlib.redirect_stdout(said):
            try:
                return main(words)
            except SystemExit as end:
                return end.code


class Runner:
    """One page's blocks, in order, in the current folder."""

    def __init__(self, root):
        self.root = root
        self.namespace = {"__name__": "__docs__"}
        self.servers = []
        self.port = None

    def close(self):
        for server in self.servers:
            os.kill(server.pids()[0], signal.SIGTERM)
            server.shutdown()

    def run(self, block):
        getattr(self, f"run_{block.language}")(block.text)

    def run_text(self, text):
        assert not re.search(r"^(\$ )?(meshrl|python|pip|make) \w", text, re.M), "commands belong into bash or console"

    def run_json(self, text):
        json.loads(text)

    def run_yaml(self, text):
        """A recipe of either kind; a part of one that stands in another file (tools) is only parsed."""
        match = NAMED.match(text)
        path = Path(match[1]) if match else Path("block.yaml")
        path.write_text(text, encoding="utf-8")
        try:
            load_config(str(path), [], PPOConfig)
        except ConfigError as error:
            load_config(str(path), [], SFTConfig) if "tools:" not in text else self._parse_tools(path, error)

    def _parse_tools(self, path, error):
        from meshrl.agents.toolbox import load_tools

        assert load_tools([], str(path)), error

    def run_python(self, text):
        match = NAMED.match(text)
        if match:
            Path(match[1]).write_text(text + "\n", encoding="utf-8")
        if text.startswith(">>> "):
            found = doctest.DocTestParser().get_doctest(text + "\n", self.namespace, "block", None, None)
            result = doctest.DocTestRunner().run(found, clear_globs=False)
            assert not result.failed
            return
        text = text.replace(":8000", f":{self.port}") if self.port else text
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(text, "block", "exec"), self.namespace)

    def run_bash(self, text):
        for command in commands_of(text):
            self.run_command(command)

    def run_console(self, text):
        """Every command's output must have the lines that stand below it, in their order."""
        for part in re.split(r"^\$ ", text, flags=re.M)[1:]:
            command, _, shown = part.partition("\n")
            output = self.run_command(command)
            lines = iter(output.splitlines())
            for line in filter(str.strip, shown.splitlines()):
                pattern = re.escape(line.strip()).replace(r"\.\.\.", ".*")
                assert any(re.fullmatch(pattern, seen.strip()) for seen in lines), f"no '{line}' in:\n{output}"

    def run_command(self, command):
        """meshrl's own commands, and scripts, are run in this process; what they print is returned.

        Training from data is a dry run, demos take a step or two (see the fixture); a server in the foreground is only
        parsed, one in the background is started; of pip and make it is looked whether they name what is there.
        """
        words = shlex.split(command, comments=True)
        environment = dict(word.split("=", 1) for word in words[:1] if re.match(r"^[A-Z_]+=", word))
        words = words[len(environment) :]
        if not words:
            return ""
        if words[0] == "pip":
            return self._check_extras(command)
        if words[0] == "make":
            makefile = (self.root / "Makefile").read_text()
            targets = [word for word in words[1:] if "=" not in word]
            assert all(re.search(rf"^([\w-]+ )*{word}( [\w-]+)*:", makefile, re.M) for word in targets), command
            return ""
        if words[:2] == ["python", "-c"]:
            exec(words[2], {})
            return ""
        if words[0] == "python" and words[1].endswith(".py"):
            return self._script(words[1:])
        if words[0] != "meshrl":
            command = command.replace(":8000", f":{self.port}") if self.port else command
            path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", command],
                env=os.environ | {"PATH": path, "PYTHONPATH": str(self.root)},
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout
        if words[1] == "serve":
            return self._serve(words[1:], environment)
        if words[1] == "watch":  # stays, as a server does
            _parse(words[1:])
            return ""
        return self._meshrl(words[1:])

    def _script(self, words):
        """As a process of its own would run it, without its imports of many seconds."""
        out, path = io.StringIO(), [str(Path(words[0]).parent), *sys.path]
        with patch.object(sys, "argv", words), patch.object(sys, "path", path), contextlib.redirect_stdout(out):
            runpy.run_path(words[0], run_name="__main__")
        return out.getvalue()

    def _meshrl(self, words):
        place = words.index("...") if "..." in words else None
        if place is not None:
            chosen = any(word.startswith(("reward.name=", "reward.functions=")) for word in words)
            words[place : place + 1] = USUAL.split()[: 2 if chosen else 3]
        if words[0] in ("train", "sft", "prefer") and "--dry-run" not in words:
            words.append("--dry-run")
        if words[0] == "doctor" and "--ranks" not in words:
            words += ["--ranks", "1"]  # tests/doctor starts the processes
        out, errors = io.StringIO(), io.StringIO()
        # A run's picture takes longer to draw than these runs to train; the command for it draws it.
        picture = contextlib.nullcontext() if words[0] == "report" else patch("meshrl.telemetry.report.write_curves")
        with picture, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            try:
                code = main(words)
            except SystemExit as end:
                code = end.code
        assert not code, f"meshrl {shlex.join(words)}\nexit code {code}\n{out.getvalue()}{errors.getvalue()}"
        return out.getvalue()

    def _serve(self, words, environment):
        if words[-1] != "&":
            assert Path(_parse(words).model).is_dir()
            return ""
        said = Path("served.txt").absolute()
        server = create_worker_group(
            ResourcePool([1], use_gpu=False), ClassWithInitArgs(Serving), env=environment, in_process=False
        )
        self.servers.append(server)
        ended = server.serve([*words[:-1], "--port", "0"], said)
        for _ in range(1200):
            if said.exists() and (address := re.search(r"127\.0\.0\.1:(\d+)", said.read_text())):
                self.port = address[1]
                return said.read_text()
            assert not ended.done(), f"the server ended with {ended.get()} before it said where it listens"
            time.sleep(0.1)
        raise AssertionError("the server does not say where it listens")

    def _check_extras(self, command):
        import tomllib

        project = tomllib.loads((self.root / "pyproject.toml").read_text())["project"]
        for named in re.findall(r"\[([\w,]+)\]", command):
            assert set(named.split(",")) <= set(project["optional-dependencies"]), command
        return ""


def commands_of(text):
    """The commands of a block: continued lines joined, comments and empty lines left out."""
    joined = re.sub(r"\s*\\\n\s*", " ", text)
    return [line.strip() for line in joined.splitlines() if line.strip() and not line.strip().startswith("#")]

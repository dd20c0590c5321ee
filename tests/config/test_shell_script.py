"""Scripts are read as bash runs them, without running them; what is not in them is said."""

import subprocess
from pathlib import Path

import pytest

from meshrl.tools.migrate.shell_script import read_script

START = "python3 -m verl.trainer.main_ppo"
SCRIPTS = {
    "quotes": f"""A=one\n{START} a="$A two" b='$A' c=$A\\ x d="it's" e='["x","y"]' f="\\$A" g={{x}} h="['$A']" """,
    "defaults": f"""{START} a=${{X:-5}} b=${{X-}}y c=${{X:-"two words"}} d=${{HOME_DIR:-${{Y:-z}}}} e=${{X:=7}}""",
    "set_ones": f"""X=1; E=\n{START} a=${{X:+set}} b=${{E:+set}}n c=${{E-d}} d=${{E:-d}} e=${{X:-9}}""",
    "arrays": f"""A=(a=1 'b=two words')\nA+=(\n  c=3  # three\n  d="$HOME"\n)\n{START} "${{A[@]}}" n="${{A[1]}}" """,
    "split": f"""ALL="a=1 b=2"\nCMD="{START}"\n$CMD $ALL "$ALL" """,
    "arithmetic": f"""n=3\n{START} a=$((n * 2 + 1)) b=$(( (n+1) / 2 )) c=$((1024 * 20)) d=$(($n-1))""",
    "negative": f"""{START} a=$((-7/2)) b=$((-7 % 3)) c=$((7 - 2 - 3)) d=$((2 - (3 - 4)))""",
    "trimmed": f"""P=/a/b/model.tar.gz\n{START} a=${{P##*/}} b=${{P%.*}} c=${{P%%.*}} d=${{P#*/}}""",
    "replaced": f"""P=/a/b/model.tar.gz\n{START} e=${{P/b/x}} f=${{P//a/y}} g=${{P/nothing/x}}""",
    "cases": f"""M=Qwen/Model\n{START} a=${{M,,}} b=${{M^^}} c="$(basename "${{M,,}}")" d=$(dirname $M)""",
    "if": f"""m=spmd\nif [ "$m" = "spmd" ]; then\n  X=1\nelif [ -n "$m" ]; then X=2\nelse X=3\nfi\n{START} a=$X""",
    "else": f"""m=other\nif [[ "$m" == "spmd" ]]; then X=1; elif [ "$m" = x ]; then X=2; else\nX=3; fi\n{START} a=$X""",
    "numbers": f"""n=4\nif [ $n -gt 2 ] && [ $n -le 4 ]; then X=yes; fi\n[ "$n" -eq 4 ] || X=no\n{START} a=$X""",
    "nested": f"""a=1; b=2\nif [ $a -eq 1 ]; then if [ $b -eq 1 ]; then X=p; else X=q; fi; fi\n{START} a=$X""",
    "case": f"""m=vllm\ncase "$m" in\n  sglang) X=1;;\n  vl*|hf)\n    X=2\n    ;;\n  *) X=3;;\nesac\n{START} a=$X""",
    "for": f"""for n in 1 2 "a b"; do\n  {START} n="$n"\ndone""",
    "comments": f"""# X=9\nX=1 # one\n{START} a=$X#b c='#d' \\\n  e=1 \\\n  f=2  # the end\n""",
    "heredoc": f"""cat > f.py <<EOF\npython3 -m verl.trainer.main_ppo a=0\nX=5\nEOF\nX=1\n{START} a=$X""",
    "pipes": f"""{START} a=1 2>&1 | tee log.txt\necho done && {START} a=2 > out || true""",
    "functions": f"""now() {{\n  date\n  X=5\n}}\nfunction other {{ X=6; }}\nX=1\n{START} a=$X""",
    "arguments": f"""n=$1\nshift 1\n{START} n=$n "$@" last=$#""",
    "exit": f"""if [ "$#" -lt 1 ]; then\n  exit 1\nfi\n{START} a=1\nexit 0\n{START} a=2""",
    "appended": f"""X=a; X+=b; export Y=$X\n{START} a=$Y""",
    "launcher": """torchrun --standalone --nproc_per_node=$1 \\\n  -m verl.trainer.fsdp_sft_trainer \\\n  a=1""",
}


def by_bash(text: str, folder: Path, arguments: list[str]) -> list[list[str]]:
    """The words of each command, as bash hands them to a program that writes them down."""
    for name in ("python3", "torchrun"):
        (folder / name).write_text(f"#!/bin/bash\nprintf '%s\\0' {name} \"$@\" $'\\n' >> {folder}/record\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": "/home/user"}
    subprocess.run(["bash", "-c", text, "script", *arguments], env=environment, cwd=folder, timeout=20, check=False)
    calls = (folder / "record").read_text().split("\0\n\0")
    return [call.split("\0") for call in calls if call]


@pytest.mark.parametrize("name", SCRIPTS)
def test_read_as_bash_runs_it(name: str, tmp_path: Path) -> None:
    arguments = ["8", "x y=z"]
    reader = read_script(SCRIPTS[name], {"HOME": "/home/user"}, arguments)
    assert reader.commands == by_bash(SCRIPTS[name], tmp_path, arguments)
    assert reader.remarks == []


@pytest.mark.parametrize(
    ("script", "word", "remark"),
    [
        (f"{START} a=$UNKNOWN/b", "a=$UNKNOWN/b", "line 1: $UNKNOWN is not set by the script: give UNKNOWN=VALUE"),
        (f"X=$(nvidia-smi -L | wc -l)\n{START} a=$X", "a=$(nvidia-smi -L | wc -l)", "line 1: $(nvidia-smi -L | wc -l)"),
        (f"X=1\nif [ -d /x ]; then X=2; fi\n{START} a=$X", "a=1", "line 2: this if depends on -d /x"),
        (f"X=1\nif [ -d /x ]; then X=2; elif true; then X=3; else X=4; fi\n{START} a=$X", "a=1", "line 2: this if"),
        (f"source env.sh\n{START} a=1", "a=1", "line 1: what env.sh sets is not known"),
        (f"while read n; do X=$n; done\n{START} a=1", "a=1", "line 1: a loop (while) was not followed"),
        (f"{START} a=$1", "a=$1", "line 1: $1 was left as it is"),
    ],
)
def test_what_is_not_in_the_script_is_said(script: str, word: str, remark: str) -> None:
    reader = read_script(script, {}, None)
    assert reader.commands[0][-1] == word
    assert len(reader.remarks) == 1
    assert reader.remarks[0].startswith(remark)


def test_nothing_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    read_script(f"touch {mark}\nX=$(touch {mark})\n{START} a=$X b=`touch {mark}` c=$((1 + $(touch {mark})))", {}, [])
    assert not mark.exists()


def test_a_variable_may_be_given() -> None:
    assert read_script(f"{START} a=${{X:-1}} b=$Y", {"X": "2", "Y": "3"}, []).commands[0][-2:] == ["a=2", "b=3"]

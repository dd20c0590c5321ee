"""A reader of shell scripts: find the commands that a script would start, without running the script.

It fills in variables. It covers enough of bash for scripts that set variables and start one program: assignments,
arrays, `${X:-default}` and similar expansions, arithmetic, tests, loops over words, and functions that are only
defined.

Some words depend on anything else, such as a command's output or a variable that the script does not set. Such a part
of a word is kept as written, and the reader adds a remark.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshrl.tools.migrate.shell_words import (
    ASSIGNMENT,
    ENDS,
    REDIRECTIONS,
    Token,
    behind_function,
    closing,
    computed,
    expansion_end,
    is_value,
    matches,
    parts_of,
    pattern_of,
    tokens_of,
    trimmed,
    without_redirections,
)

QUOTED_SPACE = "\2"  # a space inside the quotes of a default
KEPT_SPACE = "\1"  # a space inside text that is kept as written
# Variables that are not expanded, because the shell that runs the printed command sets them.
LEFT_ALONE = ("HOME", "PWD", "USER", "HOSTNAME")


class UndecidedError(Exception):
    """A test or value depends on something that the script does not contain."""


@dataclass
class ShellReader:
    """The state of reading a script: variables, commands found so far, and remarks on unknown values."""

    variables: dict[str, str] = field(default_factory=dict)
    arguments: list[str] | None = None  # $1, $2, ...; None: unknown
    arrays: dict[str, list[str]] = field(default_factory=dict)
    commands: list[list[str]] = field(default_factory=list)
    remarks: list[tuple[str, str | None]] = field(default_factory=list)  # with the expansion that was kept as written
    _succeeded: bool | None = True  # exit status of the previous command; None: unknown

    def read(self, text: str) -> None:
        """Read a script from top to bottom, and record its commands and remarks."""
        self._run(list(tokens_of(text)))

    # ---- statements

    def _run(self, tokens: Sequence[Token]) -> bool:
        """Follow a list of statements; return False if one of the statements ends the script."""
        at = 0
        while at < len(tokens):
            token = tokens[at]
            if token.is_operator and token.text != "(":
                at += 1
                # The second of two commands runs after the first succeeded (&&) or failed (||).
                if token.text in ("&&", "||") and self._skips(token):
                    at = self._behind_one(tokens, at)
                continue
            self._succeeded = True
            if token.text in ("if", "for", "while", "until", "case", "{") or token.text == "(":
                end = closing(tokens, at)
                if not self._compound(tokens[at], tokens[at + 1 : end]):
                    return False
                at = end + 1
                continue
            if (body := behind_function(tokens, at)) is not None:
                at = body
                continue
            end = at
            while end < len(tokens) and not (tokens[end].is_operator and tokens[end].text not in REDIRECTIONS):
                end += 1
            if not self._simple(without_redirections(tokens[at:end])):
                return False
            at = end
        return True

    def _skips(self, operator: Token) -> bool:
        if self._succeeded is None:
            self._remark(operator, f"what stands behind {operator.text} depends on a test and was left out")
            return True
        return self._succeeded == (operator.text == "||")

    @staticmethod
    def _behind_one(tokens: Sequence[Token], at: int) -> int:
        """Return the position after the command that begins at `at`."""
        if at < len(tokens) and tokens[at].text in ENDS:
            return closing(tokens, at) + 1
        while at < len(tokens) and not (tokens[at].is_operator and tokens[at].text not in REDIRECTIONS):
            at += 1
        return at

    def _compound(self, opening: Token, inner: Sequence[Token]) -> bool:
        if opening.text in ("{", "("):
            return self._run(inner)
        if opening.text == "if":
            return self._if(opening, inner)
        if opening.text == "case":
            return self._case(opening, inner)
        if opening.text == "for":
            return self._for(opening, inner)
        self._remark(opening, f"a loop ({opening.text}) was not followed")
        return True

    def _if(self, opening: Token, inner: Sequence[Token]) -> bool:
        condition, *branches = parts_of(inner, ("then", "elif", "else"))
        part = condition[1]
        for word, body in branches:
            if word == "else":
                return self._run(body)
            if word == "elif":
                part = body
                continue
            try:
                holds = self._holds(part)
            except UndecidedError as error:
                self._remark(opening, f"this if depends on {error}, so it was left out from here to its end")
                return True
            if holds:
                return self._run(body)
        return True

    def _case(self, opening: Token, inner: Sequence[Token]) -> bool:
        try:
            value = " ".join(self.expand(inner[0], strict=True))
        except UndecidedError as error:
            self._remark(opening, f"this case depends on {error}, so it was left out")
            return True
        at = next((i for i, token in enumerate(inner) if token.text == "in"), 0) + 1
        while at < len(inner):
            if inner[at].is_operator and inner[at].text != "(":
                at += 1
                continue
            closing = next(i for i in range(at, len(inner)) if inner[i].text == ")" and inner[i].is_operator)
            patterns = [token for token in inner[at:closing] if not token.is_operator]
            end = next((i for i in range(closing, len(inner)) if inner[i].text == ";;"), len(inner))
            if any(matches(value, " ".join(self.expand(pattern))) for pattern in patterns):
                return self._run(inner[closing + 1 : end])
            at = end + 1
        return True

    def _for(self, opening: Token, inner: Sequence[Token]) -> bool:
        head, *rest = parts_of(inner, ("do",))
        words = [token for token in head[1] if not token.is_operator]
        if len(words) < 2 or words[1].text != "in" or not rest:
            self._remark(opening, "a loop (for) was not followed")
            return True
        for value in [word for token in words[2:] for word in self.expand(token)]:
            self.variables[words[0].text] = value
            if not self._run(rest[0][1]):
                return False
        return True

    def _simple(self, tokens: Sequence[Token]) -> bool:
        """Follow one command: assign variables, or keep a program if it may be a training program.

        Return False if the command ends the script.
        """
        at = 0
        while at < len(tokens) and ASSIGNMENT.match(tokens[at].text):
            at += 1
        if at == len(tokens):
            for token in tokens:
                self._assign(token)
            return True
        first = tokens[at].text
        if first in ("export", "declare", "local", "readonly", "typeset"):
            for token in tokens[at + 1 :]:
                if ASSIGNMENT.match(token.text):
                    self._assign(token)
        elif first in ("exit", "return"):
            return False
        elif first == "unset":
            for token in tokens[at + 1 :]:
                self.variables.pop(token.text, None)
        elif first == "shift":
            self.arguments = None if self.arguments is None else self.arguments[1:]
            if len(tokens) > at + 1 and self.arguments is not None:
                self.arguments = self.arguments[int(tokens[at + 1].text) - 1 :]
        elif first in ("source", "."):
            self._remark(tokens[at], f"what {tokens[-1].text} sets is not known")
        elif first in ("[", "[[", "test"):
            try:
                self._succeeded = self._holds(tokens[at:])
            except UndecidedError:
                self._succeeded = None
        elif first not in ("set", "echo", "cd", "mkdir", "rm", "sleep", "cat", "ulimit"):
            before = len(self.remarks)
            words = [word for token in tokens[at:] for word in self.expand(token)]
            if is_program(words):
                self.commands.append([word.replace(KEPT_SPACE, " ") for word in words])
            else:
                del self.remarks[before:]
        return True

    def _assign(self, token: Token) -> None:
        match = ASSIGNMENT.match(token.text)
        assert match is not None
        name, _, adds = match.groups()
        value = token.text[match.end() :]
        if value.startswith("("):
            items = [word for part in tokens_of(value[1:-1]) if not part.is_operator for word in self.expand(part)]
            self.arrays[name] = [*(self.arrays.get(name, []) if adds else []), *items]
            return
        expanded = self._text(Token(value, token.line), split=False)
        self.variables[name] = (self.variables.get(name, "") if adds else "") + expanded

    # ---- tests

    def _holds(self, tokens: Sequence[Token]) -> bool:
        """Evaluate a list of tests joined by `&&` and `||`."""
        words = [token for token in tokens if token.text != "\n"]
        for operator in ("||", "&&"):
            for at, token in enumerate(words):
                if token.is_operator and token.text == operator:
                    first = self._holds(words[:at])
                    if first == (operator == "||"):
                        return first
                    return self._holds(words[at + 1 :])
        words = [token for token in words if token.text not in (";",)]
        if not words or words[0].text not in ("[", "[[", "test"):
            raise UndecidedError(" ".join(token.text for token in words) or "nothing")
        inner = [token for token in words[1:] if token.text not in ("]", "]]")]
        if inner and inner[0].text == "!":
            return not self._test([*inner[1:]])
        return self._test(inner)

    def _test(self, tokens: Sequence[Token]) -> bool:
        values = [self._text(token, split=False, strict=True) if is_value(token) else token.text for token in tokens]
        texts = [value.replace(KEPT_SPACE, " ") for value in values]
        match texts:
            case ["-z", value]:
                return not value
            case ["-n", value] | [value]:
                return bool(value)
            case [one, "=" | "==", other]:
                return matches(one, other)
            case [one, "!=", other]:
                return not matches(one, other)
            case [one, "-eq" | "-ne" | "-lt" | "-le" | "-gt" | "-ge" as operator, other]:
                try:
                    difference = int(one) - int(other)
                except ValueError as error:
                    raise UndecidedError(f"{one} {operator} {other}") from error
                return {
                    "-eq": difference == 0, "-ne": difference != 0, "-lt": difference < 0, "-le": difference <= 0,
                    "-gt": difference > 0, "-ge": difference >= 0,
                }[operator]  # fmt: skip
        raise UndecidedError(" ".join(texts))

    # ---- words

    def expand(self, token: Token, strict: bool = False) -> list[str]:
        """Return the words that one word of the script expands to."""
        if token.text in ('"$@"', "$@", '"$*"', "$*"):
            return list(self.arguments or [])
        if match := re.fullmatch(r'"?\$\{@:(\d+)\}"?', token.text):
            return list(self.arguments or [])[int(match[1]) - 1 :]
        if (match := re.fullmatch(r'"?\$\{(\w+)\[[@*]\]\}"?', token.text)) and match[1] in self.arrays:
            return list(self.arrays[match[1]])
        text = self._text(token, split=True, strict=strict)
        if not text and not re.search("[\"']", token.text):
            return []
        return [word.replace(QUOTED_SPACE, " ") for word in text.split("\0 ")]

    def _text(self, token: Token, split: bool, strict: bool = False) -> str:
        """Remove quotes from a word and fill in variables; with `split`, `\\0 ` marks where the word becomes two."""
        text, at, made, quoted = token.text, 0, [], False
        while at < len(text):
            char = text[at]
            if char == "'" and not quoted:
                end = text.index("'", at + 1)
                made.append(text[at + 1 : end])
                at = end + 1
            elif char == '"':
                quoted, at = not quoted, at + 1
            elif char == "\\" and at + 1 < len(text):
                following = text[at + 1]
                made.append(
                    "" if following == "\n" else following if not quoted or following in '$`"\\' else f"\\{following}"
                )
                at += 2
            elif char in "$`":
                value, at = self._expansion(text, at, token, strict)
                if split and not quoted and not value.startswith(("$", "`")):
                    value = re.sub(r"\s+", "\0 ", value.strip()) if value.strip() else ""
                value = value.replace(QUOTED_SPACE, " ") if quoted or not split else value
                made.append(value)
            else:
                made.append(char)
                at += 1
        return "".join(made)

    def _expansion(self, text: str, at: int, token: Token, strict: bool) -> tuple[str, int]:
        """Return the value of the expansion that begins at `at` with `$` or a backquote, and the position after it."""
        end = expansion_end(text, at)
        written = text[at:end]
        value = self._value(written, token)
        if value is None:
            if strict:
                raise UndecidedError(written)
            self._unknown(written, token)
            return written.replace(" ", KEPT_SPACE), end
        return value, end

    def _value(self, written: str, token: Token) -> str | None:
        """Return the value of one expansion, or None if the script does not determine it."""
        if written == "$":
            return "$"
        if written.startswith("$(("):
            return self._arithmetic(written[3:-2], token)
        if written.startswith(("$(", "`")):
            return self._output(written[2:-1] if written[0] == "$" else written[1:-1], token)
        if re.fullmatch(r"\$\{?#\}?", written):
            return None if self.arguments is None else str(len(self.arguments))
        if (match := re.fullmatch(r"\$\{?([@*])\}?", written)) is not None:
            return " ".join(self.arguments or [])
        inner = written[2:-1] if written.startswith("${") else written[1:]
        match = re.match(r"([A-Za-z_]\w*|\d+)(\[[^\]]*\])?", inner)
        if match is None:
            return None
        value, operation = self._variable(match[1], match[2]), inner[match.end() :]
        return self._operated(value, operation, token)

    def _variable(self, name: str, index: str | None) -> str | None:
        if name.isdigit():
            given = self.arguments or []
            return given[int(name) - 1] if 0 < int(name) <= len(given) else (None if self.arguments is None else "")
        if index is not None:
            items = self.arrays.get(name)
            if items is None:
                return None
            inner = index[1:-1]
            return " ".join(items) if inner in "@*" else items[int(inner)] if inner.isdigit() else None
        if name in self.arrays and name not in self.variables:
            return self.arrays[name][0] if self.arrays[name] else ""
        return self.variables.get(name, f"${name}" if name in LEFT_ALONE else None)

    def _operated(self, value: str | None, operation: str, token: Token) -> str | None:
        """Apply the operation of `${X<operation>}` to a value, which is None if the variable is unset."""
        if not operation:
            return value
        if match := re.match(r":?[-=?+]", operation):
            sign, rest = match[0], operation[match.end() :]
            is_set = value is not None and (bool(value) or not sign.startswith(":"))
            if sign[-1] == "+":
                return self._text(Token(rest, token.line), split=False) if is_set else ""
            if sign[-1] == "?":
                return value
            if is_set:
                return value
            default = self._text(Token(rest, token.line), split=False)
            return default.replace(" ", QUOTED_SPACE) if rest.startswith(('"', "'")) else default
        if value is None:
            return None
        if operation in (",,", "^^"):
            return value.lower() if operation == ",," else value.upper()
        if match := re.match(r"(##?|%%?)(.*)", operation, re.DOTALL):
            return trimmed(value, match[1], match[2])
        if match := re.match(r"(//?)([^/]*)/?(.*)", operation, re.DOTALL):
            return re.sub(pattern_of(match[2]), lambda _: match[3], value, count=0 if match[1] == "//" else 1)
        return None

    def _arithmetic(self, text: str, token: Token) -> str | None:
        """Evaluate `$((...))` over whole numbers; return None if it cannot be evaluated."""
        filled = self._text(Token(text, token.line), split=False)
        names = {name: self.variables.get(name, "") for name in re.findall(r"[A-Za-z_]\w*", filled)}
        for name, value in names.items():
            filled = re.sub(rf"\b{name}\b", value or "?", filled)
        if not re.fullmatch(r"[\d\s()+*/%-]+", filled) or "**" in filled:
            return None
        try:
            return str(computed(filled))
        except (ValueError, ZeroDivisionError, IndexError):
            return None

    def _output(self, text: str, token: Token) -> str | None:
        """Return the output of a command substitution, or None if it cannot be known.

        Only `pwd`, `basename` and `dirname` are computed.
        """
        parts = [part for part in tokens_of(text) if not part.is_operator]
        words = [self._text(part, split=False) for part in parts]
        if any(part.is_operator and part.text != "\n" for part in tokens_of(text)):
            return None
        match words:
            case ["pwd"]:
                return self.variables.get("PWD", "$PWD")
            case ["basename", path]:
                return path.rstrip("/").rpartition("/")[2]
            case ["basename", path, suffix]:
                return path.rstrip("/").rpartition("/")[2].removesuffix(suffix)
            case ["dirname", path]:
                return path.rstrip("/").rpartition("/")[0] or "."
        return None

    def _unknown(self, written: str, token: Token) -> None:
        name = written.strip("${}")
        plain = name.isidentifier()
        text = f"{written} is not set by the script: give {name}=VALUE" if plain else f"{written} was left as it is"
        self._remark(token, text, written)

    def _remark(self, token: Token, text: str, written: str | None = None) -> None:
        line = f"line {token.line}: {text}", written
        if line not in self.remarks:
            self.remarks.append(line)


def is_program(words: Sequence[str]) -> bool:
    """Return whether a command starts one of verl's programs."""
    return any(word.startswith("verl.") or word.endswith(("main_ppo.py", "sft_trainer.py")) for word in words)


class ReadScript(NamedTuple):
    """The commands of a script that start one of verl's programs, and remarks on their unknown parts."""

    commands: list[list[str]]
    remarks: list[str]


def read_script(text: str, variables: Mapping[str, str], arguments: list[str] | None) -> ReadScript:
    """Read a script without running it, and return its training commands with the remarks that concern them."""
    reader = ShellReader(dict(variables), arguments)
    reader.read(text)
    said = "\n".join(word for command in reader.commands for word in command)
    remarks = [remark for remark, written in reader.remarks if written is None or written in said]
    return ReadScript(reader.commands, remarks)

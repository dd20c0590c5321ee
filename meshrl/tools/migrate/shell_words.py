"""Words and operators of shell scripts, and the parts of the shell language that need no variables."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ASSIGNMENT = re.compile(r"(\w+)(\[\w+\])?(\+?)=", re.ASCII)
OPERATORS = ("&&", "||", ";;", "<<<", "<<-", "<<", ">>", ">&", "<&", "&>", ";", "|", "&", "(", ")", "<", ">", "\n")
REDIRECTIONS = ("<<<", "<<-", "<<", ">>", ">&", "<&", "&>", "<", ">")
ENDS = {"if": "fi", "for": "done", "while": "done", "until": "done", "case": "esac", "{": "}", "(": ")"}


@dataclass(frozen=True)
class Token:
    """An operator, or the text of a word as written, quotes included."""

    text: str
    line: int
    is_operator: bool = False


def tokens_of(text: str) -> Iterator[Token]:
    """Yield the words and operators of a script, without comments, line continuations and here-document texts."""
    at, line, waiting = 0, 1, []
    while at < len(text):
        char = text[at]
        if char in " \t\r":
            at += 1
        elif text.startswith("\\\n", at):
            at, line = at + 2, line + 1
        elif char == "#":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif (operator := next((o for o in OPERATORS if text.startswith(o, at)), None)) is not None:
            yield Token(operator, line, is_operator=True)
            at += len(operator)
            if operator in ("<<", "<<-"):
                match = re.match(r"\s*[\"']?(\w+)[\"']?", text[at:])
                waiting.append(match[1] if match else "EOF")
            if operator == "\n":
                line += 1
                for mark in waiting:
                    ending = re.search(rf"^\t*{mark}$", text[at:], flags=re.MULTILINE)
                    skipped = text[at : at + ending.end()] if ending else text[at:]
                    at, line = at + len(skipped), line + skipped.count("\n")
                waiting = []
        else:
            end = _word_end(text, at)
            word = text[at:end]
            yield Token(word, line)
            at, line = end, line + word.count("\n")


def _word_end(text: str, at: int) -> int:
    """Return the position after the word that begins at `at`."""
    begun = at
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
        elif char == "'":
            at = text.index("'", at + 1) + 1
        elif char == '"':
            at = _quoted_end(text, at)
        elif char in "$`":
            at = expansion_end(text, at)
        elif char == "(" and ASSIGNMENT.fullmatch(text[begun:at]):
            at = _parenthesis_end(text, at)
        elif char in " \t\r\n;&|()<>":
            break
        else:
            at += 1
    return min(max(at, begun + 1), len(text))


def _quoted_end(text: str, at: int) -> int:
    at += 1
    while at < len(text) and text[at] != '"':
        at = at + 2 if text[at] == "\\" else expansion_end(text, at) if text[at] in "$`" else at + 1
    return at + 1


def _parenthesis_end(text: str, at: int) -> int:
    """Return the position after the parenthesis that closes the one at `at`."""
    depth = 0
    while at < len(text):
        char = text[at]
        if char == "\\":
            at += 2
            continue
        if char in "'\"":
            at = _quoted_end(text, at) if char == '"' else text.index("'", at + 1) + 1
            continue
        if char == "#" and text[at - 1] in " \n\t(":
            at = text.index("\n", at)
            continue
        depth += (char == "(") - (char == ")")
        at += 1
        if depth == 0:
            break
    return at


def expansion_end(text: str, at: int) -> int:
    """Return the position after the expansion that begins at `at` with `$` or a backquote."""
    if text[at] == "`":
        return text.index("`", at + 1) + 1
    if text.startswith("$(", at):
        return _parenthesis_end(text, at + 1)
    if text.startswith("${", at):
        depth, at = 0, at + 1
        while at < len(text):
            if text[at] in "'\"" and depth:
                at = _quoted_end(text, at) if text[at] == '"' else at + 1
                continue
            depth += (text[at] == "{") - (text[at] == "}")
            at += 1
            if depth == 0:
                return at
        return at
    match = re.match(r"\$([A-Za-z_]\w*|[\d@*#?$!-])", text[at:])
    return at + (match.end() if match else 1)


def closing(tokens: Sequence[Token], at: int) -> int:
    """Return the index of the token that closes the statement at `at`.

    Keywords count only at positions where a command may begin.
    """
    waiting, starts = [ENDS[tokens[at].text]], True
    for place in range(at + 1, len(tokens)):
        token = tokens[place]
        if (starts or token.text in (")", "}")) and token.text == waiting[-1]:
            waiting.pop()
            if not waiting:
                return place
        elif token.text == "(" and token.is_operator:
            waiting.append(")")
        elif starts and not token.is_operator and token.text in ENDS:
            waiting.append(ENDS[token.text])
        elif waiting[-1] == "esac" and token.text == ")" and token.is_operator:
            pass  # it ends a pattern of `case`
        starts = (token.is_operator and token.text not in REDIRECTIONS) or token.text in ("then", "do", "else", "elif")
    return len(tokens) - 1


def behind_function(tokens: Sequence[Token], at: int) -> int | None:
    """Return the index after the function definition that begins at `at`, or None if none begins there."""
    named = tokens[at].text == "function"
    place = at + 2 if named else at + 1
    if [token.text for token in tokens[place : place + 2]] == ["(", ")"]:
        place += 2
    elif not named:
        return None
    while place < len(tokens) and tokens[place].text == "\n":
        place += 1
    if place < len(tokens) and tokens[place].text == "{":
        return closing(tokens, place) + 1
    return None


def parts_of(tokens: Sequence[Token], words: Sequence[str]) -> list[tuple[str, list[Token]]]:
    """Split a statement at some of its keywords, and return each part with the keyword before it.

    Inner statements stay whole.
    """
    parts: list[tuple[str, list[Token]]] = [("", [])]
    at, starts = 0, True
    while at < len(tokens):
        token = tokens[at]
        if starts and not token.is_operator and token.text in words:
            parts.append((token.text, []))
        elif starts and not token.is_operator and token.text in ENDS:
            end = closing(tokens, at)
            parts[-1][1].extend(tokens[at : end + 1])
            at, starts = end + 1, False
            continue
        else:
            parts[-1][1].append(token)
        starts = (token.is_operator and token.text not in REDIRECTIONS) or token.text in (*words, "then", "do", "else")
        at += 1
    return parts


def without_redirections(tokens: Sequence[Token]) -> list[Token]:
    kept: list[Token] = []
    at = 0
    while at < len(tokens):
        if tokens[at].is_operator and tokens[at].text in REDIRECTIONS:
            if kept and kept[-1].text in ("1", "2"):
                kept.pop()
            at += 2
            continue
        kept.append(tokens[at])
        at += 1
    return kept


def is_value(token: Token) -> bool:
    return not (re.fullmatch(r"-[a-z]{1,2}|==?|!=|!", token.text) and not token.is_operator)


def pattern_of(glob: str) -> str:
    return "".join({"*": ".*", "?": "."}.get(char, re.escape(char)) for char in glob)


def matches(value: str, glob: str) -> bool:
    return re.fullmatch(pattern_of(glob), value, re.DOTALL) is not None


def trimmed(value: str, sign: str, glob: str) -> str:
    """Remove a matching prefix (`#`) or suffix (`%`): the shortest match, or the longest if the sign is doubled."""
    cuts = range(len(value) + 1)
    pieces = [(cut, value[:cut] if sign[0] == "#" else value[len(value) - cut :]) for cut in cuts]
    fitting = [cut for cut, piece in pieces if matches(piece, glob)]
    if not fitting:
        return value
    cut = max(fitting) if len(sign) == 2 else min(fitting)
    return value[cut:] if sign[0] == "#" else value[: len(value) - cut]


def computed(text: str) -> int:
    """Evaluate an arithmetic expression over whole numbers with bash's rules, such as division toward zero."""
    tokens = re.findall(r"\d+|[()+*/%-]", text)

    def atom() -> int:
        token = tokens.pop(0)
        if token == "(":
            value = total()
            if tokens.pop(0) != ")":
                raise ValueError(text)
            return value
        return -atom() if token == "-" else int(token)

    def product() -> int:
        value = atom()
        while tokens and tokens[0] in "*/%":
            operator, other = tokens.pop(0), atom()
            quotient = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1) if operator != "*" else 0
            value = value * other if operator == "*" else quotient if operator == "/" else value - other * quotient
        return value

    def total() -> int:
        value = product()
        while tokens and tokens[0] in "+-":
            value = value + product() if tokens.pop(0) == "+" else value - product()
        return value

    value = total()
    if tokens:
        raise ValueError(text)
    return value

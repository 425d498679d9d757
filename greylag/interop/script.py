"""Script: what a bash launch script would run, found by reading it and running nothing.

The part of bash that launch scripts are written in: variables with defaults, arrays, quotes, line continuations,
arithmetic, `if` over strings, numbers and emptiness. What only a shell on the cluster could know (files, the output of
commands, variables set elsewhere) stays `unset`, and is an error only where an argument that matters needs it. Loops
and `case` are passed over: launch scripts parse their own command line with them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from greylag.interop.words import Value, closing, expand, expand_text, is_unset, number_in
from greylag.spec.error import SpecError

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
MOST_TEXT = 1 << 20
"""Characters of one variable."""
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
_OPEN, _CLOSE = {"while", "until", "for", "select"}, "done"


class Statement(NamedTuple):
    """One simple command, its words as written. An array's assignment is one word."""

    before: str
    """The separator in front of it: `&&`, `||` or another."""
    words: tuple[str, ...]


class Script(NamedTuple):
    """What a script says."""

    commands: tuple[tuple[str, ...], ...]
    """Every command that would run, its words expanded."""
    variables: Mapping[str, Value]
    skipped: tuple[str, ...]
    """Conditions that only a shell on the cluster could decide, taken as false, where they guard an assignment."""


def read_script(text: str, given: Mapping[str, str], where: str) -> Script:
    """Read a script. `given` are variables that its caller sets. Raises SpecError if a quote or bracket stays open."""
    variables: dict[str, Value] = dict(given)
    commands: list[tuple[str, ...]] = []
    skipped: list[str] = []
    blocks: list[_Block] = []
    last: bool | None = True
    undecided = ""
    for before, words in _statements(text, where):
        while words and words[0] in ("{", "}", "!", "time", "exec", "(", ")"):
            words = words[1:]
        words, last = _keyword(words, blocks, last)
        lazy = (before == "&&" and last is not True) or (before == "||" and last is True)
        decides = bool(words) and words[0] in ("if", "elif")
        if not words or not all(block.is_open for block in blocks) or (lazy and not decides):
            unknown = [b.undecided for b in blocks if not b.is_open] + [undecided] * lazy
            if words and _ASSIGNMENT.fullmatch(words[0]):
                skipped += [u for u in unknown if u and u not in skipped]
            continue
        words = words[1:] if decides else words
        is_test = bool(words) and words[0] in ("[", "[[", "test")
        if is_test or decides:
            last = _test(words, variables) if is_test else None
            undecided = " ".join(words) if last is None else ""
            if decides:
                blocks[-1].undecided = undecided
            continue
        last, undecided = True, ""
        rest = _assign(words, variables, given, where)
        if rest and rest[0] not in ("source", ".", "set", "mkdir", "echo", "cd", "return", "exit", "shift", "unset"):
            commands.append(tuple(field for word in rest for field in expand(word, variables)))
    return Script(tuple(commands), variables, tuple(skipped))


class _Block:
    """An `if` or a loop that the reader stands in."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.taken: bool | None = None
        """Whether a branch of the `if` has been taken."""
        self.undecided = ""
        """Its condition, if only a shell could tell."""
        self.is_open = kind == "if"
        """Whether statements here run; those of a condition do."""


def _keyword(words: tuple[str, ...], blocks: list[_Block], last: bool | None) -> tuple[tuple[str, ...], bool | None]:
    """Enter and leave blocks; what is left of the statement, and whether the condition in front of it held."""
    while words:
        first = words[0]
        block = blocks[-1] if blocks else None
        if first in _OPEN or first == "case":
            blocks.append(_Block(first))
            return (), last
        if block and ((block.kind in _OPEN and first == _CLOSE) or (block.kind == "case" and first == "esac")):
            blocks.pop()
            return (), True
        if first == "if":
            blocks.append(_Block("if"))
            return words, None
        if not block or block.kind != "if" or first not in ("then", "elif", "else", "fi"):
            return words, last
        if first == "fi":
            blocks.pop()
            return (), True
        if first == "elif":
            block.is_open = not block.taken
            return words, None
        if first == "then":
            block.is_open = block.is_open and last is True
            block.taken = block.taken or block.is_open
        else:
            block.is_open = not block.taken
        words, last = words[1:], True
    return words, last


def _assign(words: Sequence[str], variables: dict[str, Value], given: Mapping[str, str], where: str) -> Sequence[str]:
    """Carry out the assignments at the head of a statement, but for what the caller sets; the words after them."""
    declares = bool(words) and words[0] in _DECLARE
    rest = words[1:] if declares else words
    while rest and declares and rest[0].startswith("-"):
        rest = rest[1:]
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        name, plus, raw = match.groups()
        value: Value = (
            _array(raw, variables, f"{where}: {name}") if raw.startswith("(") else expand_text(raw, variables)
        )
        old = variables.get(name)
        if plus and isinstance(value, list):
            value = ([old] if isinstance(old, str) else old or []) + value
        elif plus and isinstance(value, str):
            value = (old if isinstance(old, str) else "") + value
        if sum(map(len, value)) > MOST_TEXT:
            raise SpecError(f"{where}: {name}: longer than any argument list")
        if name not in given:
            variables[name] = value
        rest = rest[1:]
    return () if declares else rest


def _array(raw: str, variables: Mapping[str, Value], where: str) -> list[str]:
    inner = _statements(raw[1:-1], where)
    return [field for statement in inner for word in statement.words for field in expand(word, variables)]


def _test(words: tuple[str, ...], variables: Mapping[str, Value]) -> bool | None:
    """The truth of `[ ... ]`; None where only a shell could tell."""
    inner = [w for w in words if w not in ("[", "[[", "]", "]]", "test")]
    negate = bool(inner) and inner[0] == "!"
    inner = inner[1:] if negate else inner
    parts = [expand_text(word, variables) for word in inner]
    truth = _truth(parts)
    return None if truth is None else truth != negate


def _truth(parts: list[str]) -> bool | None:
    values = ["" if is_unset(p) else p for p in parts]
    if len(parts) == 2 and parts[0] in ("-n", "-z"):
        return bool(values[1]) == (parts[0] == "-n")
    if len(parts) == 1:
        return bool(values[0])
    if len(parts) != 3:
        return None
    left, operator, right = values
    if operator in ("=", "=="):
        return left == right
    if operator == "!=":
        return left != right
    a, b = number_in(left), number_in(right)
    if a is None or b is None:
        return None
    return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}.get(operator)


def _statements(text: str, where: str) -> Iterator[Statement]:
    """Cut a script into statements; quotes, `$(...)`, `${...}` and arrays stay within their words."""
    before, words, word, i = "\n", [], "", 0
    dropping = False
    while i <= len(text):
        char = text[i] if i < len(text) else "\n"
        if char == "\\" and text[i + 1 : i + 2] == "\n":
            i += 2
            continue
        if (
            char in "'\"`"
            or (char == "$" and text[i + 1 : i + 2] in ("(", "{"))
            or (char == "(" and word.endswith("="))
        ):
            end = closing(text, i)
            if end is None:
                line = text.count("\n", 0, i) + 1
                raise SpecError(f"{where}: line {line}: {text[i : i + 2]!r} is never closed")
            word, i = word + text[i:end], end
            continue
        if char == "#" and not word:
            end = text.find("\n", i)
            i = len(text) if end < 0 else end
            continue
        if char == "\\":
            word, i = word + text[i : i + 2], i + 2
            continue
        if char not in " \t\r\n;&|<>()":
            word, i = word + char, i + 1
            continue
        if word:
            words += [] if dropping or (char in "<>" and word.isdigit()) else [word]
            word, dropping = "", False
        i += 1
        if text[i - 1 : i + 1] == "<<" and text[i + 1 : i + 2] != "<":
            i = _behind_document(text, i + 1, words[:1] == ["cat"])
            dropping = True
        elif char in "<>":
            while text[i : i + 1] and text[i] in "<>&|-":
                i += 1
            dropping = True
        elif char in "\n;&|()":
            double = char in "&|" and text[i : i + 1] == char
            if words:
                yield Statement(before, tuple(words))
                before = "\n"
            before = char * 2 if double else (before if char in "\n()" and before in ("&&", "||") else char)
            words, dropping, i = [], False, i + double


def _behind_document(text: str, i: int, is_data: bool) -> int:
    """Where reading goes on at a here-document: behind it if it is data, else at its commands."""
    match = re.compile(r"-?\s*(['\"]?)([\w.]+)\1").match(text, i)
    if not match or not is_data:
        return i + text[i : i + 1].count("-")
    end = re.compile(rf"^\s*{re.escape(match[2])}\s*$", re.MULTILINE).search(text, match.end())
    return end.end() if end else len(text)


def split_words(text: str, where: str) -> list[str]:
    """The words of a string that holds a command line."""
    return [field for s in _statements(text, where) for word in s.words for field in expand(word, {})]

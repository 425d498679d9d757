"""Words: expanding a bash word into the fields that a command would be given.

Variables with their defaults, arrays, quotes and integer arithmetic. What is not known, a variable that nothing sets or
the output of a command, becomes a mark (`UNSET`) that travels with the word, so that whoever needs the value can say
which variable it lacks.
"""

import re
from collections.abc import Iterator, Mapping

Value = str | list[str]
UNSET = "\0"
"""Stands before and behind the name of what is not known."""
COMMAND = "0"
"""Stands for the name where it is the output of a command."""

_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!]")
_BRACED = re.compile(
    r"(?P<name>[A-Za-z_]\w*|[0-9]+|[@*#?])(?:\[(?P<index>[^]]*)\])?(?P<operator>:?[-=+?]|[%#/^,].*)?(?P<default>.*)",
    re.DOTALL,
)
_VARIABLE = re.compile(r"\$\{?([A-Za-z_]\w*)\}?|([A-Za-z_]\w*)")
_PAIRS = {"(": ")", "{": "}"}
_NUMBER = re.compile(r"\s*(\d+)|\s*([-+*/%()])")
LARGEST = 2**63
"""Bash counts in 64 bits, and nothing counted here comes near."""


def is_unset(text: str) -> bool:
    """Whether a text holds something that is not known."""
    return UNSET in text


def unset_name(text: str) -> str:
    """What of a text is not known: a variable, or the output of a command."""
    name = text.split(UNSET)[1] if UNSET in text else ""
    return "the output of a command" if name == COMMAND else f"${name}"


def number_in(text: str) -> int | None:
    """The integer that a text is."""
    return int(text) if re.fullmatch(r"\s*[-+]?\d{1,18}\s*", text) else None


def expand(word: str, variables: Mapping[str, Value]) -> list[str]:
    """The fields of a word: none, one, or several where it holds arrays or blanks outside quotes."""
    fields: list[str] = []
    current: str | None = None
    for text, is_quoted, is_break in _pieces(word, variables):
        if is_break:
            if current is not None:
                fields.append(current)
            current = None
        elif text or is_quoted:
            current = (current or "") + text
    if current is not None:
        fields.append(current)
    return fields


def expand_text(word: str, variables: Mapping[str, Value]) -> str:
    """A word as one text, as in an assignment."""
    return "".join(" " if is_break else text for text, _, is_break in _pieces(word, variables))


def _pieces(word: str, variables: Mapping[str, Value]) -> Iterator[tuple[str, bool, bool]]:
    """(text, quoted, break between fields) of a word, in order."""
    i, is_quoted = 0, False
    while i < len(word):
        char = word[i]
        if char == "'" and not is_quoted:
            end = word.find("'", i + 1)
            end = len(word) if end < 0 else end
            yield word[i + 1 : end], True, False
            i = end + 1
        elif char == '"':
            is_quoted = not is_quoted
            yield "", True, False
            i += 1
        elif char == "\\":
            keeps = is_quoted and word[i + 1 : i + 2] not in ('"', "\\", "$", "`")
            if word[i + 1 : i + 2] != "\n":
                yield word[i : i + 2] if keeps else word[i + 1 : i + 2], True, False
            i += 2
        elif char in "$`":
            value, i = _dollar(word, i, variables)
            yield from _spread(value, is_quoted)
        else:
            yield char, is_quoted, False
            i += 1


def _spread(value: Value, is_quoted: bool) -> Iterator[tuple[str, bool, bool]]:
    """The pieces of an expanded value: an array breaks between its elements, a text outside quotes at its blanks."""
    for number, element in enumerate([value] if isinstance(value, str) else value):
        if number:
            yield "", False, True
        if is_quoted:
            yield element, True, False
            continue
        for piece in re.split(r"(\s+)", element):
            yield piece, False, bool(piece) and piece.isspace()


def _dollar(word: str, i: int, variables: Mapping[str, Value]) -> tuple[Value, int]:
    """The value of the expansion that begins at `i`, and the place behind it."""
    if word[i] == "`":
        end = word.find("`", i + 1)
        return f"{UNSET}{COMMAND}{UNSET}", len(word) if end < 0 else end + 1
    opening = word[i + 1 : i + 2]
    if opening in ("(", "{"):
        end = closing(word, i) or len(word)
        inner = word[i + 2 : end - 1]
        if opening == "{":
            return _braced(inner, variables), end
        if inner.startswith("(") and inner.endswith(")"):
            return _arithmetic(inner[1:-1], variables), end
        return f"{UNSET}{COMMAND}{UNSET}", end
    match = _NAME.match(word, i + 1)
    if not match:
        return "$", i + 1
    return _lookup(match[0], variables), match.end()


def closing(text: str, start: int) -> int | None:
    """The place behind the quote, bracket or `$` with its bracket that opens at `start`; None if it is never closed."""
    char = text[start]
    i = start + 1
    if char == "$":
        char, i = text[start + 1], start + 2
    stack = [char]
    while i < len(text):
        c, top = text[i], stack[-1]
        if c == "\\" and top != "'":
            i += 2
            continue
        if c == _PAIRS.get(top, top):
            stack.pop()
            if not stack:
                return i + 1
        elif top == "'" or (top in '"`' and c != "$"):
            pass
        elif c == "$" and text[i + 1 : i + 2] in ("(", "{"):
            stack.append(text[i + 1])
            i += 1
        elif top != '"' and (c in "'\"`" or (c in "({" and c == top)):
            stack.append(c)
        elif c == "#" and top == "(" and text[i - 1] in " \t\n(":
            i = text.find("\n", i)
            if i < 0:
                break
        i += 1
    return None


def _lookup(name: str, variables: Mapping[str, Value]) -> Value:
    if name in ("@", "*"):
        return []
    value = variables.get(name)
    if isinstance(value, list):
        return value[0] if value else ""
    return f"{UNSET}{name}{UNSET}" if value is None else value


def _braced(inner: str, variables: Mapping[str, Value]) -> Value:
    match = _BRACED.fullmatch(inner)
    if not match:
        return f"{UNSET}{COMMAND}{UNSET}"
    name, index, operator = match["name"], match["index"], match["operator"] or ""
    value: Value = _lookup(name, variables)
    held = variables.get(name)
    if index in ("@", "*"):
        value = list(held) if isinstance(held, list) else [] if held is None else [held]
    elif index is not None and isinstance(held, list):
        place = number_in(index)
        value = held[place] if place is not None and -len(held) <= place < len(held) else ""
    missing = not value or (isinstance(value, str) and is_unset(value))
    if operator in (":-", "-", ":=", "="):
        return expand_text(match["default"], variables) if missing else value
    if operator in (":+", "+"):
        return "" if missing else expand_text(match["default"], variables)
    return value


def _arithmetic(text: str, variables: Mapping[str, Value]) -> str:
    """The value of `$((...))` over integers; not known if anything in it is not."""
    names = [m[1] or m[2] for m in _VARIABLE.finditer(text)]
    lacking = next((n for n in names if not variables.get(n)), COMMAND)
    unknown = f"{UNSET}{lacking}{UNSET}"
    plain = _VARIABLE.sub(lambda m: f" {_lookup(m[1] or m[2], variables)} ", text)
    tokens: list[str] = []
    place = 0
    plain = plain.strip()
    while place < len(plain):
        match = _NUMBER.match(plain, place)
        if not match:
            return unknown
        tokens.append(match[1] or match[2])
        place = match.end()
    try:
        value, rest = _sum(tokens)
    except (IndexError, ValueError, ZeroDivisionError, RecursionError):
        rest = ["?"]
    return unknown if rest or abs(value) >= LARGEST else str(value)


def _sum(tokens: list[str]) -> tuple[int, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        sign = 1 if tokens[0] == "+" else -1
        right, tokens = _product(tokens[1:])
        value += sign * right
    return value, tokens


def _product(tokens: list[str]) -> tuple[int, list[str]]:
    value, tokens = _factor(tokens)
    while tokens and tokens[0] in "*/%":
        operator = tokens[0]
        right, tokens = _factor(tokens[1:])
        if operator == "*":
            value *= right
            if abs(value) >= LARGEST:
                raise ValueError("beyond 64 bits")
        else:
            quotient = int(abs(value) // abs(right)) * (1 if value * right >= 0 else -1)  # bash cuts towards zero
            value = quotient if operator == "/" else value - quotient * right
    return value, tokens


def _factor(tokens: list[str]) -> tuple[int, list[str]]:
    head = tokens[0]
    if head == "-":
        value, rest = _factor(tokens[1:])
        return -value, rest
    if head == "(":
        value, rest = _sum(tokens[1:])
        if rest[0] != ")":
            raise ValueError("never closed")
        return value, rest[1:]
    if len(head) > 18:
        raise ValueError("beyond 64 bits")
    return int(head), tokens[1:]

"""Flat YAML: the little of YAML that test cases and recipes of training frameworks are written in.

Mappings nested by indentation, scalars plain or quoted, lists in brackets or of dashes, comments. A key that stands
twice has its last value, as other readers give it; block text is passed over. Anchors, tags and braces are refused by
line: a strict reader of little is better than a lax one of much, and needs no package.
"""

import re

from greylag.spec.error import SpecError

_BLOCK = "(text)"
_ENTRY = re.compile(r"""(?P<key>"[^"]*"|'[^']*'|[^\s:#"'\[\]{},&*!|>%@`][^:#]*?)\s*:(?:\s+(?P<value>.*))?""", re.DOTALL)


def read_yaml(text: str, where: str) -> dict[str, list[str]]:
    """The words of every scalar and list by its path (`MODEL_ARGS.--num-layers`), in the file's order.

    Raises SpecError by line on what it does not know.
    """
    found: dict[str, list[str]] = {}
    parents: list[tuple[int, str]] = []
    path, depth, block = "", -1, -1
    for number, raw in enumerate(text.split("\n"), 1):
        line = _without_comment(raw).rstrip()
        body = line.strip()
        if not body or body == "---":
            continue
        indent = len(line) - len(line.lstrip())
        if indent > block >= 0:
            continue
        block = -1
        here = f"{where}: line {number}"
        if "\t" in line[:indent]:
            raise SpecError(f"{here}: a tab indents it; use spaces")
        if body.startswith("- ") or body == "-":
            if not path:
                raise SpecError(f"{here}: a list that belongs to no key")
            found[path] = [*found.get(path, []), *_scalar(body[1:].strip(), here)]
            continue
        match = _ENTRY.fullmatch(body)
        if not match:
            if path and indent > depth and not found.get(path):
                found[path] = _scalar(body, here)
                continue
            raise SpecError(f"{here}: {body[:40]!r} is no 'key: value'")
        while parents and parents[-1][0] >= indent:
            parents.pop()
        key, value = match["key"].strip("\"'"), (match["value"] or "").strip()
        depth, path = indent, ".".join([*(name for _, name in parents), key])
        if re.fullmatch(r"[|>][-+]?\d?", value):
            block, found[path] = indent, [_BLOCK]
        elif value:
            found[path] = _scalar(value, here)
        else:
            parents.append((indent, key))
            found[path] = []
    nested = {path.rsplit(".", n)[0] for path in found for n in range(1, path.count(".") + 1)}
    return {path: words for path, words in found.items() if words or path not in nested}


def _without_comment(line: str) -> str:
    """A line up to a `#` that begins a comment: at its start or behind a blank, outside quotes."""
    quote = ""
    for i, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'" and (i == 0 or line[i - 1] in " [,:"):
            quote = char
        elif char == "#" and (i == 0 or line[i - 1] in " \t"):
            return line[:i]
    return line


def _scalar(value: str, here: str) -> list[str]:
    """The words of a scalar or of a list in brackets."""
    if value[:1] in ("&", "*", "!", "|", ">", "{", "%", "@", "`") and value != "{}":
        raise SpecError(f"{here}: {value[:40]!r}: only scalars and lists are read; write it as one")
    if value.startswith("[") and value.endswith("]") and "*" not in value:
        return [item.strip().strip("\"'") for item in value[1:-1].split(",") if item.strip()]
    if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return [value[1:-1]]
    return [value] if value and value != "{}" else []

"""Arguments: a program's options by name, read with their types, and what was done with each of them.

Every option ends in one of four ways: it is expressed in the job, or it stands in the `Remarks` as irrelevant to a
prediction, as approximated, or as not expressible. None is lost silently.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from greylag.interop.words import LARGEST, is_unset, unset_name
from greylag.spec.error import SpecError

_FALSE = ("false", "False", "0", "no", "null", "None", "none", "")


class Remarks:
    """What became of the options that a job does not hold exactly."""

    def __init__(self) -> None:
        self.irrelevant: list[str] = []
        """Names of options that change nothing of a prediction: paths, logging, checkpoints."""
        self.approximated: dict[str, str] = {}
        """Option and what stands in its place."""
        self.left_out: dict[str, str] = {}
        """Option that cannot be expressed, and what it changes."""

    def approximate(self, name: str, how: str) -> None:
        """Note that an option is expressed by something near it."""
        self.approximated.setdefault(name, how)

    def leave_out(self, name: str, changes: str) -> None:
        """Note that an option is not expressed."""
        self.left_out.setdefault(name, changes)

    def lines(self) -> list[str]:
        """The remarks for people, in three groups."""
        said = []
        if self.irrelevant:
            said.append(f"irrelevant to a prediction: {', '.join(self.irrelevant)}")
        for group, noted in (("approximated", self.approximated), ("not expressible", self.left_out)):
            for what in dict.fromkeys(noted.values()):
                names = ", ".join(name for name, its in noted.items() if its == what)
                said.append(f"{group}: {names}: {what}")
        return said


class Arguments:
    """Options by name, without dashes in front and with `-` for `_`, and their words."""

    def __init__(self, options: Mapping[str, list[str]], where: str, prefix: str = "--") -> None:
        self.options, self.where, self.prefix = options, where, prefix
        self.read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.options

    def said(self, name: str) -> str:
        """The option as its program spells it."""
        return f"-{name}" if self.prefix and len(name) == 1 else f"{self.prefix}{name}"

    def words(self, name: str) -> list[str]:
        """All words of an option, a list in brackets taken apart; empty where it is absent."""
        self.read.add(name)
        joined = " ".join(w for w in self.options.get(name, []) if not is_unset(w))
        return [w for w in re.split(r"[\s,]+", joined.strip("[]() ").replace("'", "").replace('"', "")) if w]

    def text(self, name: str, default: str = "") -> str:
        """The first word of an option."""
        self.read.add(name)
        words = self.options.get(name)
        if words is None or words == ["null"] or words == ["None"]:
            return default
        if not words or is_unset(words[0]):
            lack = f"{unset_name(words[0])} is not known here" if words else "has no value"
            raise SpecError(f"{self.where}: {self.said(name)}: {lack}; add {name}=VALUE behind the file")
        return words[0]

    def flag(self, *names: str) -> bool:
        """Whether any of these switches is on."""
        on = [self._flag(name) for name in names]  # a list, so that all of them are read
        return any(on)

    def _flag(self, name: str) -> bool:
        self.read.add(name)
        return name in self and not self.is_off(name)

    def is_off(self, name: str) -> bool:
        """Whether an option that is there has a value that switches it off."""
        words = self.options[name]
        return bool(words) and words[0] in _FALSE

    def switch(self, name: str, default: bool) -> bool:
        """A switch that is `--no-NAME` or `--disable-NAME` when it is off."""
        off = self.flag(f"no-{name}", f"disable-{name}")
        return self.flag(name) if name in self else default and not off

    def number(self, name: str, default: float | None = None) -> float:
        """A real number. Without default it is required."""
        text = self.text(name, "" if default is None else str(default))
        if not text:
            raise SpecError(f"{self.where}: {self.said(name)} is missing; add it")
        try:
            value = float(text.replace("_", ""))
        except ValueError:
            raise SpecError(f"{self.where}: {self.said(name)}: {text!r} is not a number") from None
        if not abs(value) < float("inf"):
            raise SpecError(f"{self.where}: {self.said(name)}: {text!r} is not a finite number")
        return value

    def integer(self, name: str, default: int | None = None) -> int:
        """An integer, 0 or more. Without default it is required."""
        value = self.number(name, default)
        if value != int(value) or not 0 <= value < LARGEST:
            raise SpecError(f"{self.where}: {self.said(name)}: {value:g} is not a count")
        return int(value)

    def sort_unread(self, remarks: Remarks, sort: Callable[[str], tuple[str, str]]) -> None:
        """Tell what became of each option that nothing has read: `sort` gives the group of a name and what to say."""
        for name in self.options:
            if name in self.read:
                continue
            group, what = sort(name)
            if group == "irrelevant":
                remarks.irrelevant.append(self.said(name))
            elif not self.is_off(name):
                (remarks.approximate if group == "approximated" else remarks.leave_out)(self.said(name), what)


def options_from(words: Iterable[str]) -> dict[str, list[str]]:
    """Options of a command line: `--name value ...`, `--name=value` and `section.name=value`; the last one wins.

    Dotted names keep their dots. Words before the first option belong to none.
    """
    options: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        dotted = re.fullmatch(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", word, re.DOTALL)
        long = re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        short = re.fullmatch(r"-([A-Za-z])(.*)", word, re.DOTALL)
        if dotted:
            options[dotted[1]] = current = [dotted[2]]
        elif long:
            name = long[1].replace("_", "-")
            options[name] = current = [long[2]] if long[2] is not None else []
        elif short and not re.fullmatch(r"-\w*\.?\d.*", word):
            options[short[1]] = current = [short[2]] if short[2] else []
        else:
            current.append(word)
    return options

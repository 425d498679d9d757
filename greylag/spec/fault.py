"""Fault: how a setting that cannot be is told, and two faults that any struct may have."""

from collections.abc import Iterator

import msgspec

from greylag.spec.finding import Finding


def error(where: str, what: str, advice: str) -> Finding:
    """A fault of the setting at the key `where`."""
    return Finding(level="error", where=where, what=what, advice=advice)


def unused(where: str, struct: msgspec.Struct, names: tuple[str, ...], reason: str) -> Iterator[Finding]:
    """Settings that were given and cannot take effect."""
    for field in msgspec.structs.fields(struct):
        make = field.default_factory
        default = field.default if make is msgspec.NODEFAULT else make()
        if field.name in names and getattr(struct, field.name) != default:
            yield error(f"{where}{field.name}", f"has no effect {reason}", "remove it")


def positive(where: str, struct: msgspec.Struct, zero_allowed: tuple[str, ...] = ()) -> Iterator[Finding]:
    """Numbers that are not finite, negative, or 0 where that is not allowed."""
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value != value or value in (float("inf"), float("-inf")):
            yield error(f"{where}{name}", f"{value} is not a finite number", "give a finite number")
        elif value < 0 or (value == 0 and name not in zero_allowed):
            yield error(
                f"{where}{name}",
                f"must be {'0 or more' if name in zero_allowed else 'positive'}, is {value}",
                "change it",
            )

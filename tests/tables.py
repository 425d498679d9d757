"""A job as the table of a file, and changes of it, for tests of what is wrong with one."""

from copy import deepcopy
from typing import Any

BASE: dict[str, Any] = {
    "model": "deepseek-v3-tiny",
    "precision": "fp8-block128",
    "cluster": "local-2x1",
    "sequence": 64,
    "global_batch": 4,
    "strategy": {"dp": 2},
    "run": {"steps": 4, "warmup_steps": 2},
}


def merged(changes: dict[str, Any]) -> dict[str, Any]:
    """BASE with changes; a table in both is merged, a name meets a table as its preset, None drops the key."""
    table = deepcopy(BASE)
    for key, value in changes.items():
        old = table.get(key)
        if value is None:
            del table[key]
        elif isinstance(value, dict) and old is not None:
            table[key] = {**(old if isinstance(old, dict) else {"preset": old}), **value}
        else:
            table[key] = value
    return table

"""Known: trained models with what is public of them, from `presets/trained.toml`, where every figure has its source.

A model has up to three figures for its training compute: what somebody published, what `plan.demand` counts from its
dimensions and tokens, and 6 x active parameters x tokens. The first two are held against each other in tests/plan.
"""

import datetime
import difflib
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from greylag.plan.demand import Training, approximate_training, count_training, stated_training
from greylag.spec.error import SpecError
from greylag.spec.load import PRESETS, load_preset
from greylag.spec.model import Model

TABLE = PRESETS / "trained.toml"

CLOSE = 0.10
"""Counted and published compute that differ by no more than this agree."""

Origin = Literal["stated", "derived", "estimated"]
"""Of a published figure: its developer says it; somebody computed it from public parameters and tokens, or from
device-hours; somebody estimated it without them."""

Way = Literal["published", "dimensions", "6ND"]
"""A way to come by the FLOPs of a known model."""


class Trained(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that was trained, and what is public of it."""

    key: str
    """Its name on the command line."""
    name: str
    date: datetime.date
    """Of its publication."""
    parameters: float | None = None
    active: float | None = None
    """Parameters that one token meets; None: all."""
    tokens: float | None = None
    """Of pre-training, all passes over the data counted."""
    sequence: int | None = None
    """Tokens of most of pre-training's sequences."""
    source: str = ""
    """Of parameters, tokens and dimensions."""
    model: Model | None = None
    """Its dimensions, where they are public and a Model can say them."""
    compute: float | None = None
    """Published training compute in FLOPs."""
    compute_low: float | None = None
    compute_high: float | None = None
    """The interval that whoever published it gives, where there is one."""
    origin: Origin | None = None
    compute_source: str = ""
    """Who published the compute, and where."""
    apart: str = ""
    """Why counted and published compute differ by more than `CLOSE`."""

    @property
    def year(self) -> float:
        """Its date in years: 2020.5 is the middle of 2020."""
        return self.date.year + (self.date.timetuple().tm_yday - 0.5) / 365.25

    @property
    def counted(self) -> float | None:
        """FLOPs from dimensions and tokens; None where they are not public."""
        return float(training(self, "dimensions").flops.value) if "dimensions" in self.ways else None

    @property
    def ways(self) -> tuple[Way, ...]:
        """How its FLOPs can be come by, the best first."""
        ways: list[Way] = ["published"] if self.compute else []
        if self.model and self.tokens and self.sequence:
            ways.append("dimensions")
        return (*ways, "6ND") if self.parameters and self.tokens else tuple(ways)

    @property
    def flops(self) -> float:
        """Its training compute, come by in the best way."""
        return float(training(self).flops.value)

    @property
    def difference(self) -> float | None:
        """What counting gives over the published compute, as a share of it: 0.05 is 5% more."""
        return self.counted / self.compute - 1 if self.counted and self.compute else None

    @property
    def agrees(self) -> bool | None:
        """Whether the two differ by no more than `CLOSE`; None where one is not there."""
        return None if self.difference is None else abs(self.difference) <= CLOSE


def known_models(path: Path = TABLE) -> tuple[Trained, ...]:
    """All models of the table by date. Raises SpecError if it cannot be read."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"{path}: cannot be read as a table of models: {error}") from None
    return tuple(sorted((_trained(key, row, path) for key, row in table.items()), key=lambda m: (m.date, m.key)))


def find_model(name: str, models: Sequence[Trained]) -> Trained:
    """A model by its key or name, capitals and spaces aside. Raises SpecError with the nearest known name."""
    wanted = _plain(name)
    for model in models:
        if wanted in (_plain(model.key), _plain(model.name)):
            return model
    near = difflib.get_close_matches(wanted, [_plain(m.key) for m in models], 1, cutoff=0.4)
    key = next((m.key for m in models if near and _plain(m.key) == near[0]), None)
    hint = f"did you mean '{key}'?" if key else "see `greylag plan demand --known`"
    raise SpecError(f"no known model {name!r}; {hint}")


def training(model: Trained, way: Way | None = None) -> Training:
    """The training of a known model, its FLOPs come by in one `way`, or in the best there is.

    Raises SpecError if that way needs what is not public.
    """
    if way is None or way not in model.ways:
        if way or not model.ways:
            raise SpecError(f"'{model.key}': not public: what {way or 'FLOPs'} takes; choose {_or(model.ways)}")
        way = model.ways[0]
    if way == "published":
        assert model.compute
        how = f"{model.origin}: {model.compute_source}"
        stated = stated_training(model.compute, model.name, how, model.compute_low, model.compute_high)
        return replace(stated, tokens=model.tokens, parameters=model.parameters, active=model.active)
    assert model.tokens
    if way == "dimensions":
        assert model.model
        assert model.sequence
        return replace(count_training(model.model, model.sequence, model.tokens), name=model.name)
    assert model.parameters
    return approximate_training(model.parameters, model.tokens, model.active, model.name)


def _trained(key: str, row: Any, path: Path) -> Trained:
    """One row. `model` is a table of `spec.Model`'s keys, or the name of a preset."""
    if not isinstance(row, dict):
        raise SpecError(f"{path}: '{key}' is no table of a model; put it under the model's name, such as [my-model]")
    row = {"key": key, **row}
    dimensions = row.pop("model", None)
    try:
        if isinstance(dimensions, str):
            row["model"] = load_preset("model", dimensions)
        elif dimensions is not None:
            named = {"name": row.get("name", key), "max_sequence": row.get("sequence"), **dimensions}
            row["model"] = msgspec.convert(named, Model)
        return msgspec.convert(row, Trained)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path}: '{key}': {error}") from None


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum() or c == ".")


def _or(ways: Sequence[str]) -> str:
    return " or ".join(ways) or "another model"

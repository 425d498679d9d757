"""Law: the answers of a scaling law of precision as tables on the terminal.

The figures are `plan`'s, which this file is handed and does not import: the protocols below are what it reads of them.
Below every table stands what it does not hold for: the ranges that were left, and what was never measured.
"""

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from greylag.report.demand import power
from greylag.report.show import table_of
from greylag.spec.quantity import count, digits, finite, percent


class Spanning(Protocol):
    """An interval."""

    @property
    def low(self) -> float:
        """Where it begins."""

    @property
    def high(self) -> float:
        """Where it ends."""


class Ranged(Spanning, Protocol):
    """What was fitted, of one quantity; `plan.reach.Range` is one."""

    @property
    def what(self) -> str:
        """Its name."""


class Outside(Ranged, Protocol):
    """A quantity that lies outside of what a law was fitted to; `plan.reach.Outside` is one."""

    @property
    def value(self) -> float:
        """As asked."""

    @property
    def factor(self) -> float:
        """By how many times it lies outside."""


class Bought(Protocol):
    """What is trained, and the loss that it ends with."""

    @property
    def parameters(self) -> float:
        """How many."""

    @property
    def tokens(self) -> float:
        """How many."""

    @property
    def loss(self) -> float:
        """Nats per token."""


class Choice(Bought, Protocol):
    """A precision and what is bought in it; `plan.law.Choice` is one."""

    @property
    def name(self) -> str:
        """Of the precision."""

    @property
    def bits(self) -> float:
        """Of a number."""

    @property
    def outside(self) -> Sequence[Outside]:
        """Where it leaves the fit."""


class Overtrained(Bought, Protocol):
    """The best plan of the same cost and precision; `plan.law.Overtraining` is one."""

    @property
    def share(self) -> float:
        """Of the cost, at which the best reaches the plan's loss."""


class PostTrained(Protocol):
    """What quantizing after training costs; `plan.kumar.PostTraining` is one."""

    @property
    def bits(self) -> float:
        """Of the weights."""

    @property
    def penalty(self) -> float:
        """Nats per token."""

    @property
    def critical_tokens(self) -> float:
        """Beyond them more training makes the quantized model worse."""


class Sourced(Protocol):
    """What a law says."""

    @property
    def source(self) -> str:
        """Whose constants."""

    @property
    def remarks(self) -> Sequence[str]:
        """What the law holds for."""


class Answered(Bought, Sourced, Protocol):
    """The loss of a plan; `plan.law.Answer` is one."""

    @property
    def precision(self) -> str:
        """In words."""

    @property
    def cost(self) -> float:
        """FLOPs, P / 16 each."""

    @property
    def high_loss(self) -> float:
        """The same in high precision."""

    @property
    def critical_tokens(self) -> float | None:
        """Beyond them more training hurts."""

    @property
    def overtraining(self) -> Overtrained:
        """Against the best."""

    @property
    def post_training(self) -> Sequence[PostTrained]:
        """By bits."""

    @property
    def outside(self) -> Sequence[Outside]:
        """Where it leaves the fit."""


class Choosing(Sourced, Protocol):
    """What a law says of precisions."""

    @property
    def best(self) -> Choice:
        """Of any number of bits."""

    @property
    def choices(self) -> Sequence[Choice]:
        """Of what can be chosen."""


class Best(Choosing, Protocol):
    """Ways to spend a budget; `plan.law.Optimum` is one."""

    @property
    def budget(self) -> float:
        """FLOPs, P / 16 each."""

    @property
    def held(self) -> Literal["parameters", "tokens"] | None:
        """What the question fixed."""


class Curved(Choosing, Protocol):
    """Loss over bits; `plan.law.Curve` is one."""

    @property
    def law(self) -> str:
        """Its name."""

    @property
    def tokens(self) -> float:
        """The same everywhere."""

    @property
    def product(self) -> float:
        """Parameters times bits, the same everywhere."""

    @property
    def bits(self) -> Any:
        """An array."""

    @property
    def loss(self) -> Any:
        """An array, nats per token."""


class Fitted(Spanning, Protocol):
    """A constant of a fit; `plan.law_fit.Constant` is one."""

    @property
    def name(self) -> str:
        """The law's."""

    @property
    def value(self) -> float:
        """As fitted."""

    @property
    def published(self) -> float | None:
        """The paper's."""


class Fit(Protocol):
    """A law fitted to runs; `plan.law_fit.Fit` is one."""

    @property
    def source(self) -> str:
        """The runs."""

    @property
    def num_runs(self) -> int:
        """How many."""

    @property
    def noise(self) -> float:
        """Of the logarithm of a run's loss."""

    @property
    def constants(self) -> Sequence[Fitted]:
        """All of them."""

    @property
    def undetermined(self) -> Sequence[str]:
        """Those that the runs do not say."""

    @property
    def ranges(self) -> Sequence[Ranged]:
        """What the runs spanned."""

    @property
    def notes(self) -> Sequence[str]:
        """What was left out."""


class Predicted(Spanning, Protocol):
    """A fitted law's loss; `plan.law_fit.Prediction` is one."""

    @property
    def loss(self) -> float:
        """Nats per token."""

    @property
    def outside(self) -> Sequence[Outside]:
        """Where it leaves the runs."""


def print_law_answer(answer: Answered, console: Console | None = None) -> None:
    """Print the loss of a plan, what its precision and its balance cost, and what the law does not hold for."""
    console = console or Console()
    console.print(f"[bold]Loss in {escape(answer.precision)}[/], by {escape(answer.source)}", highlight=False)
    table, best = table_of("quantity", "value"), answer.overtraining
    table.add_row("parameters", count(answer.parameters))
    table.add_row("tokens", count(answer.tokens))
    table.add_row("tokens per parameter", digits(answer.tokens / answer.parameters))
    table.add_row("cost in FLOPs, P bits counted P / 16", power(answer.cost))
    table.add_section()
    table.add_row("loss (nats per token)", f"{answer.loss:.4f}")
    table.add_row("of it, what precision costs", f"{answer.loss - answer.high_loss:.4f}")
    if answer.critical_tokens is not None:
        table.add_row("tokens beyond which more hurt", count(answer.critical_tokens))
    table.add_section()
    table.add_row("best parameters at this cost and precision", count(best.parameters))
    table.add_row("their tokens", count(best.tokens))
    table.add_row("their loss", f"{best.loss:.4f}")
    table.add_row("share of the cost at which the best has the plan's loss", percent(best.share))
    console.print(table)
    if answer.critical_tokens is not None and answer.tokens > answer.critical_tokens:
        console.print("Fewer tokens would do better: by this law the plan is beyond the critical number.")
    if answer.post_training:
        console.print(_post_training(answer))
    _print_limits(answer.outside, answer.remarks, console)


def _post_training(answer: Answered) -> Table:
    table = table_of("weights quantized after training", "loss added", "tokens beyond which more hurt", "the plan's")
    for row in answer.post_training:
        hurts = "[red]too many[/]" if answer.tokens > row.critical_tokens else "fewer"
        table.add_row(f"{row.bits:g} bits", f"{row.penalty:.4f}", count(row.critical_tokens), hurts)
    return table


def print_optimum(optimum: Best, console: Console | None = None) -> None:
    """Print what a budget is best spent on, and on each precision that can be chosen."""
    console = console or Console()
    held = f", {optimum.held} held" if optimum.held else ""
    console.print(
        f"[bold]Best for {power(optimum.budget)} FLOPs[/]{held} (P bits counted P / 16), by {escape(optimum.source)}",
        highlight=False,
    )
    table = table_of("precision", "parameters", "tokens", "loss", "above the best", "outside of the fit")
    for row in (optimum.best, *optimum.choices):
        farthest = max((o.factor for o in row.outside), default=0.0)
        table.add_row(
            escape(row.name) + (", any number" if row is optimum.best else ""),
            count(row.parameters),
            count(row.tokens),
            f"{row.loss:.4f}",
            f"{row.loss - optimum.best.loss:.4f}",
            f"×{digits(farthest)}" if farthest else "no",
        )
        if row is optimum.best:
            table.add_section()
    console.print(table)
    _print_limits(optimum.best.outside, optimum.remarks, console)


def print_fit(fit: Fit, predicted: Predicted | None = None, console: Console | None = None) -> None:
    """Print the constants of a fit with their intervals, which of them the runs do not determine, and a prediction."""
    console = console or Console()
    console.print(
        f"[bold]Fitted to {fit.num_runs:,} runs[/] of {escape(fit.source)}; their losses scatter by "
        f"{percent(fit.noise)} around the law",
        highlight=False,
    )
    table = table_of("constant", "value", "95% interval", "published")
    for c in fit.constants:
        value = "[red]not determined[/]" if c.name in fit.undetermined else _digits(c.value)
        published = _digits(c.published) if c.published is not None else ""
        table.add_row(c.name, value, f"{_digits(c.low)} to {_digits(c.high)}", published)
    console.print(table)
    if fit.undetermined:
        lost = ", ".join(fit.undetermined)
        console.print(
            f"The runs do not determine {lost}: add runs that differ more in what these stand for.", highlight=False
        )
    spans = ", ".join(f"{r.what} {figure(r.low)} to {figure(r.high)}" for r in fit.ranges)
    console.print(f"Fitted range: {spans}.", highlight=False)
    for note in fit.notes:
        console.print(f"{note}.", markup=False, highlight=False)
    if predicted:
        interval = f"{predicted.low:.4f} to {predicted.high:.4f}"
        console.print(f"[bold]Predicted loss {predicted.loss:.4f}[/], the law between {interval}", highlight=False)
        _print_limits(predicted.outside, (), console)


def _print_limits(outside: Sequence[Outside], remarks: Sequence[str], console: Console) -> None:
    for o in outside:
        console.print(f"[yellow]Extrapolates[/]: {o.what} {figure(o.value)} lie {how_far(o)}.", highlight=False)
    for remark in remarks:
        console.print(f"Limit: {remark}.", markup=False, highlight=False)


def how_far(o: Outside) -> str:
    """577 times above 26.0 B, the most fitted; without a factor that is infinite."""
    side, end, name = ("above", o.high, "most") if o.value > o.high else ("below", o.low, "least")
    factor = f"{digits(o.factor)} times " if finite(o.factor) else ""
    return f"{factor}{side} {figure(end)}, the {name} fitted"


def figure(value: float) -> str:
    """A count, or few bits with their decimals."""
    return count(value) if value >= 1000 else f"{value:.3g}"


def _digits(value: float) -> str:
    """Four digits; an end that the runs do not set is a dash."""
    return f"{value:.4g}".replace("e+", "e") if abs(value) < float("inf") else "open"

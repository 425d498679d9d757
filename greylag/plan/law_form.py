"""Form: a law's constants as a search moves them, and which of them runs can speak of.

A search moves logarithms at the middle of the data, where they are least entangled: A and alpha stand for one line in
log N, whose height is known in the middle and not at N = 1. The form turns such a place into a law and its constants.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from greylag.plan.kumar import Bits, Kumar, Term
from greylag.plan.law_runs import Runs
from greylag.plan.reach import Floats, Number, Range
from greylag.plan.sun import Layout, Sun
from greylag.spec.error import SpecError


@dataclass(frozen=True)
class KumarForm:
    """Kumar's law. Searched: log height of each power in the middle of the data, log exponents, log E; for each term
    log gamma and the logit of the share of parameters that the fewest bits lose, which keeps N_eff positive there."""

    runs: Runs
    terms: tuple[tuple[str, ...], ...]
    fewest: tuple[float, ...]
    """Bits, of each term."""
    most: float
    """Bits, of any term."""
    held: tuple[tuple[str, float], ...]
    """Operands whose bits do not vary."""

    def start(self, generator: np.random.Generator) -> Floats:
        """Heights from the losses' spread, exponents and bits from what the papers found, widely."""
        least = float(self.runs.loss.min())
        spread = float(np.log(max(self.runs.loss.max() / least - 1, 0.01) * least))
        common = [*generator.normal(spread - 1, 0.7, 2), np.log(least) - generator.exponential(0.5)]
        exponents = np.log(generator.uniform(0.1, 0.8, 2))
        each = [[np.log(generator.uniform(0.5, 4.0)), generator.normal(-1, 1.5)] for _ in self.terms]
        return np.array([common[0], exponents[0], common[1], exponents[1], common[2], *np.ravel(each)])

    def law(self, theta: Floats) -> Kumar:
        """The law with the constants of a place."""
        a, alpha, b, beta, e = theta[:5]
        with np.errstate(all="ignore"):
            gammas, lost = np.exp(theta[5::2]), 1 / (1 + np.exp(-theta[6::2]))
            alpha, beta = np.exp([alpha, beta])
            return Kumar(
                source=self.runs.source,
                A=float(np.exp(a + alpha * _middle(self.runs.parameters))),
                alpha=float(alpha),
                B=float(np.exp(b + beta * _middle(self.runs.tokens))),
                beta=float(beta),
                E=float(np.exp(e)),
                terms=tuple(
                    Term(operands, float(gamma), float(np.log(share) + bits / gamma))
                    for operands, gamma, share, bits in zip(self.terms, gammas, lost, self.fewest, strict=True)
                ),
                C_T=None,
                held=self.held,
                bits_sought=(min(self.fewest), self.most),
                ranges=_ranges(self.runs),
                remarks=(),
            )

    def constants(self, law: Kumar | Sun) -> dict[str, float]:
        """By name; terms by their operands, `bits` where one stands for all; offsets are named n_."""
        assert isinstance(law, Kumar)
        found = {name: getattr(law, name) for name in ("A", "alpha", "B", "beta", "E")}
        for term in law.terms:
            operands = "_".join(term.operands) if len(term.operands) < len(Bits._fields) else "bits"
            found |= {f"gamma_{operands}": term.gamma, f"n_{operands}": term.offset}
        return found


@dataclass(frozen=True)
class SunForm:
    """Sun's law. Searched: log height of each term in the middle of the data, and log exponents."""

    runs: Runs

    def start(self, generator: np.random.Generator) -> Floats:
        """Heights from the losses' spread, exponents and bits from what the papers found, widely."""
        least = float(self.runs.loss.min())
        spread = float(np.log(max(self.runs.loss.max() / least - 1, 0.01) * least))
        heights = generator.normal(spread - 1, 0.7, 2)
        alpha, beta = np.log(generator.uniform(0.1, 0.8, 2))
        delta, nu = np.log(generator.uniform(1.0, 5.0, 2))
        rest = [np.log(least) - generator.exponential(0.5), generator.normal(spread - 3, 1.5)]
        return np.array([heights[0], alpha, heights[1], beta, rest[0], rest[1], delta, nu])

    def law(self, theta: Floats) -> Sun:
        """The law with the constants of a place."""
        layout = self.runs.precision
        assert isinstance(layout, Layout)
        e, m = (_middle(np.asarray(part, float) + 0.5) for part in layout[:2])
        bits = 1 + layout.exponent + layout.mantissa
        size, data = _middle(self.runs.parameters), _middle(self.runs.tokens)
        with np.errstate(all="ignore"):
            alpha, beta, delta, nu = np.exp(theta[[1, 3, 6, 7]])
            height = theta[5] + alpha * size - beta * data + delta * e + nu * m
            return Sun(
                source=self.runs.source,
                n=float(np.exp(theta[0] + alpha * size)),
                alpha=float(alpha),
                d=float(np.exp(theta[2] + beta * data)),
                beta=float(beta),
                epsilon=float(np.exp(theta[4])),
                gamma=float(np.exp(-height)),
                delta=float(delta),
                nu=float(nu),
                bits_sought=(float(np.min(bits)), float(np.max(bits))),
                ranges=_ranges(self.runs),
                remarks=(),
            )

    def constants(self, law: Kumar | Sun) -> dict[str, float]:
        """By name."""
        return {n: getattr(law, n) for n in ("n", "alpha", "d", "beta", "epsilon", "gamma", "delta", "nu")}


Form: TypeAlias = KumarForm | SunForm
"""How logarithms that a search moves become the constants of a law."""


def form_of(runs: Runs) -> tuple[Form, tuple[str, ...]]:
    """The form of the law that the runs' precision is of (`Bits`: Kumar's, `Layout`: Sun's), and notes on it.

    Raises SpecError if all runs have one precision.
    """
    if isinstance(runs.precision, Bits):
        notes: list[str] = []
        return _kumar_form(runs, notes), tuple(notes)
    if len(set(zip(*map(np.ravel, runs.precision[:2]), strict=True))) < 2:
        raise SpecError(f"{runs.source}: all runs have one precision; add runs at another")
    return SunForm(runs), ()


def _kumar_form(runs: Runs, notes: list[str]) -> KumarForm:
    """A term for each operand whose bits vary; operands that always have the same bits share one."""
    columns = {name: np.asarray(bits, float) for name, bits in zip(Bits._fields, runs.precision, strict=True)}
    terms: list[tuple[str, ...]] = []
    held = tuple((name, float(bits[0])) for name, bits in columns.items() if np.ptp(bits) == 0)
    for name, bits in columns.items():
        if name in dict(held):
            notes.append(
                f"{name}: {bits[0]:g} bits in all runs; what that costs is in A, and nothing is known of others"
            )
            continue
        same = next((term for term in terms if np.array_equal(columns[term[0]], bits)), None)
        if same is None:
            terms.append((name,))
        else:
            terms[terms.index(same)] = (*same, name)
    if not terms:
        raise SpecError(f"{runs.source}: all runs have one precision; add runs at another")
    for term in terms:
        if len(term) > 1:
            notes.append(f"{' and '.join(term)} have the same bits in every run: one term stands for them together")
    spans = [(float(columns[term[0]].min()), float(columns[term[0]].max())) for term in terms]
    fewest, most = zip(*spans, strict=True)
    return KumarForm(runs, tuple(terms), fewest, max(most), held)


def _middle(values: Number) -> float:
    """Mean logarithm."""
    return float(np.mean(np.log(values)))


def _ranges(runs: Runs) -> tuple[Range, ...]:
    each = zip(type(runs.precision)._fields, runs.precision, strict=True)
    named = {"parameters": runs.parameters, "tokens": runs.tokens, **dict(each)}
    return tuple(Range.of(what, values) for what, values in named.items())

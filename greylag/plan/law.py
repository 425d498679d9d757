"""Law: which precision, how many parameters, how many tokens. What the two scaling laws of precision share.

`kumar` and `sun` give a loss for parameters N, tokens D and a precision; here is what one asks of either: the loss of a
plan, its best form for a budget C = (6/16) N D P (FLOPs, counted so that a multiplication of P bits costs P / 16 of one
in BF16: Kumar et al., arXiv 2411.04330, section 4), what overtraining costs, and the curve over bits at fixed compute.
Laws fitted to one's own runs (`law_fit`) answer the same. No answer comes without how far it lies outside the fit.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace

from greylag.plan.kumar import POST_REMARK, Bits, Kumar, PostTraining
from greylag.plan.reach import Floats, Number, Outside, Range, outside
from greylag.plan.sun import BLOCK, Sun, layout
from greylag.spec.error import SpecError

COST = 6 / 16
"""FLOPs per parameter, token and bit."""
FIGURE_PRODUCT, FIGURE_TOKENS = 220e6 * 32, 16e9
"""Kumar et al., Figure 1 (right): parameters times bits, and tokens; FP32 has 220M parameters, FP4 1.76B."""
FEWEST_PARAMETERS, MOST_RATIO = 1e3, 1e9
"""Parameters are sought from so few, up to so many per token."""
POINTS, ROUNDS = 33, 9
"""Of the search: it keeps 2 of 32 intervals each time, 16**9 in all."""


class Law(Protocol):
    """What a scaling law of precision offers; `Precision` is its own description of one (`Bits`, `Layout`)."""

    @property
    def name(self) -> str:
        """`kumar` or `sun`."""

    @property
    def source(self) -> str:
        """Whose constants they are."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """Where it was fitted."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What it holds for, and what not."""

    @property
    def bits_sought(self) -> tuple[float, float]:
        """Where the best number of bits is sought."""

    def loss(self, parameters: Number, tokens: Number, precision: Any) -> Number:
        """Nats per token."""

    def bits(self, precision: Any) -> Number:
        """P of the cost."""

    def at_bits(self, bits: Number) -> Any:
        """The precision of so many bits, not only whole ones."""

    def choices(self) -> Mapping[str, Any]:
        """The precisions to choose from, by name."""

    def coordinates(self, precision: Any) -> dict[str, float]:
        """What `ranges` are held against."""

    def critical_tokens(self, parameters: float, precision: Any) -> float | None:
        """Tokens beyond which more make training worse; None where the law knows of none."""

    def post_training(self, parameters: float, tokens: float) -> tuple[PostTraining, ...]:
        """What quantizing after training costs; empty where the law does not say."""


class Choice(NamedTuple):
    """One way to spend a budget, or one point of a curve."""

    name: str
    """Of the precision."""
    bits: float
    parameters: float
    tokens: float
    loss: float
    outside: tuple[Outside, ...]


class Overtraining(NamedTuple):
    """A plan against the best parameters and tokens of its own cost and precision."""

    parameters: float
    """The best."""
    tokens: float
    loss: float
    share: float
    """Of the plan's cost at which the best reaches the plan's loss: what a smaller model is paid for with."""


class Answer(NamedTuple):
    """The loss of a plan."""

    law: str
    source: str
    precision: str
    parameters: float
    tokens: float
    cost: float
    """FLOPs, `COST`."""
    loss: float
    high_loss: float
    """Of the same parameters and tokens at `bits_sought`'s upper end."""
    critical_tokens: float | None
    overtraining: Overtraining
    post_training: tuple[PostTraining, ...]
    outside: tuple[Outside, ...]
    remarks: tuple[str, ...]


class Optimum(NamedTuple):
    """The best ways to spend a budget."""

    law: str
    source: str
    budget: float
    """FLOPs, `COST`."""
    held: Literal["parameters", "tokens"] | None
    """What the question fixed."""
    best: Choice
    """Of any number of bits."""
    choices: tuple[Choice, ...]
    """One for each precision that can be chosen, the best first."""
    remarks: tuple[str, ...]


class Curve(NamedTuple):
    """Loss over bits where parameters times bits, and tokens, are held: the fixed-compute figure."""

    law: str
    source: str
    tokens: float
    product: float
    """Parameters times bits."""
    bits: Floats
    loss: Floats
    best: Choice
    choices: tuple[Choice, ...]
    remarks: tuple[str, ...]


def law_named(name: str) -> Kumar | Sun:
    """The published law of a name. Raises SpecError if there is none."""
    laws: dict[str, Kumar | Sun] = {law.name: law for law in (Kumar(), Sun())}
    if name not in laws:
        near = difflib.get_close_matches(name, laws, 1)
        raise SpecError(f"--law {name!r}: no such law; " + (f"did you mean {near[0]}?" if near else "kumar or sun"))
    return laws[name]


def asked_precision(
    law: Kumar | Sun,
    weights: float | None = None,
    activations: float | None = None,
    kv: float | None = None,
    format: str | None = None,
    block: float | Literal["channel"] | None = None,
) -> tuple[Kumar | Sun, Any]:
    """The precision of a question in the law's own terms, and the law, whose choices have its block.

    What is not given: 16 bits (or a fit's own, where it knows no others), BF16, a block of 128. Raises SpecError where
    the law cannot say it.
    """
    if isinstance(law, Kumar):
        if format is not None or block is not None:
            raise SpecError(
                f"--{'format' if format is not None else 'block'}: Kumar's law knows bits, not exponent, mantissa or "
                "block; give --weights, --activations and --kv, or take --law sun"
            )
        given = {"weights": weights, "activations": activations, "kv": kv}
        for name, bits in given.items():
            if bits is not None and not 0 < bits <= 64:
                raise SpecError(f"--{name} {bits:g}: give bits, from 3 to 32")
        usual = dict(law.held)
        return law, Bits(*(usual.get(n, 16.0) if bits is None else float(bits) for n, bits in given.items()))
    for name, bits in (("weights", weights), ("activations", activations), ("kv", kv)):
        if bits is not None:
            raise SpecError(
                f"--{name}: Sun's law knows a format, not bits by operand, and no KV cache; give --format e4m3 "
                "--block 128, or take --law kumar"
            )
    precision = layout(format or "bf16", BLOCK if block is None else block)
    return replace(law, block=float(precision.block)), precision


def cost(parameters: Number, tokens: Number, bits: Number) -> Number:
    """FLOPs of training; at 16 bits the usual 6 N D."""
    return COST * parameters * tokens * bits


def answer(law: Law, parameters: float, tokens: float, precision: Any) -> Answer:
    """The loss of a plan and what surrounds it. Raises SpecError where the law says nothing."""
    _positive(parameters=parameters, tokens=tokens)
    loss, high = (float(law.loss(parameters, tokens, p)) for p in (precision, law.at_bits(law.bits_sought[1])))
    if not np.isfinite(loss):
        raise SpecError(f"{precision}: by this law nothing is left of the model; give more bits (4 or more)")
    post = law.post_training(parameters, tokens)
    return Answer(
        law=law.name,
        source=law.source,
        precision=str(precision),
        parameters=parameters,
        tokens=tokens,
        cost=float(cost(parameters, tokens, law.bits(precision))),
        loss=loss,
        high_loss=high,
        critical_tokens=law.critical_tokens(parameters, precision),
        overtraining=overtraining(law, parameters, tokens, precision),
        post_training=post,
        outside=_outside(law, parameters, tokens, precision),
        remarks=(*law.remarks, POST_REMARK) if post else law.remarks,
    )


def overtraining(law: Law, parameters: float, tokens: float, precision: Any) -> Overtraining:
    """What a plan loses to the best of its cost and precision, and the cost that would have reached its loss."""
    product, reached = parameters * tokens, float(law.loss(parameters, tokens, precision))
    best = _best_parameters(law, np.array([product]), precision)[0]
    loss = float(law.loss(best, product / best, precision))
    low, high = np.log(product) - 30.0, np.log(product)
    for _ in range(60):  # the best loss falls with the product: halve until nothing is left between
        middle = (low + high) / 2
        size = _best_parameters(law, np.exp([middle]), precision)[0]
        is_enough = float(law.loss(size, np.exp(middle) / size, precision)) <= reached
        low, high = (low, middle) if is_enough else (middle, high)
    return Overtraining(float(best), float(product / best), loss, float(np.exp(high - np.log(product))))


def optimum(law: Law, budget: float, parameters: float | None = None, tokens: float | None = None) -> Optimum:
    """The best precision, parameters and tokens for a budget in FLOPs; parameters or tokens may be held.

    Raises SpecError if both are held, which leaves the precision no choice, or the budget buys nothing.
    """
    held = {"parameters": parameters, "tokens": tokens}
    _positive(budget=budget, **{name: value for name, value in held.items() if value is not None})
    if parameters is not None and tokens is not None:
        raise SpecError("--budget with --params and --tokens leaves nothing to choose; leave one of the two out")

    def spend(precision: Any, bits: Number) -> tuple[Floats, Floats]:
        product = np.atleast_1d(np.asarray(budget / (COST * bits), float))
        if parameters is not None:
            return np.full_like(product, parameters), product / parameters
        size = product / tokens if tokens is not None else _best_parameters(law, product, precision)
        return size, product / size

    def loss(bits: Floats) -> Floats:
        flat = bits.ravel()
        precision = law.at_bits(flat)
        return np.asarray(law.loss(*spend(precision, flat), precision), float).reshape(bits.shape)

    def choice(name: str, precision: Any) -> Choice:
        bits = float(law.bits(precision))
        size, data = (float(x[0]) for x in spend(precision, bits))
        return _choice(law, name, bits, size, data, precision)

    best = float(minimum(loss, *(np.array([end]) for end in law.bits_sought))[0])
    choices = sorted((choice(name, p) for name, p in law.choices().items()), key=lambda c: c.loss)
    return Optimum(
        law=law.name,
        source=law.source,
        budget=budget,
        held="parameters" if parameters is not None else "tokens" if tokens is not None else None,
        best=choice(f"{best:.1f} bits", law.at_bits(best)),
        choices=tuple(choices),
        remarks=(*_at_an_end(law, best), *law.remarks),
    )


def fixed_compute(law: Law, product: float = FIGURE_PRODUCT, tokens: float = FIGURE_TOKENS) -> Curve:
    """Loss over bits where parameters times bits, and tokens, are held: fewer bits, more parameters."""
    _positive(product=product, tokens=tokens)

    def loss(bits: Floats) -> Floats:
        return np.asarray(law.loss(product / bits, tokens, law.at_bits(bits)), float)

    def choice(name: str, precision: Any) -> Choice:
        bits = float(law.bits(precision))
        return _choice(law, name, bits, product / bits, tokens, precision)

    best = float(minimum(loss, *(np.array([end]) for end in law.bits_sought))[0])
    bits = np.geomspace(max(4.0, law.bits_sought[0]), law.bits_sought[1], 200)
    choices = tuple(choice(name, p) for name, p in law.choices().items())
    first = choice(f"{best:.1f} bits", law.at_bits(best))
    return Curve(
        law.name, law.source, tokens, product, bits, loss(bits), first, choices, (*_at_an_end(law, best), *law.remarks)
    )


def minimum(of: Callable[[Floats], Floats], low: Floats, high: Floats) -> Floats:
    """For each row, where between its bounds `of` is least, to 1e-11 of the distance; it must have one valley.

    `of` takes and gives an array of rows by points.
    """
    steps = np.linspace(0.0, 1.0, POINTS)
    for _ in range(ROUNDS):
        at = low[:, None] + (high - low)[:, None] * steps
        least = np.argmin(of(at), axis=1)
        rows = np.arange(len(low))
        low, high = at[rows, np.maximum(least - 1, 0)], at[rows, np.minimum(least + 1, POINTS - 1)]
    return (low + high) / 2


def _at_an_end(law: Law, bits: float) -> tuple[str, ...]:
    """A remark where the best precision is the last one that was looked at."""
    for end, fewer in zip(law.bits_sought, ("fewer", "more"), strict=True):
        if abs(bits / end - 1) < 1e-3:
            return (f"the best lies at the end of what was sought, {end:g} bits: {fewer} may do better still",)
    return ()


def _best_parameters(law: Law, product: Floats, precision: Any) -> Floats:
    """For each product of parameters and tokens, with its precision, the parameters of the least loss."""
    column = type(precision)(*(np.asarray(part, float).reshape(-1, 1) for part in precision))

    def loss(log_size: Floats) -> Floats:
        size = np.exp(log_size)
        return np.asarray(law.loss(size, product[:, None] / size, column), float)

    low = np.full_like(product, np.log(FEWEST_PARAMETERS))
    high = np.maximum(np.log(product) / 2 + np.log(MOST_RATIO) / 2, low + 1)
    return np.exp(minimum(loss, low, high))


def _choice(law: Law, name: str, bits: float, parameters: float, tokens: float, precision: Any) -> Choice:
    loss = float(law.loss(parameters, tokens, precision))
    return Choice(name, bits, parameters, tokens, loss, _outside(law, parameters, tokens, precision))


def _outside(law: Law, parameters: float, tokens: float, precision: Any) -> tuple[Outside, ...]:
    return outside(law.ranges, {"parameters": parameters, "tokens": tokens, **law.coordinates(precision)})


def _positive(**given: float) -> None:
    for name, value in given.items():
        if not 0 < value < float("inf"):
            raise SpecError(f"{name}: must be positive and finite, is {value:g}; change it")

"""Kumar et al., Scaling Laws for Precision (arXiv 2411.04330): fewer bits are fewer parameters.

    L(N, D, P) = A N_eff^-alpha + B D^-beta + E,    N_eff = N prod_x (1 - exp(-P_x / gamma_x + n_x))

N parameters, D tokens, P_x bits of x: weights, activations, KV cache; L in nats per token. The offsets n_x are left out
of the paper's equations ("including biases everywhere clutters notation") and are in its Table 2. They carry the
result: with them the best precision at fixed compute is 7.0 bits, without them the same constants give 3.45.

A model that is quantized after training loses more, the longer it was trained:

    delta(N, D, P_post) = C_T D^gamma_D / N^gamma_N exp(-P_post / gamma_post)

so that beyond D_crit more tokens hurt. That is of models trained in high precision: fewer bits in training harden a
model against it, by factors whose constants Table 2 does not give. What the two laws share is `law`'s.
"""

from typing import NamedTuple

import msgspec
import numpy as np

from greylag.plan.reach import Number, Range
from greylag.spec.error import SpecError

SOURCE = "Kumar et al., arXiv 2411.04330, Table 2"
RANGES = (
    Range("parameters", 30e6, 220e6),
    Range("tokens", 1.5e9, 26e9),
    Range("weights", 3, 16),
    Range("activations", 3, 16),
    Range("kv", 3, 16),
)
"""What was fitted: 465 runs of 30M to 220M parameters (section 2; held against others of up to 1.7B), 1.5B to 26B
tokens of Dolma 1.7, at 3 to 16 bits."""
REMARKS = (
    "fitted to integers: weights scaled by channel, activations by tensor, KV cache; forward pass only, backward and "
    "optimizer in high precision",
    "knows bits, not how they are split: E4M3 and E5M2 are both 8, and block scales are not in it",
    "the authors call the constants unlikely to be useful beyond their setting, and the trends what matters",
    "held against runs of up to 1.7B parameters; R2 0.90 with training and post-training precision together",
    "losses have no interval: the paper prints its constants without errors",
)
POST_REMARK = (
    "after training: weights by GPTQ, of models trained in high precision (R2 0.97). Table 2 also lists b = 1.1277, "
    "which is not in the formula; as an offset like the others it would make each penalty 3.1 times as large"
)
WHOLE_BITS = (32, 16, 12, 8, 7, 6, 5, 4)
"""Precisions of the paper's Figure 1 (right) and 6."""
POST_BITS = (8, 6, 5, 4, 3)
SOUGHT = (3.0, 32.0)
"""Bits between which the best precision is sought; below 3.11 of activations nothing is left of N_eff."""


class Bits(NamedTuple):
    """Bits of weights, activations and KV cache: numbers, or arrays of one shape."""

    weights: Number
    activations: Number
    kv: Number

    @classmethod
    def all(cls, bits: Number) -> "Bits":
        """The same for each."""
        return cls(bits, bits, bits)

    def __str__(self) -> str:
        w, a, kv = (f"{float(b):g}" for b in self)
        return f"{w} bits" if w == a == kv else f"weights {w}, activations {a}, KV cache {kv} bits"


class Term(NamedTuple):
    """What one operand's bits keep of the parameters, a factor of N_eff."""

    operands: tuple[str, ...]
    """Fields of `Bits`; more than one where the runs of a fit had the same bits in all of them."""
    gamma: float
    """Bits."""
    offset: float

    def kept(self, precision: Bits) -> Number:
        """The factor: 1 at many bits, 0 where the law says that nothing is left."""
        first, *others = (np.asarray(getattr(precision, operand), float) for operand in self.operands)
        if any(np.any(first != other) for other in others):
            names = " and ".join(self.operands)
            raise SpecError(f"this law was fitted where {names} have the same bits; give them the same")
        with np.errstate(all="ignore"):  # a fit may try any constants
            kept: Number = np.maximum(1 - np.exp(np.divide(-first, self.gamma) + self.offset), 0.0)
        return kept


class PostTraining(NamedTuple):
    """What quantizing the weights after training costs."""

    bits: float
    penalty: float
    """Nats per token above the loss of the trained model."""
    critical_tokens: float
    """Beyond them more training makes the quantized model worse."""


class Kumar(msgspec.Struct, frozen=True, kw_only=True):
    """The law with its constants: the paper's, or those of a fit."""

    name: str = "kumar"
    source: str = SOURCE
    A: float = 4.299e3
    alpha: float = 0.4965
    B: float = 1.806e4
    beta: float = 0.4965
    E: float = 2.7648
    terms: tuple[Term, ...] = (
        Term(("weights",), 2.6745, 0.3037),
        Term(("activations",), 2.2102, 1.4072),
        Term(("kv",), 0.9578, 2.4185),
    )
    C_T: float | None = 0.0598
    """None: a law that was fitted to training alone says nothing of what comes after."""
    data_exponent: float = 0.5068
    """gamma_D."""
    size_exponent: float = 0.3439
    """gamma_N."""
    gamma_post: float = 0.5907
    """Bits."""
    held: tuple[tuple[str, float], ...] = ()
    """Operands that had these bits in all runs of a fit, so that it knows of no others."""
    bits_sought: tuple[float, float] = SOUGHT
    """Of a fit, what its runs spanned."""
    ranges: tuple[Range, ...] = RANGES
    remarks: tuple[str, ...] = REMARKS

    def effective(self, parameters: Number, precision: Bits) -> Number:
        """N_eff, the parameters that precision leaves."""
        kept: Number = parameters
        for term in self.terms:
            kept = kept * term.kept(precision)
        return kept

    def loss(self, parameters: Number, tokens: Number, precision: Bits) -> Number:
        """Nats per token; infinite where precision leaves no parameter."""
        effective = np.asarray(self.effective(parameters, precision), float)
        with np.errstate(divide="ignore", over="ignore"):
            return self.A * effective**-self.alpha + self.B * np.asarray(tokens, float) ** -self.beta + self.E

    def post_penalty(self, parameters: Number, tokens: Number, post_bits: Number) -> Number:
        """Nats per token that quantizing the weights to `post_bits` after training adds."""
        if self.C_T is None:
            raise SpecError("this fit knows nothing of quantizing after training; ask --law kumar without --fit")
        growth = np.asarray(tokens, float) ** self.data_exponent / np.asarray(parameters, float) ** self.size_exponent
        return self.C_T * growth * np.exp(-np.asarray(post_bits, float) / self.gamma_post)

    def post_critical_tokens(self, parameters: Number, post_bits: Number) -> Number:
        """D_crit: tokens at which the loss plus `post_penalty` is least, so that d(L + delta)/dD = 0."""
        assert self.C_T is not None
        rest = np.asarray(parameters, float) ** self.size_exponent * np.exp(
            np.asarray(post_bits, float) / self.gamma_post
        )
        return (self.beta * self.B * rest / (self.data_exponent * self.C_T)) ** (1 / (self.data_exponent + self.beta))

    def post_training(self, parameters: float, tokens: float) -> tuple[PostTraining, ...]:
        """What each usual width costs a model that was trained in high precision; empty where the law knows it not."""
        if self.C_T is None:
            return ()
        return tuple(
            PostTraining(
                bits,
                float(self.post_penalty(parameters, tokens, bits)),
                float(self.post_critical_tokens(parameters, bits)),
            )
            for bits in POST_BITS
        )

    def critical_tokens(self, parameters: float, precision: Bits) -> float | None:
        """None: in training, more tokens never hurt by this law."""
        return None

    def bits(self, precision: Bits) -> Number:
        """P of the cost (6/16) N D P: a multiplication is as wide as the wider of its two operands."""
        return np.maximum(precision.weights, precision.activations)

    def at_bits(self, bits: Number) -> Bits:
        """The precision of so many bits, any number of them, but for what is held."""
        return Bits.all(bits)._replace(**{name: np.full_like(bits, held, float) for name, held in self.held})

    def choices(self) -> dict[str, Bits]:
        """The precisions to choose from, by name."""
        return {f"{bits} bits": self.at_bits(float(bits)) for bits in WHOLE_BITS}

    def coordinates(self, precision: Bits) -> dict[str, float]:
        """What `ranges` are held against."""
        return {field: float(value) for field, value in zip(Bits._fields, precision, strict=True)}

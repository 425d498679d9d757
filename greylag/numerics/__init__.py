"""FP8 on one device: formats, scales, quantization, and a Linear for anyone's model.

from greylag.numerics import Linear, swap_linears
from greylag.spec.load import load_preset

model = swap_linears(model, load_preset("precision", "fp8-block128"))
"""

from greylag.numerics.linear import Linear, Recipe, grouped_linear
from greylag.numerics.quantize import Quantized, quantize

__all__ = ["Linear", "Quantized", "Recipe", "grouped_linear", "quantize"]

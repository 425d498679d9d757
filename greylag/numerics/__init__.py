"""FP8 on one device: formats, scales, quantization, and a Linear for anyone's model.

from greylag.numerics import Linear
from greylag.spec.load import load_preset

layer = Linear(1024, 4096, load_preset("precision", "fp8-block128"))  # in the place of a torch.nn.Linear
"""

from greylag.numerics.linear import Linear, grouped_linear
from greylag.numerics.quantize import Quantized, quantize
from greylag.numerics.quantizer import Quantizer

__all__ = ["Linear", "Quantized", "Quantizer", "grouped_linear", "quantize"]

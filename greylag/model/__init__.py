"""The network on one device: a decoder with grouped-query or latent attention, dense or mixture of experts.

from greylag.model import Transformer
from greylag.spec.load import load_preset

model = Transformer(load_preset("model", "deepseek-v3-tiny"), load_preset("precision", "fp8-block128"))
print(model)   # says the precision of each role of each layer
"""

from greylag.model.transformer import Transformer

__all__ = ["Transformer"]

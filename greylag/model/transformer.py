"""The decoder: embedding, blocks of attention and feed-forward with pre-norm, final norm, head.

Parameter names and shapes are those of `spec.parts`. Linear layers inside blocks follow the job's recipe; norms,
router, softmax, embedding and head stay high. Shape suffixes: B batch, S sequence, D hidden, V vocabulary.
"""

import contextlib
import functools
import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from greylag.model.attention import Attention
from greylag.model.mla import MLAttention
from greylag.model.mlp import GELU, SwiGLU
from greylag.model.moe import Exchange, MoEFeedForward, Router
from greylag.model.norm import norm
from greylag.model.rope import angles
from greylag.numerics import Linear, Quantizer
from greylag.spec.model import Model
from greylag.spec.precision import Precision


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)).

    With `recompute` it keeps its input alone, and backward runs its forward again.
    """

    def __init__(
        self, model: Model, precision: Precision, layer: int, exchange: Exchange | None, recompute: bool
    ) -> None:
        super().__init__()
        self.recompute = recompute
        quantizer = functools.partial(_quantizer, model, precision, layer)
        linear = functools.partial(_linear, model, precision, layer)
        self.attention_norm = norm(model, model.hidden_size)
        attention = MLAttention if model.mla else Attention
        self.attention = attention(model, linear, precision)
        self.ffn_norm = norm(model, model.hidden_size)
        if model.is_moe_layer(layer):
            self.ffn: nn.Module = MoEFeedForward(model, precision, linear, quantizer, exchange)
        elif model.activation == "swiglu":
            self.ffn = SwiGLU(model.hidden_size, model.ffn_hidden_size, linear, model.bias, precision)
        else:
            self.ffn = GELU(model.hidden_size, model.ffn_hidden_size, linear, model.bias)

    def forward(self, x_BSD: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        """One layer."""
        if not self.recompute:
            return self._layer(x_BSD, cos, sin)
        passes = functools.partial(_first_and_second_pass, self)
        y_BSD: Tensor = checkpoint(  # nothing in a layer's forward is random: no generator's state needs keeping
            self._layer, x_BSD, cos, sin, use_reentrant=False, preserve_rng_state=False, context_fn=passes
        )
        return y_BSD

    def _layer(self, x_BSD: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos, sin)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


Pass = contextlib.AbstractContextManager[None]


def _first_and_second_pass(layer: nn.Module) -> tuple[Pass, Pass]:
    return contextlib.nullcontext(), _unobserved(layer)


@contextlib.contextmanager
def _unobserved(layer: nn.Module) -> Iterator[None]:
    """Within, the layer is in eval mode: what its modules note of a forward, the first pass has noted."""
    mode = layer.training
    layer.eval()
    try:
        yield
    finally:
        layer.train(mode)


class Transformer(nn.Module):
    """A decoder-only language model. `exchange` is where its experts live: all on this rank, if None.

    In eval mode a forward leaves no trace: amax histories, loads of experts and counts of Inf and NaN stay.
    """

    def __init__(
        self, model: Model, precision: Precision, exchange: Exchange | None = None, recompute: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.high = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision.high]
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size)
        if model.position == "learned":
            self.position = nn.Embedding(model.max_sequence, model.hidden_size)
        self.layers = nn.ModuleList(
            Block(model, precision, layer, exchange, recompute) for layer in range(model.num_layers)
        )
        self.norm = norm(model, model.hidden_size)
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Logits (B, S, V) in FP32."""
        S = tokens_BS.shape[1]
        x_BSD = self.embed(tokens_BS).to(self.high)
        cos = sin = None
        if self.model.position == "learned":
            x_BSD = x_BSD + self.position.weight[:S].to(self.high)
        else:
            mla = self.model.mla
            width = mla.qk_rope_head_dim if mla else self.model.qk_head_dim
            cos, sin = angles(S, width, self.model.rope_theta, tokens_BS.device)
        for layer in self.layers:
            x_BSD = layer(x_BSD, cos, sin)
        return F.linear(self.norm(x_BSD), self.head.weight.to(self.high)).float()

    def routers(self) -> list[Router]:
        """The routers, in layer order."""
        return [m for m in self.modules() if isinstance(m, Router)]

    @torch.no_grad()
    def initialize(self, seed: int, rank: int = 0) -> None:
        """Normal weights of `init_std`; projections back into the residual stream scaled by 1/sqrt(2 layers) (GPT-2).

        Biases are 0 and norms 1. The draw depends on the seed alone; the noise of stochastic rounding also on the
        layer and on the data-parallel `rank`, so that an average over ranks averages rounding errors too.
        """
        for name, module in self.named_modules():
            if isinstance(module, Quantizer):
                module.seed = zlib.crc32(f"{seed} {rank} {name}".encode())
        generator = torch.Generator(device="cpu").manual_seed(seed)
        residual = (2 * self.model.num_layers) ** -0.5
        for name, weight in self.named_parameters():
            if "norm" in name:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            elif name.endswith("bias"):
                weight.zero_()
            else:
                std = self.model.init_std * (residual if "wo." in name or "w_down" in name else 1.0)
                weight.normal_(0.0, std, generator=generator)


def _linear(
    model: Model, precision: Precision, layer: int, name: str, in_features: int, out_features: int, bias: bool
) -> Linear:
    """A linear layer of a block, by the recipes of its name."""
    gemms = precision.gemms(f"layers.{layer}.{name}", model.num_layers)
    return Linear(in_features, out_features, gemms, bias)


def _quantizer(model: Model, precision: Precision, layer: int, name: str) -> Quantizer:
    """What quantizes a layer that holds its weights elsewhere: the experts'."""
    return Quantizer(precision.gemms(f"layers.{layer}.{name}", model.num_layers))

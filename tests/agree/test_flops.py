"""torch's FlopCounterMode and `spec.work` count the same FLOPs, forward and backward."""

import pytest
import torch
from msgspec.structs import replace
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from greylag.model import Transformer
from greylag.spec.load import load_preset
from greylag.spec.work import forward_flops

SEQUENCE, SEQUENCES = 128, 4


@pytest.mark.parametrize("precision", ["fp32", "fp8-block128"])
@pytest.mark.parametrize("name", ["llama-3-tiny", "gpt-3-tiny", "qwen3-tiny", "mixtral-tiny", "deepseek-v3-tiny"])
def test_flops_agree_within_one_percent(name: str, precision: str) -> None:
    model = load_preset("model", name)
    built = Transformer(model, replace(load_preset("precision", precision), high="fp32"))
    built.initialize(0)
    tokens = torch.randint(0, model.vocab_size, (SEQUENCES, SEQUENCE))
    # The plain attention kernel is made of matrix multiplies that the counter sees; it takes the full square.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = built(tokens).square().mean()
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    expected = forward_flops(model, SEQUENCE, SEQUENCE * SEQUENCES, causal=False)
    assert forward.get_total_flops() == pytest.approx(expected, rel=0.01)
    assert backward.get_total_flops() == pytest.approx(2 * expected, rel=0.01)

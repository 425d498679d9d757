"""What autograd keeps of one layer for backward is what `spec.kept` says it keeps."""

import pytest
import torch
from msgspec.structs import replace

from greylag.model import Transformer
from greylag.model.rope import angles
from greylag.spec.kept import kept_bytes
from greylag.spec.load import load_preset
from greylag.spec.work import distinct_layers

SEQUENCE, SEQUENCES = 256, 4


@pytest.mark.parametrize(
    "precision", ["fp32", "fp8-block128", "fp8-tensor-current", "mxfp8", "fp8-row", "fp8-deepseek"]
)
@pytest.mark.parametrize("name", ["llama-3-tiny", "gpt-3-tiny", "qwen3-tiny", "mixtral-tiny", "deepseek-v3-tiny"])
def test_kept_bytes_of_a_layer(name: str, precision: str) -> None:
    model = load_preset("model", name)
    recipe = replace(load_preset("precision", precision), high="fp32")
    if model.activation != "swiglu":
        recipe = replace(recipe, swiglu_input="high")
    built = Transformer(model, recipe)
    built.initialize(0)
    own = {w.untyped_storage().data_ptr() for w in [*built.parameters(), *built.buffers()]}
    width = model.mla.qk_rope_head_dim if model.mla else model.qk_head_dim
    cos, sin = angles(SEQUENCE, width, model.rope_theta) if model.position == "rope" else (None, None)
    own |= {t.untyped_storage().data_ptr() for t in (cos, sin) if t is not None}
    for layer, _ in distinct_layers(model):
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(tensor: torch.Tensor, kept: dict = kept) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        x = torch.randn(SEQUENCES, SEQUENCE, model.hidden_size, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            y = built.layers[layer](x, cos, sin)
        measured = sum(storage.nbytes() for storage in kept.values())
        expected = kept_bytes(model, recipe, layer, SEQUENCE * SEQUENCES)
        # How far experts' rows are padded to whole tiles depends on how tokens fall; the count takes the mean.
        assert measured == pytest.approx(expected, rel=0.06 if model.is_moe_layer(layer) else 0.02), layer
        assert y.requires_grad

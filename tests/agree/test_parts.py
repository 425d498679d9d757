"""The built model and `spec.parts` speak of the same weights."""

import pytest

from greylag.model import Transformer
from greylag.spec.load import load_preset, presets
from greylag.spec.parts import parts

TINY = [name for name in presets("models") if name.endswith("-tiny")]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("precision", ["fp32", "fp8-block128"])
def test_every_parameter_and_buffer_has_its_part(name: str, precision: str) -> None:
    model = load_preset("model", name)
    built = Transformer(model, load_preset("precision", precision))
    expected = {p.name: p.shape for p in parts(model) if not p.is_buffer}
    assert {n: tuple(w.shape) for n, w in built.named_parameters()} == expected
    state = {n: tuple(w.shape) for n, w in built.state_dict().items()}
    tied = {"head.weight": state["head.weight"]} if model.tied_embeddings else {}
    assert state == {p.name: p.shape for p in parts(model)} | tied


def test_sections_of_fused_weights_add_up() -> None:
    for name in presets("models"):
        for part in parts(load_preset("model", name)):
            if part.sections:
                assert sum(part.sections) == part.shape[1 if part.role == "expert" else 0]

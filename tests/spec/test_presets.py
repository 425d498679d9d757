"""Presets hold facts: they read strictly, name their sources, and count to what was published."""

import tomllib
from pathlib import Path

import msgspec
import pytest

import greylag
from greylag.spec.cluster import Cluster
from greylag.spec.model import Model
from greylag.spec.parts import num_active_parameters, num_parameters, parts
from greylag.spec.precision import Precision
from greylag.spec.software import Software

PRESETS = Path(greylag.__file__).parent / "presets"
KINDS = {"models": Model, "precisions": Precision, "clusters": Cluster, "software": Software}
FILES = [path for folder in KINDS for path in sorted((PRESETS / folder).glob("*.toml"))]


def name_of(path):
    return f"{path.parent.name}/{path.stem}"


def load(path):
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    return msgspec.convert({**table, "name": path.stem}, KINDS[path.parent.name])


def model(name):
    return load(PRESETS / "models" / f"{name}.toml")


def size(spec, role):
    return sum(part.size for part in parts(spec) if part.role == role)


def tables(text):
    """Lines of each table, with the comment block right above its header."""
    blocks, table = [], []
    for line in text.splitlines():
        if line.startswith("["):
            start = len(table)
            while start and table[start - 1].startswith("#"):
                start -= 1
            blocks.append(table[:start])
            table = table[start:]
        table.append(line)
    return [*blocks, table]


def test_every_kind_has_presets():
    assert {path.parent.name for path in FILES} == set(KINDS)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_preset_is_its_struct(path):
    assert "name" not in tomllib.loads(path.read_text(encoding="utf-8")), "the loader adds the name"
    assert load(path).name == path.stem


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_unknown_key_is_refused(path):
    table = {**tomllib.loads(path.read_text(encoding="utf-8")), "name": path.stem, "colour": "grey"}
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.convert(table, KINDS[path.parent.name])


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_table_names_a_source(path):
    for table in tables(path.read_text(encoding="utf-8")):
        assert any(line.startswith("#") for line in table), table


def test_tables_sees_a_missing_source():
    text = "# a\nx = 1\n\n[b]\ny = 2\n\n# c\n[c]\nz = 3"
    assert [any(line.startswith("#") for line in table) for table in tables(text)] == [True, False, True]


# Parameters of each model's safetensors files on Hugging Face, without balancing bias, scales and MTP module.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3-405b", 405_853_388_800),
        ("qwen3-32b", 32_762_123_264),
        ("mixtral-8x7b", 46_702_792_704),
        ("deepseek-v2", 235_741_434_880),
        ("deepseek-v3", 671_026_404_352),
    ],
)
def test_parameters_equal_the_published_count(name, published):
    assert num_parameters(model(name)) == published


@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        ("gpt-3-175b", 175.0e9, 0.005),  # arXiv 2005.14165, Table 2.1
        ("kimi-k2", 1.04e12, 0.03),  # arXiv 2507.20534, Table 2
    ],
)
def test_parameters_are_near_the_rounded_count(name, published, tolerance):
    assert num_parameters(model(name)) == pytest.approx(published, rel=tolerance)


def test_deepseek_v3_counted_by_hand():
    D, H, E, F, V = 7168, 128, 256, 2048, 129280
    q = D * 1536 + 1536 + 1536 * H * (128 + 64)
    kv = D * (512 + 64) + 512 + 512 * H * (128 + 128)
    attention = q + kv + H * 128 * D + 2 * D  # with the layer's two norms
    expert = 3 * D * F
    dense, moe = 3 * D * 18432, E * D + (E + 1) * expert
    assert num_parameters(model("deepseek-v3")) == 61 * attention + 3 * dense + 58 * moe + 2 * V * D + D


def test_deepseek_v3_balancing_bias_is_a_buffer():
    """58 layers of 256: with them the checkpoint's main model holds 671,026,419,200 numbers."""
    spec = model("deepseek-v3")
    buffers = sum(part.size for part in parts(spec) if part.is_buffer)
    assert buffers == 58 * 256
    assert num_parameters(spec) + buffers == 671_026_419_200


# Active parameters here hold both the embedding and the output head. DeepSeek's 37B for V3 (arXiv 2412.19437) lies
# between them: 37.6B with both, 36.6B with the head alone (README_WEIGHTS.md of DeepSeek-V3 says 36.7B).
@pytest.mark.parametrize(
    ("name", "published", "tolerance"),
    [
        ("deepseek-v3", 37e9, 0.02),  # arXiv 2412.19437, abstract
        ("deepseek-v2", 21e9, 0.03),  # arXiv 2405.04434, abstract
        ("kimi-k2", 32e9, 0.03),  # arXiv 2507.20534, abstract
        ("mixtral-8x7b", 13e9, 0.02),  # arXiv 2401.04088, section 1
    ],
)
def test_active_parameters(name, published, tolerance):
    spec = model(name)
    active = num_active_parameters(spec)
    assert active == pytest.approx(published, rel=tolerance)
    assert active - size(spec, "embedding") == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize("path", [p for p in FILES if p.stem.endswith("-tiny")], ids=name_of)
def test_tiny_models_fit_a_laptop(path):
    spec = load(path)
    assert spec.vocab_size == 256, "bytes"
    assert num_parameters(spec) < 10_000_000
    contracted = {part.shape[-1] for part in parts(spec) if part.is_gemm}
    assert all(width % 128 == 0 for width in contracted), contracted


@pytest.mark.parametrize("path", [p for p in FILES if p.parent.name == "clusters"], ids=name_of)
def test_peaks_fall_with_precision(path):
    peaks = load(path).device.peak_tflops
    ordered = [peaks[dtype] for dtype in ("fp8", "bf16", "fp32") if dtype in peaks]
    assert len(ordered) == len(peaks), "a dtype that Device.peak does not know"
    assert ordered == sorted(ordered, reverse=True)


def test_local_has_no_peaks_and_no_links():
    local = load(PRESETS / "clusters" / "local.toml")
    assert local.is_local
    assert local.num_devices == 1
    assert (local.device.peak_tflops, local.node, local.network) == ({}, None, None)


def test_default_cluster_is_one_node():
    for path in (PRESETS / "clusters").glob("*.toml"):
        if path.stem != "local":
            assert load(path).num_nodes == 1

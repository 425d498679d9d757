"""The house rules that import-linter does not keep."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "greylag").rglob("*.py"))
HEAVY = {"plotly", "torch", "tensorboardX", "importlib", "triton", "scipy"}
VAGUE = {"utils", "util", "common", "helpers", "helper", "base", "misc"}


def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in SOURCES]


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_numerics_knows_only_the_precision_of_spec() -> None:
    for path, tree in trees():
        if path.parent.name == "numerics":
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("greylag.spec"):
                    assert node.module == "greylag.spec.precision", path


def test_only_torch_names_distributed_below_parallel() -> None:
    for path, tree in trees():
        if path.parent.name in ("numerics", "model"):
            names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
            names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
            assert not [n for n in names if n.startswith("torch.distributed")], path


def test_no_import_is_hidden_but_of_heavy_packages() -> None:
    for path, tree in trees():
        if path.parent.name == "cli":
            continue
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Import | ast.ImportFrom):
                        module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
                        assert (module or "").split(".")[0] in HEAVY, (
                            f"{path}:{node.lineno} hides an import of {module}"
                        )


def test_faces_are_short_and_silent() -> None:
    for path, tree in trees():
        if path.name == "__init__.py":
            assert len(path.read_text().splitlines()) < 30, path
            assert all(isinstance(n, ast.Expr | ast.ImportFrom | ast.Assign) for n in tree.body), path
            assert not any(a.name == "*" for n in tree.body if isinstance(n, ast.ImportFrom) for a in n.names), path


def test_files_and_functions_fit() -> None:
    for path, tree in trees():
        assert len(path.read_text().splitlines()) <= 400, f"{path} is too long: split by noun"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name} does not fit a screen"


def test_names_say_what_is_inside() -> None:
    for path in SOURCES:
        assert path.stem not in VAGUE, path
        stutter = path.stem.replace("_", "") != path.parent.name and path.stem.startswith(f"{path.parent.name}_")
        assert not stutter, f"{path} repeats its folder"


def test_every_module_opens_with_what_it_is() -> None:
    for path, tree in trees():
        assert ast.get_docstring(tree), path


@pytest.mark.parametrize("preset", sorted((ROOT / "greylag" / "presets").rglob("*.toml")), ids=lambda p: p.stem)
def test_presets_cite_their_sources(preset: Path) -> None:
    assert re.search(r"^\s*#|\s#\s", preset.read_text(), re.M), preset


def test_the_base_install_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from greylag.spec import load_job; from greylag.sim import predict\n"
        "step = predict(load_job('jobs/llama-3-8b_h100_pretrain.toml'))\n"
        "assert step.total_seconds > 0"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)

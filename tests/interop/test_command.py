"""`greylag import` as a user runs it."""

import json
from pathlib import Path

import pytest

from commands import greylag_here as greylag
from greylag.spec import load_job

SCRIPT = (
    "GPUS=8\ntorchrun --nproc_per_node $GPUS --nnodes ${NODES:-2} pretrain_gpt.py --num-layers 4 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 1 "
    "--global-batch-size 32 --bf16 --vocab-size 50257 --save $CHECKPOINTS --no-rope-fusion --some-argument\n"
)
CONFIG = {
    "model_type": "gpt_oss", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64, "vocab_size": 128, "sliding_window": 16,
    "max_position_embeddings": 128, "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def test_a_script_becomes_a_job_and_the_rest_is_said(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    run = greylag(tmp_path, "import", "run.sh", "--cluster", "h100", "--out", "job.toml", "NODES=4")
    assert (run.returncode, run.stdout.strip()) == (0, "job.toml")
    job = load_job(tmp_path / "job.toml")
    assert job.cluster.num_devices == 32
    assert not job.problems()
    said = run.stderr.splitlines()
    assert all(line.startswith("greylag: ") for line in said)
    assert any("irrelevant to a prediction" in line and "--save" in line for line in said)
    assert any("approximated: --no-rope-fusion" in line for line in said)
    assert any("not expressible: --some-argument" in line for line in said)
    shown = greylag(tmp_path, "show", "job.toml")
    assert shown.returncode == 0, shown.stderr


def test_it_prints_the_job_without_out(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    run = greylag(tmp_path, "import", "run.sh", "--cluster", "h100-8x1")
    (tmp_path / "job.toml").write_text(run.stdout)
    assert not load_job(tmp_path / "job.toml").problems()
    assert "16 devices in the file, 8 asked for" in run.stderr


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "job.toml").write_text("mine")
    run = greylag(tmp_path, "import", "run.sh", "--cluster", "h100", "--out", "job.toml")
    assert run.returncode == 2
    assert "exists already" in run.stderr
    assert (tmp_path / "job.toml").read_text() == "mine"


def test_a_config_becomes_the_nearest_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = greylag(tmp_path, "import", "config.json")
    assert run.returncode == 0, run.stderr
    assert "approximated: sinks" in run.stderr
    rest = 'precision = "bf16"\ncluster = "h100"\nsequence = 64\nglobal_batch = 8\n'
    (tmp_path / "job.toml").write_text(rest + run.stdout)
    job = load_job(tmp_path / "job.toml")
    assert (job.model.window, job.model.full_attention_every) == (16, 2)
    assert not job.problems()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.sh"], "no such file"),
        (["."], "cannot be read"),
        (["run.sh"], "give --cluster"),
        (["run.sh", "oops", "--cluster", "h100"], "NAME=value"),
        (["run.sh", "NODES=0", "--cluster", "h100"], "no number of devices"),
        (["run.sh", "--cluster", "h100-8x3"], "global_batch"),
        (["run.sh", "--cluster", "h100", "--out", "no/where.toml"], "cannot be written"),
        (["bytes.sh", "--cluster", "h100"], "not text in UTF-8"),
        (["zero.sh", "--cluster", "h100"], "zero byte"),
        (["config.json", "--cluster", "h100"], "says a model alone"),
        (["deep.sh", "--cluster", "h100"], "nested too deeply"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path: Path, arguments: list[str], said: str) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "bytes.sh").write_bytes(b"\xff\xfe")
    (tmp_path / "zero.sh").write_text("a\0b")
    (tmp_path / "deep.sh").write_text("run " + "${A:-" * 5000 + "1" + "}" * 5000)
    run = greylag(tmp_path, "import", *arguments)
    assert run.returncode == 2
    assert said in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
    assert run.stdout == ""

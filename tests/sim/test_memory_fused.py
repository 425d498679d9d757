"""Memory of fused layers: against published runs, against the papers' terms, and in arrays as in single points."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from greylag.sim.inflight import in_flight
from greylag.sim.memory import Memory, breakdown, fullest, memory, predict_memory
from greylag.spec import Job
from greylag.spec.holdings import chunk_weights, chunks, on_rank, stages_of
from greylag.spec.kept_fused import code_bytes, kept, layer_kinds, probabilities, weight_orientations
from greylag.spec.load import job_from, load_preset
from greylag.spec.parts import num_parameters
from greylag.spec.schedule import order
from greylag.spec.software import Software
from greylag.spec.strategy import Strategy

MEGATRON = {"name": "megatron", "parameters": "bf16", "gradients": "fp32", "activations": "fused"}
LLAMA = {"preset": "llama-3-70b", "num_layers": 12}
DEEPSEEK_V2 = {"preset": "deepseek-v2", "num_layers": 4}
MIB = 2**20


def job_of(model: str | dict, precision: str = "bf16", cluster: str = "b200-8x1", **changes: Any) -> Job:
    """A job of Megatron-Core; `changes` are keys of the job or of the strategy."""
    keys = ("sequence", "global_batch", "software")
    table = {"sequence": 4096, "global_batch": 32, "software": MEGATRON, "model": model, "precision": precision}
    table |= {key: changes.pop(key) for key in keys if key in changes}
    job = job_from({**table, "cluster": cluster, "strategy": changes}, name="test")
    assert not job.problems(), job.problems()
    return job


@pytest.mark.parametrize(
    ("model", "vocab", "strategy", "measured"),
    [
        (LLAMA, 128256, {"pp": 2}, [68149.2, 64479.5]),
        (LLAMA, 128512, {"tp": 2}, [62136.4]),
        (LLAMA, 128512, {"tp": 4}, [40009.8]),
        (LLAMA, 129024, {"tp": 8}, [28965.4]),
        (DEEPSEEK_V2, 102400, {"ep": 8}, [46730.0]),
        (DEEPSEEK_V2, 102400, {"pp": 2, "ep": 4}, [32343.4, 45775.8]),
    ],
)
def test_published_peaks(model: dict, vocab: int, strategy: dict, measured: list[float]) -> None:
    """MiB allocated by Megatron-LM on eight B200, by stage: MooreThreads/SimuMax,
    docs/b200/b200_release_v1.2_summary.json. Within 0.3%: what 1% would be is a layer's tensor."""
    moe = {"etp": 1} if "ep" in strategy else {}
    stages = memory(job_of({**model, "vocab_size": vocab}, **strategy, **moe)).stages
    for stage, mib in zip(stages, measured, strict=True):
        assert float(stage.total) == pytest.approx(mib * MIB, rel=0.003), stage.moment


def test_a_layer_keeps_what_korthikanti_counts() -> None:
    """s b h (34 + 5 a s / h) bytes (arXiv 2205.05198, equation 1), and the statistics of two norms."""
    job = job_of("gpt-3-175b", sequence=2048)
    soft = Software(name="test", activations="fused", attention="unfused", dropout=True)
    tokens, s, model = 2048, replace(job.strategy, dp=8), job.model
    terms = kept(model, job.precision, layer_kinds(model, job.precision)[0], tokens, s, soft)
    terms.append(probabilities(model, tokens, job.sequence, s, soft, 2))
    expected = tokens * model.hidden_size * (34 + 5 * model.num_heads * job.sequence / model.hidden_size)
    assert sum(t.bytes for t in terms) == expected + 2 * tokens * 4


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3", "gpt-3-tiny", "mixtral-8x7b"])
@pytest.mark.parametrize(
    ("pp", "vp", "schedule"), [(1, 1, "1f1b"), (4, 1, "1f1b"), (2, 2, "interleaved"), (2, 2, "zb-v")]
)
def test_stages_hold_the_whole_model_once(model: str, pp: int, vp: int, schedule: str) -> None:
    m = replace(load_preset("model", model), num_mtp_layers=0, num_layers=9)
    s = Strategy(pp=pp, vp=vp, schedule=schedule)
    total = sum(sum(on_rank(chunk_weights(m, chunks(m, s, rank)), s)) for rank in range(pp))
    copies = m.vocab_size * m.hidden_size if m.tied_embeddings and pp > 1 and schedule != "zb-v" else 0
    assert total == num_parameters(m) + copies


def test_dualpipe_holds_every_stage_twice() -> None:
    m, s = load_preset("model", "llama-3-8b"), Strategy(pp=4, schedule="dualpipe")
    assert sum(sum(on_rank(chunk_weights(m, chunks(m, s, r)), s)) for r in range(4)) == 2 * num_parameters(m)


@pytest.mark.parametrize(("schedule", "vp"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3),
                                              ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2), ("dualpipe", 1),
                                              ("dualpipe-v", 2)])  # fmt: skip
@pytest.mark.parametrize(("pp", "m"), [(4, 2), (4, 4), (4, 8), (4, 16), (8, 24)])
def test_in_flight_is_what_the_schedule_runs(schedule: str, vp: int, pp: int, m: int) -> None:
    """Forwards that no input gradient has answered yet; with few micro-batches never less than that."""
    s = Strategy(pp=pp, vp=vp, schedule=schedule)
    for rank, actions in enumerate(order(schedule, pp, vp, m)):
        held, most = 0, 0
        for action in actions:
            held += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            most = max(most, held)
        closed = float(sum(in_flight(s, rank, m)))
        assert closed == most if m >= 2 * pp else closed >= most
        assert closed <= m * max(vp, 1)


@pytest.mark.parametrize(("schedule", "vp"), [("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2), ("dualpipe", 1)])
def test_chunks_in_flight_are_those_that_ran(schedule: str, vp: int) -> None:
    """How many micro-batches of each chunk a rank holds when it holds the most."""
    s, m = Strategy(pp=4, vp=vp, schedule=schedule), 16
    for rank, actions in enumerate(order(schedule, 4, vp, m)):
        held: Counter[int] = Counter()
        best: Counter[int] = Counter()
        for action in actions:
            held[action.stage] += {"F": 1, "B": -1, "I": -1, "W": 0}[action.kind]
            best = held.copy() if held.total() > best.total() else best
        assert [best[stage] for stage in stages_of(s, rank)] == [int(n) for n in in_flight(s, rank, m)]


CANDIDATES = {"tp": [1, 2, 4, 8], "cp": [1, 2], "micro_batch": [1, 2], "zero": [0, 1, 2, 3], "dp": [8, 16]}


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("llama-3-70b", {"pp": 4}),
        ("llama-3-70b", {"pp": 4, "recompute": "full"}),
        ("llama-3-70b", {"pp": 2, "vp": 4, "schedule": "interleaved", "offload": ["optimizer", "activations"]}),
        ("deepseek-v3", {"pp": 4, "ep": 8, "schedule": "zb-h2"}),
        ("deepseek-v3", {"pp": 4, "ep": 8, "recompute": "selective", "recompute_modules": ["mla_up", "moe"]}),
    ],
)
@pytest.mark.parametrize("parameters", ["bf16", "fp32"])
def test_an_array_of_candidates_is_each_of_them(model: str, changes: dict, parameters: str) -> None:
    job = job_of(model, "mxfp8", "b200-8x8", software={**MEGATRON, "parameters": parameters}, **changes)
    random = np.random.default_rng(0)
    chosen = {name: random.choice(np.array(values), 40) for name, values in CANDIDATES.items()}
    batch, sequence = random.choice(np.array([64, 256]), 40), random.choice(np.array([4096, 8192]), 40)
    many = replace(job, strategy=replace(job.strategy, **chosen), global_batch=batch, sequence=sequence)
    account = memory(many)
    totals, fits = account.total, account.fits(job.cluster.device)
    assert totals.shape == (40,)
    assert fullest(many).total == pytest.approx(totals)
    for n in range(0, 40, 7):
        strategy = replace(job.strategy, **{name: int(values[n]) for name, values in chosen.items()})
        one = memory(replace(job, strategy=strategy, global_batch=int(batch[n]), sequence=int(sequence[n])))
        assert float(one.total) == pytest.approx(totals[n])
        assert bool(one.fits(job.cluster.device)) == fits[n]
        for name, sizes in one.components.items():
            assert [float(size) for size in sizes] == pytest.approx(
                [np.broadcast_to(size, 40)[n] for size in account.components[name]]
            ), name


@pytest.mark.parametrize("changes", [{"pp": 8}, {"pp": 8, "schedule": "zb-h1"}, {"pp": 8, "schedule": "gpipe"},
                                     {"pp": 8, "schedule": "dualpipe"}, {"pp": 4, "vp": 2, "schedule": "dualpipe-v"},
                                     {"pp": 8, "stage_layers": [9, 7, 8, 8, 8, 8, 8, 5]}])  # fmt: skip
def test_the_fullest_stage_is_among_those_searched(changes: dict) -> None:
    job = job_of("deepseek-v3", cluster="b200-8x8", ep=8, etp=1, **changes)
    assert float(fullest(job).total) == float(memory(job).total)


def test_components_add_up() -> None:
    job = job_of("deepseek-v3", "fp8-block128", "h800-8x8", pp=8, ep=8, etp=1)
    account = memory(job)
    for n, stage in enumerate(account.stages):
        assert sum(float(sizes[n]) for sizes in account.components.values()) == pytest.approx(float(stage.total))
    assert sum(size for _, size in breakdown(account.stage(0))) == pytest.approx(float(account.stage(0).total))
    assert sum(predict_memory(job).values()) == pytest.approx(float(account.total))
    assert str(account).startswith(f"stage {account.peak_stage}, ")


def activations(job: Job) -> float:
    return predict_memory(job)["activations"]


def test_recompute_frees_what_it_names() -> None:
    none = job_of("deepseek-v3", cluster="b200-8x8", pp=8, ep=8, etp=1)
    freed = {}
    for module in ("attention", "norm", "activation", "mla_up", "mlp", "moe"):
        strategy = replace(none.strategy, recompute="selective", recompute_modules=(module,))
        freed[module] = activations(none) - activations(replace(none, strategy=strategy))
    assert all(size >= 0 for size in freed.values())
    assert freed["moe"] > freed["mla_up"] > freed["activation"] > freed["norm"] > freed["attention"] > 0
    full = replace(none, strategy=replace(none.strategy, recompute="full"))
    some = replace(none, strategy=replace(none.strategy, recompute="full", recompute_layers=3))
    assert activations(none) - activations(full) > freed["moe"]
    assert activations(full) < activations(some) < activations(none)


def test_full_recompute_keeps_one_input_a_layer() -> None:
    job = job_of("llama-3-70b", cluster="b200-8x8", pp=8, recompute="full", global_batch=64)
    stage = memory(job).stage(2)
    each = 4096 * job.model.hidden_size * 2
    assert float(stage.components["norm input"]) == pytest.approx(10 * 6 * each, rel=1e-3)
    assert float(stage.components["computed again"]) > 0
    assert "mlp activation input" not in stage.components


def test_sharding_divides_what_it_says() -> None:
    base = job_of("llama-3-8b", zero=0)
    pools = [predict_memory(replace(base, strategy=replace(base.strategy, zero=level))) for level in range(4)]
    whole = num_parameters(base.model)
    assert pools[0]["parameters"] == pools[2]["parameters"] == 2 * whole
    assert pools[3]["parameters"] == 2 * whole / 8
    assert pools[1]["gradients"] == 4 * whole
    assert pools[2]["gradients"] == 4 * whole / 8
    assert pools[0]["optimizer"] == 12 * whole
    assert pools[1]["optimizer"] == 12 * whole / 8
    replicas = predict_memory(replace(base, strategy=replace(base.strategy, zero=1, replicas=4)))
    assert replicas["optimizer"] == 12 * whole / 2


def test_experts_are_sharded_over_their_own_ranks() -> None:
    """Eight ranks with experts over four: two ranks share the state of each."""
    base = job_of("mixtral-8x7b", ep=4, etp=1)
    moe, layers = base.model.moe, base.model.num_layers
    experts = layers * 3 * moe.num_experts * moe.ffn_hidden_size * base.model.hidden_size
    expected = 12 * ((num_parameters(base.model) - experts) / 8 + experts / 4 / 2)
    assert predict_memory(base)["optimizer"] == pytest.approx(expected)


def test_offload_leaves_the_device() -> None:
    base = job_of("llama-3-8b", global_batch=8)
    strategies = {name: replace(base.strategy, offload=(name,)) for name in ("optimizer", "activations")}
    assert predict_memory(replace(base, strategy=strategies["optimizer"]))["optimizer"] == 0
    assert activations(replace(base, strategy=strategies["activations"])) < activations(base) / 2


@pytest.mark.parametrize(("precision", "cluster", "width"), [
    ("mxfp8", "b200-8x1", 2 * (1 + 1 / 32)),
    ("fp8-tensor-current", "b200-8x1", 1),
    ("fp8-tensor-current", "h100-8x1", 2),
    ("fp8-block128", "h100-8x1", 2 * (1 + 4 / 128**2)),
    ("bf16", "h100-8x1", 0),
])  # fmt: skip
def test_codes_of_weights(precision: str, cluster: str, width: float) -> None:
    """Per tensor a code and, on Hopper, its transpose; MXFP8 and blocks in both orientations, with scales."""
    job = job_of("llama-3-8b", precision, cluster)
    model = job.model
    linear = num_parameters(model) - 2 * model.vocab_size * model.hidden_size - 65 * model.hidden_size
    assert float(memory(job).stage(0).components["FP8 weights"]) == pytest.approx(width * linear)


def test_fp8_inputs_are_kept_in_a_byte() -> None:
    recipe = load_preset("precision", "mxfp8").recipe
    assert code_bytes(recipe, "input") == 1 + 1 / 32
    assert weight_orientations(recipe, transposes=False) == 2
    terms = {}
    for precision in ("bf16", "mxfp8"):
        job = job_of("llama-3-8b", precision)
        kind = layer_kinds(job.model, job.precision)[0]
        every = kept(job.model, job.precision, kind, 4096, job.strategy, job.software)
        terms[precision] = {t.name: t.bytes for t in every}
    assert terms["mxfp8"]["mlp input"] == terms["bf16"]["mlp input"] / 2 * (1 + 1 / 32)
    assert terms["mxfp8"]["norm input"] == terms["bf16"]["norm input"]
    assert "projection input" not in terms["bf16"]


def test_the_head_and_its_predictions_stand_on_the_last_stage() -> None:
    plain = job_of("deepseek-v3", cluster="b200-8x8", pp=4, ep=8, etp=1)
    plain = replace(plain, model=replace(plain.model, num_mtp_layers=0))
    more = replace(plain, model=replace(plain.model, num_mtp_layers=1))
    grown = [float(b.total) - float(a.total) for a, b in zip(memory(plain).stages, memory(more).stages, strict=True)]
    assert grown[:3] == [0, 0, 0]
    assert grown[3] > 2 * plain.model.vocab_size * plain.model.hidden_size
    assert "logits and loss" in memory(plain).stage(-1).components
    assert float(memory(plain).components["logits and loss"][0]) == 0


def test_what_is_fused_shows() -> None:
    """Each departure from the usual costs or saves what it names."""
    dense, moe = job_of("llama-3-8b"), job_of("deepseek-v3", cluster="b200-8x8", pp=8, ep=8, etp=1)
    logits = 4096 * dense.model.vocab_size
    usual = float(memory(dense).total)
    loss = {kind: float(memory(with_facts(dense, loss=kind)).total) for kind in ("parallel", "torch", "compiled")}
    assert loss["torch"] - loss["parallel"] == pytest.approx(6 * logits)
    assert usual < loss["compiled"] < loss["parallel"]
    assert float(memory(with_facts(dense, attention="unfused")).total) > usual
    own = memory(with_facts(dense, weight_gradients="autograd"))
    assert float(own.stage(0).components["dummy weight gradients"]) == 0
    rows = 4096 * moe.model.moe.top_k * moe.model.hidden_size * 2
    moment, fused = "forward of expert layer", with_facts(moe, dispatch="nodes")
    saved = [memory(job).stage(1).by_moment[moment] for job in (moe, fused)]
    assert saved[0] - saved[1] == 2 * rows


def with_facts(job: Job, **facts: Any) -> Job:
    return replace(job, software=replace(job.software, **facts))


def test_a_prediction_needs_nothing_beside_the_job() -> None:
    """What the software says reaches the pools of a Step, and the sequence's cut with it."""
    job = job_of("gpt-3-175b", sequence=2048, tp=8)
    plain = activations(job)
    assert activations(with_facts(job, attention="unfused")) > plain
    assert activations(with_facts(job, dropout=True)) > plain
    whole = replace(job, strategy=replace(job.strategy, sequence_parallel=False))
    layers, outside = job.model.num_layers, 2048 * job.model.hidden_size * 2
    assert memory(whole).stage(0).components["norm input"] == 8 * memory(job).stage(0).components["norm input"]
    assert activations(whole) - plain > 4 * layers * outside * (1 - 1 / 8)  # two norms' inputs and two projections'


def test_experts_without_a_gate_have_their_own_weights() -> None:
    gated = job_of("mixtral-8x7b", ep=4, etp=1)
    plain = replace(gated, model=replace(gated.model, activation="relu2"))
    moe, layers = gated.model.moe, gated.model.num_layers
    third = layers * moe.num_experts * moe.ffn_hidden_size * gated.model.hidden_size
    assert num_parameters(gated.model) - num_parameters(plain.model) == third
    assert predict_memory(gated)["parameters"] - predict_memory(plain)["parameters"] >= 2 * third / 4
    rows = 4096 * moe.top_k * moe.ffn_hidden_size
    one = [memory(job).stage(0).components["expert activation input"] for job in (gated, plain)]
    assert float(one[0] - one[1]) == layers * rows * 2


def test_fsdp_gathers_what_it_shards() -> None:
    """FP32 shards, two layers and the buffer of one gathered in BF16, embedding and head whole."""
    job = job_of("llama-3-8b", software={**MEGATRON, "parameters": "fp32"}, zero=3)
    model, stage = job.model, memory(job).stage(0)
    outer = 2 * model.vocab_size * model.hidden_size
    layer = (num_parameters(model) - outer - model.hidden_size) / model.num_layers
    assert float(stage.components["gathered weights"]) == pytest.approx(2 * (3 * layer + outer))
    assert float(stage.components["weights"]) == 4 * num_parameters(model) / 8
    assert float(stage.components["master weights"]) == 0


def test_reserve_and_fit() -> None:
    job = job_of("llama-3-70b", tp=8)
    account: Memory = memory(job)
    assert account.reserved > account.total
    assert not account.fits(replace(job.cluster.device, memory_gib=float(account.total) / 2**30))
    assert account.fits(replace(job.cluster.device, memory_gib=float(account.reserved) / 2**30 + 1.01))

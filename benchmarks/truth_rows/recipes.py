"""Recipes: what Megatron-Bridge's performance recipes set beside the degrees that its tables print.

`bridge_settings.json` holds the settings of each release from the source's history; a row gets those of its release
whose degrees are most like its own. A release that the file does not know has the recipe that is joined to the row
(today's of the same shape), or else the newest known release's.
"""

import functools
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truth_rows.row import Raw, layout_stages, modules

SETTINGS = Path(__file__).with_name("bridge_settings.json")
DEGREES = ("tp", "pp", "cp", "vp", "ep")
PRECISIONS = {
    "bf16": "bf16",
    "fp8": "fp8",
    "fp8_current_scaling": "fp8",
    "mxfp8": "mxfp8",
    "fp8_32x32_block (mxfp8-like)": "mxfp8",
}
"""The tables' names of precisions, and the recipes'."""
FULL_ITERATION = (
    "_enable_deepseek_full_iteration_mxfp8",
    "_enable_hybridep_full_iteration_mxfp8",
    "_apply_gpt_oss_120b_full_iter_fp8mx_configs",
)
"""Helpers of today's recipes that capture the whole iteration and overlap experts' messages."""


@dataclass(frozen=True)
class Settings:
    """Of one run."""

    graphs: bool = False
    flex: bool = False
    """Whether DeepEP or HybridEP dispatches tokens."""
    ep_overlap: bool = False
    tp_overlap: bool = True
    recompute: dict[str, Any] = field(default_factory=dict)
    """Fields of a Strategy."""
    layout: str | None = None
    """Megatron's pipeline layout, where it has as many stages as the run."""
    fsdp: bool = False
    offload: bool = False
    """Whether at least half of the layers lie in the host's memory."""


def settings_of(raw: Raw, num_layers: int) -> Settings:
    """The settings of a row."""
    release = raw["release"].split()[-1]
    known = [s for s in _known() if _is_of(s, raw)]
    releases = sorted({r for s in known for r in s["releases"]})
    if raw.get("recipe") and release not in releases:
        return _joined(raw)
    if not known:
        return Settings()
    before = [r for r in releases if r <= release]
    mine = [s for s in known if (before[-1] if before else releases[0]) in s["releases"]]
    return _from_history(max(mine, key=lambda s: _likeness(s, raw)), raw, num_layers)


@functools.cache
def _known() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(SETTINGS.read_text(encoding="utf-8"))["settings"]
    return found


def _is_of(settings: dict[str, Any], raw: Raw) -> bool:
    wanted = (raw["model"]["ref"], raw["hardware"]["gpu"], PRECISIONS.get(raw["precision"]))
    return (settings["ref"], settings["gpu"], settings["precision"]) == wanted


def _likeness(settings: dict[str, Any], raw: Raw) -> tuple[int, bool]:
    p = raw["parallel"]
    equal = sum(settings[axis] == (p.get(axis) or 1) for axis in DEGREES)
    return equal + bool(settings.get("fsdp")) * bool(p["fsdp"]), settings["mbs"] == raw["batch"]["mbs"]


def _from_history(settings: dict[str, Any], raw: Raw, num_layers: int) -> Settings:
    p = raw["parallel"]
    same = all(settings[axis] == (p.get(axis) or 1) for axis in DEGREES)
    layers = settings.get("recompute_layers")
    recompute = modules(settings.get("recompute_modules", []))
    if layers:
        recompute = {"recompute": "full", "recompute_layers": layers}
    layout = settings.get("layout")
    fits = layout and len(layout_stages(layout)) == p["pp"] * (p["vp"] or 1)
    return Settings(
        graphs=settings.get("graphs", False),
        flex=settings.get("flex", False),
        ep_overlap=settings.get("ep_overlap", False),
        recompute=recompute,
        layout=layout if fits else None,
        fsdp=bool(p["fsdp"]) or (same and p["fsdp"] is None and settings.get("fsdp", False)),
        offload=same and settings.get("offload_layers", 0) * 2 >= num_layers,
    )


def _joined(raw: Raw) -> Settings:
    """By the recipe that stands in the row."""
    own, helpers = dict(raw["recipe"].get("settings") or {}), raw["recipe"].get("helpers") or []
    whole, full = str(own.get("comm_overlap", "")), any(helper in FULL_ITERATION for helper in helpers)
    experts = own.get("comm_overlap.overlap_moe_expert_parallel_comm") or own.get("model.moe_a2a_overlap")
    return Settings(
        graphs=full or own.get("model.cuda_graph_impl", "none") not in ("none", None),
        flex=full or own.get("model.moe_token_dispatcher_type") == "flex",
        ep_overlap=bool(full or experts or "overlap_moe_expert_parallel_comm=True" in whole),
        tp_overlap=bool(own.get("comm_overlap.tp_comm_overlap", "tp_comm_overlap=False" not in whole)),
        recompute=_joined_recompute(raw["recompute"] or {}),
        fsdp=bool(raw["parallel"]["fsdp"] or own.get("ddp.use_megatron_fsdp")),
    )


def _joined_recompute(said: dict[str, Any]) -> dict[str, Any]:
    if said.get("granularity") == "full":
        return {"recompute": "full", "recompute_layers": said.get("num_layers")}
    if said.get("granularity") == "selective":
        return modules(["core_attn"] if said["modules"] is None else said["modules"])
    return {}

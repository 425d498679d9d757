"""Simulation: what `greylag simulate` puts together, the simulator's results and the report's pictures of them.

`greylag train` takes from here the prediction that it lays beside a run. It stands beside `cli`, which has no room for
it; they, `calibration` and `notebook` alone know more than one wing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from greylag.notebook import calibration_of
from greylag.report.account import account
from greylag.report.derived import check_place, write_derived
from greylag.report.show import print_prediction
from greylag.sim import peak_flops, predict
from greylag.sim.memory import CONTEXT, FRAGMENTATION, memory
from greylag.sim.pipeline import pipeline
from greylag.sim.remedies import remedies
from greylag.sim.trace import trace
from greylag.spec import Job
from greylag.spec.error import SpecError


@dataclass(frozen=True)
class Outputs:
    """What is written beside the tables."""

    trace: Path | None = None
    page: Path | None = None
    ranks: str | None = None
    """Places in the pipeline, such as 0,1,15 or 0-3; None means all."""
    force: bool = False

    def checked(self, pp: int) -> list[int]:
        """The places, once all is in order. Raises SpecError for what cannot be written or has no effect."""
        if not self.trace and not self.page and (self.ranks is not None or self.force):
            option = "--force" if self.ranks is None else "--ranks"
            raise SpecError(f"{option}: nothing is written; give --trace or --out too")
        places = [] if self.ranks is None else place_list(self.ranks, pp)
        for path, endings in ((self.trace, (".json", ".json.gz")), (self.page, (".html",))):
            if path:
                check_place(path, self.force, endings)
        return places


def place_list(text: str, pp: int) -> list[int]:
    """The places of the pipeline that `0,1,15` or `0-3` names. Raises SpecError if one is none of the `pp` places."""
    how = "write places in the pipeline as 0,1,15 or 0-3"
    places: set[int] = set()
    for part in map(str.strip, text.split(",")):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise SpecError(f"--ranks: {part!r} is no number; {how}")
        named = range(int(first), int(last or first) + 1)
        if not named:
            raise SpecError(f"--ranks: {part!r} names none; {how}")
        if named[-1] >= pp:
            raise SpecError(f"--ranks: {max(named[0], pp)} is no place in a pipeline of {pp}; they are 0 to {pp - 1}")
        places.update(named)
    return sorted(places)


def simulate(job: Job, outputs: Outputs, render: Callable[..., str] | None = None) -> None:
    """Print the prediction of a job without problems, and write what is asked for.

    `render` is `report.prediction.render_prediction`, given where a page is asked for: it needs jinja2. Raises
    SpecError before anything is printed.
    """
    places = outputs.checked(job.strategy.pp)
    calibration = calibration_of(job)
    step = predict(job, calibration)
    stages = memory(job).stages if job.software.activations == "fused" else ()
    reserve, outside = (0.0, 0.0) if job.cluster.is_local else (FRAGMENTATION, CONTEXT)
    held = account(job, step.bytes, stages, reserve, outside)
    findings = remedies(job)
    drawn = pipeline(job, step) if outputs.trace or outputs.page else None
    print_prediction(job, step, held, findings)
    if outputs.trace and drawn:
        compress = outputs.trace.name.endswith(".gz")
        kept = {"activation": drawn.activation, "resting": drawn.resting}
        write_derived(outputs.trace, trace(drawn.timeline, **kept, ranks=places, compress=compress))
        print(outputs.trace)
    if outputs.page and drawn:
        assert render
        page = render(job, step, held, drawn.timeline, ranks=places, calibration=calibration, findings=findings)
        write_derived(outputs.page, page.encode())
        print(outputs.page)


def lay_prediction(job: Job, folder: Path) -> str | None:
    """Lay the prediction beside the run; why there is none, where none can be made."""
    try:
        step = predict(job, calibration_of(job))
    except SpecError as error:
        return str(error)
    write_derived(folder / "predicted.json", msgspec.json.encode(step))
    return None


def peak_of(job: Job) -> float:
    """FLOP/s of all ranks at best; 0 where nobody knows."""
    try:
        return peak_flops(job, calibration_of(job))
    except SpecError:
        return 0.0

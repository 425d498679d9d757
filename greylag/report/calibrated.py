"""Calibrated: on the terminal, the constants of a device before and after its kernels were measured."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape

from greylag.report.show import table_of
from greylag.spec.cluster import Cluster
from greylag.spec.measurement import Measurements
from greylag.spec.quantity import percent, seconds


def print_calibrated(
    cluster: Cluster,
    before: Mapping[str, float],
    after: Mapping[str, float],
    errors: Mapping[str, npt.NDArray[np.float64]],
    measured: Measurements,
    console: Console | None = None,
) -> None:
    """Print the constants that changed, how far each kind of kernel is off by them, and what was not understood."""
    console = console or Console()
    console.print(
        f"[bold]{escape(measured.device or 'A device without a name')}[/], by {escape(measured.source)}",
        highlight=False,
    )
    if measured.device not in ("", cluster.device.name):
        said = f"The data sheet is that of {cluster.device.name}; give another --cluster if that is another device."
        console.print(said, markup=False, highlight=False)
    constants = table_of("constant", cluster.name, "measured")
    for name, value in before.items():
        constants.add_row(name, f"{value:.3g}", f"{after[name]:.3g}")
    console.print(constants)
    kinds = table_of("kernels", "samples", "off by, in the median", "nine in ten within")
    for kind, off in errors.items():
        size = np.abs(off)
        kinds.add_row(kind, f"{len(off):,}", percent(float(np.median(size))), percent(float(np.quantile(size, 0.9))))
    console.print(kinds)
    if measured.unread:
        share = sum(measured.unread.values()) / measured.busy if measured.busy else 1.0
        largest = sorted(measured.unread.items(), key=lambda item: -item[1])[:5]
        named = ", ".join(f"{name} {seconds(took)}" for name, took in largest)
        said = f"{percent(share)} of the device's time is in kernels of unknown work: {named}."
        console.print(said, markup=False, highlight=False)

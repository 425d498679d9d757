"""Quantities as people read them."""

from greylag.spec import quantity as q


def test_quantities_read_well() -> None:
    assert [q.seconds(s) for s in (None, 0.0, 2e-5, 0.0123, 1.234, 300, 9000)] == [
        "–", "0 s", "20.0 µs", "12.3 ms", "1.23 s", "5.00 min", "2.50 h",
    ]  # fmt: skip
    assert [q.memory(b) for b in (812 * 2**20, 1023 * 2**20, 80 * 2**30)] == ["812 MiB", "1.00 GiB", "80.0 GiB"]
    assert [q.flops_per_second(f) for f in (4.5e9, 999.9e9, 3e17)] == ["4.50 GFLOP/s", "1.00 TFLOP/s", "300 PFLOP/s"]
    assert [q.count(c) for c in (0, 4096, 9.12e6, 671e9)] == ["0", "4,096", "9.12 M", "671 B"]
    assert [q.difference(d) for d in (None, 0.0, -0.11, 0.042, 24.0)] == ["–", "0.0%", "−11.0%", "+4.2%", "×25.0"]
    assert [q.percent(p) for p in (float("inf"), 1.0, 0.432, 0.000281, 1e-6)] == [
        "–",
        "100%",
        "43.2%",
        "0.03%",
        "<0.01%",
    ]

"""Published runs as Jobs: a dialect per source, and `rows(folder)` in `benchmarks/rows.py` over them all."""

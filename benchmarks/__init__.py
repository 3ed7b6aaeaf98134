"""Benchmarks: each prints a table and writes JSON to benchmarks/results. Ratios within one run are what counts."""

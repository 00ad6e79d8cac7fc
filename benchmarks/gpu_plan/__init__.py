"""The stages of benchmarks/gpu.py: prepare a machine, check results, measure, and profile."""

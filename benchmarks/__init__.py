"""Measurements, each a command of its own: ``python -m benchmarks.<name>``. Speed is measured here and never tested."""

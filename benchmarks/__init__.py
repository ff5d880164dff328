"""Measurements: `make bench` runs them, docs/performance.md shows them."""

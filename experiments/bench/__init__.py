"""Benchmarks: us beside the peers, in the same run."""

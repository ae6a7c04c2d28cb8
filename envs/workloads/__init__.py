"""Workloads: one columnar trace, readers for real ones, generators for made ones."""

"""Policies that choose the three knobs, behind one small protocol; :func:`agents.registry.load_policy` finds them by name."""

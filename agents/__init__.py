"""Policies that choose the three knobs, behind one small protocol."""

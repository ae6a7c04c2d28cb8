"""Gymnasium environments over the cache, simulated and live, and what they observe and pay."""

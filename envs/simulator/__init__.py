"""The simulator: one arm of the cache in virtual time, by the same rules as the gateway, compiled."""

from envs.simulator.config import MemoryEviction, SimConfig
from envs.simulator.simulator import CacheSimulator, Window

__all__ = ["CacheSimulator", "MemoryEviction", "SimConfig", "Window"]

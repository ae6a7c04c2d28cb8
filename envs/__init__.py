"""Gymnasium environments over the cache, simulated and live, and what they observe and pay.

Importing this package registers ``CacheTuning-v0`` and ``CacheTuningLive-v0``; their modules are imported when one is made.
"""

import gymnasium

for _name, _entry_point in (
    ("CacheTuning-v0", "envs.cache_env:CacheTuningEnv"),
    ("CacheTuningLive-v0", "envs.live_env:CacheTuningLiveEnv"),
):
    if _name not in gymnasium.registry:
        gymnasium.register(id=_name, entry_point=_entry_point)

"""Gymnasium environments over the cache, simulated and live, and what they observe and pay.

Importing this package registers ``CacheTuning-v0`` and ``CacheTuningLive-v0``; their modules are imported when one is made.
"""

import gymnasium

for _name, _entry_point, _nondeterministic in (
    ("CacheTuning-v0", "envs.cache_env:CacheTuningEnv", False),
    ("CacheTuningLive-v0", "envs.live_env:CacheTuningLiveEnv", True),  # users are not seeded
):
    if _name not in gymnasium.registry:
        gymnasium.register(id=_name, entry_point=_entry_point, nondeterministic=_nondeterministic)

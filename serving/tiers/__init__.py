"""The tiers of the cache, behind the one protocol of :mod:`serving.tiers.base`."""

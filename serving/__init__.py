"""The data plane: a gateway that answers from a tiered cache or from the model behind it.

Knows nothing of learning. The layer rule is serving <- envs <- agents <- experiments <- tuner.
"""

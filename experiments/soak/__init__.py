"""The soak: the whole gateway for minutes, with everything around it failing, and every answer checked."""

"""The control plane beside a live cache, and the command line."""

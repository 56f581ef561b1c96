"""Darkroom's library: no Hydra, no argv, no globals, no work at import time."""

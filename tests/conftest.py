"""Shapes are executed in tests: the hook must be installed before anything imports `lib`."""

import os

# Tiny tensors gain nothing from threads, and two test processes lose much to them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

from jaxtyping import install_import_hook

# An integer is a float to annotations (PEP 484), and so to the hook.
install_import_hook("lib", "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

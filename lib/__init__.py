"""Darkroom's library: no Hydra, no argv, no globals, and but for this no work at import time."""

from lib.quiet import drop_advice_on_kernels

drop_advice_on_kernels()  # before any module imports PEFT, and PEFT bitsandbytes

"""A copy of a bound denoiser, as previews draw with it while the step goes on."""

import pytest
import torch

from lib import adapter
from lib.training.previews import twin_of
from tests.unit.bound import fill, relative, storages, tiny


def frozen_of(denoiser):
    held = [*denoiser.parameters(), *denoiser.buffers()]
    return [tensor for tensor in held if not tensor.requires_grad]


@pytest.mark.parametrize("mode", ["fp32", "int8", "fp8", "nf4"])
@pytest.mark.parametrize("name", ["flux", "krea2"])
def test_a_twin_shares_the_base_computes_by_peft_and_follows_its_own_adapter(name, mode):
    if mode == "nf4":
        pytest.importorskip("bitsandbytes", exc_type=ImportError)
    made = tiny(name)
    made.bind(mode=mode)
    twin = twin_of(made.denoiser)
    assert storages(frozen_of(twin)) <= storages(frozen_of(made.denoiser))
    assert all(getattr(module, "group", None) is None for module in twin.modules())
    own = adapter.parameters_of(twin)
    assert own.keys() == made.parameters.keys()
    assert not storages(own.values()) & storages(made.parameters.values())
    with torch.no_grad():
        before = made.predict()
        torch.testing.assert_close(made.predict(twin), before, rtol=1e-4, atol=1e-5)
        fill(own, seed=9)
        assert relative(made.predict(twin), before) > 1e-3
        assert torch.equal(made.predict(), before)


@pytest.mark.parametrize("mode", ["fp32", "int8"])
def test_a_twin_computes_the_same_without_any_group(mode):
    """With groups taken away by hand the denoiser itself is PEFT's."""
    made = tiny("z_image")
    made.bind(mode=mode)
    twin = twin_of(made.denoiser)
    for module in made.denoiser.modules():
        if getattr(module, "group", None) is not None:
            module.group = None
    with torch.no_grad():
        assert torch.equal(made.predict(twin), made.predict())

"""A copy of a bound denoiser, as previews draw with it while the step goes on."""

import pytest
import torch

from lib import activations, adapter, processors
from lib.compiling import compile_blocks
from lib.processors import Processor
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


def fast(denoiser):
    """Modules that compute otherwise than diffusers wrote them."""
    return [
        module
        for module in denoiser.modules()
        if module._compiled_call_impl
        or activations.gelu in vars(module).values()
        or isinstance(getattr(module, "processor", None), Processor)
    ]


def test_a_twin_of_a_compiled_denoiser_is_as_diffusers_wrote_it():
    made = tiny("flux")
    made.bind()
    kinds = [type(module) for module in made.denoiser.modules()]
    compile_blocks(made.denoiser, fixed_text=True)
    processors.engage(made.denoiser)
    activations.engage(made.denoiser)
    compiled = len(fast(made.denoiser))
    twin = twin_of(made.denoiser)
    assert [type(module) for module in twin.modules()] == kinds
    assert fast(twin) == []
    assert len(fast(made.denoiser)) == compiled > 0

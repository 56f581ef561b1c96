"""Gradient checkpointing by blocks: the same gradients, and the first blocks alone keep less."""

import pytest
import torch

from lib import families
from lib.recomputing import recompute, repeated
from tests.unit.families import reference
from tests.unit.losing import kept_bytes, losing_of

LISTED = [name for name in families.names() if families.get(name).FACTS.costs.layers]


@pytest.fixture
def losing(request, tmp_path):
    return losing_of(families.get(request.param), tmp_path)


def called_again(denoiser, loss, parameters):
    """The blocks that run a second time, in the order of the model."""
    runs = dict.fromkeys(repeated(denoiser), 0)
    hooks = []
    for block in runs:

        def count(module, _given):
            runs[module] += 1

        hooks.append(block.register_forward_pre_hook(count))
    reference.gradients(parameters, loss())
    for hook in hooks:
        hook.remove()
    return [number for number, times in enumerate(runs.values()) if times == 2]


@pytest.mark.parametrize("losing", families.names(), indirect=True)
def test_the_first_blocks_alone_run_again(losing):
    denoiser, parameters, loss = losing
    plain, most = reference.gradients(parameters, loss()), kept_bytes(loss)
    kept = []
    for blocks in (0, 1, 2, None):
        recompute(denoiser, blocks=blocks)
        again = called_again(denoiser, loss, parameters)
        everything = list(range(len(list(repeated(denoiser)))))
        assert again == (everything if blocks is None else everything[:blocks])
        assert reference.relative(reference.gradients(parameters, loss()), plain) < 1e-6
        kept.append(kept_bytes(loss))
    assert kept[0] == most
    assert kept[0] > kept[1] > kept[2] >= kept[3]


@pytest.mark.parametrize("losing", LISTED, indirect=True)
def test_the_blocks_that_are_counted_are_those_that_can_be_computed_again(losing, request):
    """A plan takes their number from the configuration, and the run takes the first of the model."""
    denoiser, _, _ = losing
    name = request.node.callspec.params["losing"]
    costs = families.get(name).FACTS.costs
    counted = sum(int(denoiser.config[layers]) for layers in costs.layers)
    texts = len(getattr(denoiser, "context_refiner", ()))  # over the text alone: hardly any tokens
    assert len(list(repeated(denoiser))) == counted + texts


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "losing", ["flux", pytest.param("z_image", marks=pytest.mark.nightly)], indirect=True
)
def test_compiled_blocks_are_computed_again_to_the_same_gradients(losing):
    denoiser, parameters, loss = losing
    plain = reference.gradients(parameters, loss())
    torch._dynamo.reset()
    recompute(denoiser, blocks=1)
    denoiser.compile_repeated_blocks(fullgraph=True, dynamic=False, backend="aot_eager")
    assert reference.relative(reference.gradients(parameters, loss()), plain) < 1e-6
    partly = kept_bytes(loss)
    recompute(denoiser)
    assert reference.relative(reference.gradients(parameters, loss()), plain) < 1e-6
    assert kept_bytes(loss) < partly
    torch._dynamo.reset()


@pytest.mark.parametrize("losing", ["flux"], indirect=True)
@pytest.mark.parametrize("dropout", [True, False])
def test_dropout_is_drawn_again_as_it_was_where_there_is_any(losing, dropout, monkeypatch):
    from lib import recomputing

    denoiser, _, loss = losing
    options, whole = [], recomputing.checkpoint

    def seen(*given, **named):
        options.append(named)
        return whole(*given, **named)

    monkeypatch.setattr(recomputing, "checkpoint", seen)
    recompute(denoiser, dropout=dropout)
    loss()
    assert options
    assert all(
        named == {"use_reentrant": False, "preserve_rng_state": dropout} for named in options
    )

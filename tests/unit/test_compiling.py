"""What compiling changes around a block, and that it is taken back; by compilers that are quick."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from lib.batches import Batch
from lib.compiling import compile_blocks, run_as_written
from lib.family import Conditioning
from tests.unit.bound import storages, tiny


def answers(made):
    """What a block of FLUX that cuts its answer in two gives its caller."""
    found = []
    block = made.denoiser.single_transformer_blocks[0]
    handle = block.register_forward_hook(lambda _block, _inputs, answer: found.append(answer))
    with torch.compiler.set_stance("force_eager"):
        made.predict()
    handle.remove()
    return found[0]


def kinds(denoiser):
    return [type(module) for module in denoiser.modules()]


def test_a_compiled_block_answers_in_tensors_of_their_own():
    made = tiny("flux")
    as_written = answers(made)
    assert len(as_written) == 2
    assert len(storages(as_written)) == 1
    compile_blocks(made.denoiser, fixed_text=True)
    apart = answers(made)
    assert len(storages(apart)) == 2
    assert all(torch.equal(one, other) for one, other in zip(apart, as_written, strict=True))


def test_compilation_is_taken_back_whole():
    made = tiny("flux")
    before = kinds(made.denoiser)
    compile_blocks(made.denoiser, fixed_text=True)
    assert kinds(made.denoiser) != before
    run_as_written(made.denoiser)
    assert len(storages(answers(made))) == 1
    assert not any(module._compiled_call_impl for module in made.denoiser.modules())
    assert kinds(made.denoiser) == before


# torch's own: its compiler makes an instance of each Function, and looks at gradients of inputs.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
def test_a_block_and_its_answers_are_one_graph_with_a_gradient_for_each(monkeypatch):
    """Answers made apart by a hook are a graph of their own, after one whose answers are cut."""
    made, gradients = tiny("flux"), []
    made.bind()

    def looked_at(graph):
        names = [node.name for node in graph.nodes if node.op == "placeholder"]
        gradients.append(sum(name.startswith("tangents") for name in names))

    compile_by(looked_at, made, monkeypatch)
    made.loss().backward()
    assert gradients == [2, 2]  # of a single block, of a double one


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*not a leaf Tensor:UserWarning")
def test_gradients_of_inputs_are_dense_as_the_block_before_expects_them(monkeypatch):
    """Parts of one gradient, of a batch: torch would copy them between two blocks."""
    made, dense = tiny("flux"), []
    made.batch = doubled(made.batch)
    made.bind()

    def looked_at(graph):
        (answers,) = graph.output_node().args
        found = [node.meta["val"] for node in answers if node is not None]
        dense.extend(value.is_contiguous() for value in found if value.ndim == 3)

    compile_by(looked_at, made, monkeypatch)
    made.loss().backward()
    assert len(dense) == 2  # of a single block: the double one is the first
    assert all(dense)


def compile_by(look, made, monkeypatch):
    """Compile blocks by a backend that has each backward looked at."""

    def backward(module, _inputs):
        look(module.graph)
        return make_boxed_func(module)

    backend = aot_autograd(
        fw_compiler=lambda module, _inputs: make_boxed_func(module), bw_compiler=backward
    )
    compiled = partial(type(made.denoiser).compile_repeated_blocks, made.denoiser, backend=backend)
    monkeypatch.setattr(made.denoiser, "compile_repeated_blocks", compiled, raising=False)
    compile_blocks(made.denoiser, fixed_text=True)


def doubled(batch):
    conditioning = Conditioning(
        {name: torch.cat([tensor] * 2) for name, tensor in batch.conditioning.items()},
        batch.conditioning.lengths * 2,
    )
    tensors = {name: torch.cat([getattr(batch, name)] * 2) for name in Batch.TENSORS}
    return replace(batch, conditioning=conditioning, names=("one", "other"), **tensors)

"""What compiling changes around a block, and that it is taken back; by compilers that are quick."""

import pytest
import torch

from bench.stepping import several
from lib.compiling import compile_blocks, run_as_written
from tests.unit.bound import storages, tiny
from tests.unit.compilers import compiling_by, showing


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
    made.batch = several(made.batch, 2)
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
    """Compile blocks, and have each backward looked at."""
    compiling_by(showing(look), made, monkeypatch)
    compile_blocks(made.denoiser, fixed_text=True)

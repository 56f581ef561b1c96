"""Every family in every format it has, at every kind of scale: what is read is what was trained."""

import pytest
from safetensors.torch import load_file

from lib import families
from lib.changes import difference, norm
from lib.errors import InputRefused
from lib.naming import FORMATS
from lib.reading import read_file
from tests.unit.exports.cells import CELLS, SCALED, trained

ULP = {"bf16": 2**-8, "fp16": 2**-11}


@pytest.mark.parametrize(("name", "format", "scale"), SCALED)
def test_what_both_readers_make_of_a_file_is_what_was_trained(name, format, scale, tmp_path):
    adapter = trained(name, scale)
    adapter.prove(adapter.write(tmp_path, format), format)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("name", "format"), CELLS)
def test_a_smaller_dtype_is_off_by_its_last_bit_alone(name, format, dtype, tmp_path):
    adapter = trained(name, "rsLoRA")
    path = adapter.write(tmp_path, format, dtype=dtype)
    adapter.prove(path, format, dtype=dtype)
    found = read_file(path, adapter.family, adapter.sizes, format=format)
    assert found.unmatched == ()
    assert found.changes.keys() == adapter.changes.keys()
    for module, change in found.changes.items():
        assert difference(change, adapter.changes[module]) <= 2 * ULP[dtype]


@pytest.mark.parametrize("name", families.names())
def test_one_adapter_is_the_same_in_all_formats(name, tmp_path):
    adapter = trained(name, "double")
    for format in adapter.family.NAMES.formats:
        path = adapter.write(tmp_path, format)
        found = read_file(path, adapter.family, adapter.sizes, format=format)
        assert found.unmatched == ()
        assert found.changes.keys() == adapter.changes.keys()
        assert all(difference(c, adapter.changes[m]) <= 1e-6 for m, c in found.changes.items())


@pytest.mark.parametrize(("name", "format"), [c for c in CELLS if c[1] != "diffusers"])
def test_a_part_of_a_fused_matrix_alone_leaves_the_others_as_they_are(name, format, tmp_path):
    adapter = trained(name, targets=("to_q",))
    path = adapter.write(tmp_path, format)
    adapter.prove(path, format)
    assert all(module.endswith("to_q") for module in adapter.changes)


@pytest.mark.parametrize(("name", "format"), CELLS)
def test_alpha_is_there_exactly_where_readers_take_it_and_is_the_rank(name, format, tmp_path):
    adapter = trained(name, "double")
    tensors = load_file(adapter.write(tmp_path, format))
    alphas = {key for key in tensors if key.endswith(".alpha")}
    pairs = {key for key in tensors if ".lora_down." in key or ".lora_A." in key}
    layouts = adapter.family.NAMES.layouts
    expected = len(pairs) if format in layouts and layouts[format].alpha else 0
    assert len(alphas) == expected
    for key in alphas:
        stem, (half,) = (
            key.removesuffix(".alpha"),
            {"lora_down", "lora_A"} & {part for pair in pairs for part in pair.split(".")},
        )
        assert float(tensors[key]) == tensors[f"{stem}.{half}.weight"].shape[0]


@pytest.mark.parametrize(("name", "format"), CELLS)
def test_every_linear_module_is_exported_or_refused_by_name(name, format, tmp_path):
    """With an adapter on all of them; nothing is lost on the way."""
    leaves = sorted(trained(name).sizes)
    adapter = trained(name, targets=tuple(leaves))
    try:
        path = adapter.write(tmp_path, format)
    except InputRefused as refused:
        (problem,) = refused.problems
        assert format != "diffusers"
        lost = problem.why.removeprefix("its readers would leave out ").split(" and ")[0]
        assert set(lost.split(", ")) <= set(leaves)
        kept = [leaf for leaf in leaves if leaf not in _lost(adapter, format)]
        adapter = trained(name, targets=tuple(kept))
        path = adapter.write(tmp_path, format)
    adapter.prove(path, format)


def _lost(adapter, format):
    """By the family's own declaration."""
    names = adapter.family.NAMES
    groups = names.original([*adapter.sizes])
    named = {
        part
        for original, parts in groups.items()
        if not original.startswith(names.lost.get(format, ()))
        for part in parts
    }
    return adapter.sizes.keys() - named


def test_a_format_is_for_all_families_or_declared_not_to_be():
    missing = {
        (name, format)
        for name in families.names()
        for format in FORMATS
        if format not in families.get(name).NAMES.formats
    }
    assert missing == {("krea2", "kohya")}


def test_the_norm_of_a_change_is_that_of_the_product():
    change = next(iter(trained("qwen_image", "double").changes.values()))
    assert norm(change) == pytest.approx(float((change.up @ change.down).norm()), rel=1e-12)
    assert difference(change, change) < 1e-12

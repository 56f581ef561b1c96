"""What a run needs of a GPU, told by names and shapes alone, beside what GPUs were seen to use."""

import pytest
from torch import nn

from lib import families
from lib.binding import quantisable
from lib.few_bits import BYTES, LEAST_SIDE, MODES, blocks_in, in_few_bits
from lib.footprint import GIB, WORTH_COMPILING, Way, Work, compiles, count, footprint, reference
from lib.hub import Component
from lib.pipeline.budget import _complete, ranks_of
from lib.schema import AdapterConfig
from tests.unit import full_size
from tests.unit.families import reference as tiny

BITS = {"bf16": 16, "int8": 8, "nf4": 4}


def by_names(denoiser, family):
    layers = full_size.layers_of(denoiser)
    return in_few_bits(layers, blocks=blocks_in(layers, lists=family.FACTS.costs.lists))


@pytest.mark.parametrize("name", families.names())
def test_names_tell_the_layers_that_the_model_itself_tells(name, tmp_path):
    family = families.get(name)
    base = tiny.make_base(family, tmp_path)
    small, large = tiny.denoiser_of(family, base), full_size.denoiser_of(name)
    for denoiser in (small, large):
        found = by_names(denoiser, family)
        assert found
        assert sorted(found) == sorted(quantisable(denoiser))
        assert all(isinstance(denoiser.get_submodule(layer), nn.Linear) for layer in found)


@pytest.mark.parametrize("name", families.names())
def test_the_weights_in_a_family_s_facts_are_those_of_its_reference(name):
    weights, (total, few) = full_size.weights_of(name), families.get(name).FACTS.costs.weights
    assert (weights.dense + weights.few, weights.few) == (total, few)


@pytest.mark.parametrize("name", families.names())
def test_a_base_whose_files_are_not_here_is_estimated_near_its_reference(name):
    """Weights exactly; the adapter is small beside them, and its estimate rough."""
    costs, known = families.get(name).FACTS.costs, full_size.weights_of(name)
    guessed = reference(costs, rank=16)
    assert (guessed.dense, guessed.few) == (known.dense, known.few)
    work, config = Work(512, 512, 64, 1), full_size.denoiser_of(name).config
    for mode in ("bf16", *MODES):
        one, two = (
            footprint(w, costs, config, work, Way(mode, False), compiled=True).peak
            for w in (guessed, known)
        )
        assert one == pytest.approx(two, rel=0.12)


# family, way, compiled, pixels of a side, pictures, text tokens, peak in GiB on an H200 (bench/results)
BF16, FP8, INT8, NF4 = (Way(mode, False) for mode in ("bf16", "fp8", "int8", "nf4"))
MEASURED = [
    ("flux", BF16, True, 512, 1, 512, 29.5),
    ("flux", BF16, True, 512, 4, 512, 49.7),
    ("flux", BF16, True, 1024, 1, 512, 42.6),
    ("flux", Way("bf16", True), True, 512, 1, 512, 23.8),
    ("flux", BF16, False, 512, 1, 512, 31.1),
    ("flux", FP8, True, 512, 1, 512, 29.7),
    ("flux", FP8, True, 512, 4, 512, 49.9),
    ("flux", INT8, True, 512, 1, 512, 21.7),
    ("flux", NF4, True, 512, 1, 512, 17.7),
    ("flux", Way("nf4", True), True, 512, 1, 512, 11.9),
    ("z_image", BF16, True, 512, 1, 128, 16.2),
    ("sdxl", BF16, True, 1024, 4, 77, 25.8),
    ("qwen_image", BF16, True, 512, 1, 128, 45.1),
    ("krea2", BF16, True, 512, 1, 512, 37.9),
    ("flux2_klein", BF16, True, 512, 1, 512, 11.7),
]


@pytest.mark.parametrize(
    ("name", "way", "compiled", "side", "batch", "words", "gib"),
    MEASURED,
    ids=[f"{name}-{way}-{side}-{batch}-{c}" for name, way, c, side, batch, *_ in MEASURED],
)
def test_a_predicted_peak_is_that_which_was_measured(name, way, compiled, side, batch, words, gib):
    facts, config = families.get(name).FACTS, full_size.denoiser_of(name).config
    work = Work(height=side, width=side, text_tokens=words, batch=batch)
    weights = full_size.weights_of(name)
    found = footprint(weights, facts.costs, config, work, way, compiled=compiled)
    assert found.peak / GIB == pytest.approx(gib, rel=0.1)


def flux(way, **options):
    costs, config = families.get("flux").FACTS.costs, full_size.denoiser_of("flux").config
    work, options = Work(512, 512, 512, 1), {"compiled": True, **options}
    return footprint(full_size.weights_of("flux"), costs, config, work, way, **options)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", families.names())
def test_what_grows_with_the_work_grows_and_what_does_not_stays(name, again):
    costs, config = families.get(name).FACTS.costs, full_size.denoiser_of(name).config

    def told(*work, mode="bf16"):
        weights = full_size.weights_of(name)
        return footprint(weights, costs, config, Work(*work), Way(mode, again), compiled=True)

    one, two, wide = told(512, 512, 64, 1), told(512, 512, 64, 2), told(512, 1024, 64, 1)
    assert (two.kept, two.passing) == pytest.approx((2 * one.kept, 2 * one.passing))
    assert one.kept < wide.kept <= 2 * one.kept
    assert one.weights == two.weights == wide.weights
    assert one.adapter == two.adapter > 0
    assert told(512, 1024, 64, 1) == told(1024, 512, 64, 1)
    assert told(512, 512, 64, 1, mode="fp32").kept == pytest.approx(2 * one.kept)


def test_fewer_bits_take_less_and_float8_in_both_orders_takes_as_much_as_bfloat16():
    sizes = {mode: flux(Way(mode, False)).weights for mode in ("fp32", "bf16", *MODES)}
    assert sizes["fp32"] == 2 * sizes["bf16"]
    assert sizes["fp8"] == sizes["bf16"] > sizes["int8"] > sizes["nf4"]
    few = full_size.weights_of("flux").few
    for mode, bits in BITS.items():
        assert sizes["bf16"] - sizes[mode] == pytest.approx(few * (16 - bits) / 8, rel=0.02)
    assert BYTES["nf4"] == pytest.approx(4.127 / 8, rel=1e-3)  # bits a weight, as QLoRA has it


def test_the_eager_step_keeps_more_and_pictures_drawn_meanwhile_take_their_room():
    assert flux(BF16, compiled=False).kept > flux(BF16).kept
    assert flux(BF16, previews=GIB).peak == flux(BF16).peak + GIB


def test_each_block_computed_again_saves_what_it_kept_but_for_its_input():
    keeping, again = flux(BF16), flux(Way("bf16", True))
    assert keeping.blocks == 19 + 38
    # With all again one block at a time keeps its own while it is computed.
    each = keeping.kept // keeping.blocks
    assert keeping.kept - keeping.blocks * keeping.saving == pytest.approx(
        again.kept - each, rel=1e-3
    )
    assert 0 < keeping.saving < each


SHAPES = {
    "transformer_blocks.0.attn.to_q.weight": (1024, 512),
    "transformer_blocks.0.attn.to_q.bias": (1024,),
    "transformer_blocks.0.norm1.linear.weight": (2048, 512),  # a modulation
    "transformer_blocks.0.attn.odd.weight": (1024, 520),
    "transformer_blocks.1.attn.to_q.weight": (1024, 512),
    "transformer_blocks.10.attn.to_q.weight": (512, 1024),
    "embedder.to_q.weight": (512, 512),
    "transformer_blocks.0.attn.small.weight": (16, 512),
    "transformer_blocks.0.kernel.weight": (512, 512, 3, 3),
}
COSTS = families.get("qwen_image").FACTS.costs


def test_weights_are_counted_by_the_shapes_in_the_files():
    weights = count(SHAPES, COSTS, ranks={"to_q": 4, "odd": 2})
    product = 512 * 1024
    assert (weights.few, weights.largest) == (3 * product, product)
    others = 1024 + 2048 * 512 + 1024 * 520 + 512 * 512 + 16 * 512 + 512 * 512 * 9
    assert weights.dense == others
    assert weights.adapter == 4 * (3 * 1536 + 1024) + 2 * 1544


def test_of_a_base_with_no_large_layer_all_that_could_be_are_held_in_few_bits():
    layers = {"blocks.0.a": (64, 32), "blocks.0.norm.a": (64, 32), "blocks.1.b": (24, 32)}
    assert in_few_bits(layers, blocks={"blocks.0", "blocks.1"}) == ["blocks.0.a"]
    large = {**layers, "blocks.1.a": (LEAST_SIDE, LEAST_SIDE)}
    assert in_few_bits(large, blocks={"blocks.0", "blocks.1"}) == ["blocks.1.a"]
    assert in_few_bits(large, blocks=set()) == []


def test_a_block_lies_in_a_list_and_its_number_is_whole():
    names = ["a.blocks.0.x.y", "a.blocks.10.x", "blocks.1", "blocks.one.x", "noblocks.3.x"]
    assert blocks_in(names, lists=("blocks",)) == {"a.blocks.0", "a.blocks.10"}
    layers = {"blocks.1.x": (512, 512), "blocks.10.x": (512, 512)}
    assert in_few_bits(layers, blocks={"blocks.1"}) == ["blocks.1.x"]


def test_a_module_has_its_pattern_s_rank_where_it_has_one():
    config = AdapterConfig(rank=16, targets=["to_q", "to_k"], rank_pattern={"to_q": 8, "0.to_k": 4})
    shapes = {
        f"transformer_blocks.{n}.{leaf}.weight": (10, 10)
        for n in (0, 1)
        for leaf in ("to_q", "to_k", "to_v")
    }
    weights = count(shapes, COSTS, ranks=ranks_of(config))
    assert weights.adapter == 20 * (8 + 8 + 4 + 16)


@pytest.mark.parametrize(
    ("asked", "steps", "engages"),
    [
        ("always", 1, True),
        ("never", 10_000, False),
        ("auto", WORTH_COMPILING, True),
        ("auto", WORTH_COMPILING - 1, False),
    ],
)
def test_a_plan_knows_whether_steps_are_compiled(asked, steps, engages):
    assert compiles(asked, total_steps=steps) is engages


def test_what_a_configuration_leaves_out_is_its_class_s_default():
    costs = families.get("flux").FACTS.costs
    named = Component("FluxTransformer2DModel", config={"num_layers": 3}, weights={})
    whole = _complete(named, costs)
    assert (whole["num_layers"], whole["num_single_layers"]) == (3, 38)
    assert (whole["num_attention_heads"], whole["attention_head_dim"]) == (24, 128)

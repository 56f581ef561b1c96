"""Which layers are joined, and which are stored in few bits."""

import re
from collections import Counter

import pytest
import torch

from lib import families
from lib.binding import bind, linears, quantisable
from lib.few_bits import LEAST_SIDE
from lib.frozen import FrozenLinear
from lib.lowrank import AdaptedLinear, SharingLinear
from tests.unit.bound import CPU, flat, relative, tiny

# Rows of each member of every group of the tiny bases, and how many groups have them.
SIZES = {
    "flux": {(32, 32, 32): 2, (128, 32, 32, 32): 1, (32,): 2},
    "flux2_klein": {(32, 32, 32): 2, (32,): 3, (288,): 2},
    "krea2": {
        (32, 32, 32, 32): 2,
        (32, 16, 16, 32): 2,
        (32, 32): 2,
        (64, 64): 2,
        (32,): 13,
        (192,): 1,
        (64,): 1,
        (1,): 1,
    },
    "qwen_image": {(32, 32, 32): 4, (32,): 4},
    "sdxl": {(32, 32, 32): 4, (32, 32): 4, (32,): 12},
    "z_image": {(32, 32, 32): 4, (85, 85): 4, (32,): 4},
}


@pytest.mark.parametrize("name", families.names())
def test_layers_that_a_family_declares_share_one_product(name):
    made = tiny(name)
    made.bind()
    assert Counter(group.sizes for group in made.groups()) == SIZES[name]


@pytest.mark.parametrize("name", families.names())
def test_every_declaration_of_a_family_finds_layers(name):
    made = tiny(name)
    layers = [layer for layer, _ in linears(made.denoiser)]
    made.bind()
    joined = {len(group.members) for group in made.groups()}
    for members in made.family.FACTS.shared_inputs:
        ends = tuple(f".{member}" for member in members)
        assert all(any(f".{layer}".endswith(end) for layer in layers) for end in ends), members
        assert len(members) in joined


@pytest.mark.parametrize("name", families.names())
def test_every_adapted_layer_has_a_group_and_a_place_in_it(name):
    made = tiny(name)
    made.bind()
    adapted = [m for m in made.denoiser.modules() if isinstance(m, AdaptedLinear)]
    assert len(adapted) * 2 == len(made.parameters)
    assert all(layer.group.members[layer.place] is layer for layer in adapted)


@pytest.mark.parametrize("name", families.names())
def test_weights_of_joined_layers_are_rows_of_the_one_weight(name):
    made = tiny(name)
    before = {n: _weight(layer).clone() for n, layer in linears(made.denoiser)}
    size = _bytes(made.denoiser)
    made.bind()
    for layer, expected in ((m, before[n]) for n, m in linears(made.denoiser)):
        assert torch.equal(_weight(layer), expected)
    for group in (g for g in made.groups() if len(g.members) > 1):
        rows = torch.cat([_weight(member) for member in group.members])
        assert torch.equal(group.base.weight, rows)
        whole = group.base.weight.untyped_storage().data_ptr()
        assert {_weight(m).untyped_storage().data_ptr() for m in group.members} == {whole}
    assert _bytes(made.denoiser) == size


def _weight(layer):
    return getattr(layer, "base_layer", layer).weight.detach()


def _bytes(denoiser):
    """Of storages, each once: what lies in memory."""
    held = [t.untyped_storage() for t in (*denoiser.parameters(), *denoiser.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())


def test_a_layer_without_an_adapter_that_shares_its_input_computes_in_a_shell():
    made = tiny("flux")
    made.bind()
    shell = made.denoiser.get_submodule("single_transformer_blocks.0.proj_mlp")
    assert isinstance(shell, SharingLinear)
    rows = shell.base_layer.out_features
    (up,) = shell.group.ups  # of q, k and v, which come after it
    assert up.rows == (rows, shell.group.base.out_features)
    assert up.ranks == (0, 3 * 4)


def test_with_dropout_every_layer_draws_its_own_and_none_shares():
    made = tiny("flux", dropout=0.5)
    made.denoiser.train()
    made.bind(dropout=True)
    assert {len(group.members) for group in made.groups()} == {1}
    assert {group.dropout.p for group in made.groups()} == {0.5}
    torch.manual_seed(1)
    one, other = (made.predict().detach() for _ in range(2))
    assert relative(one, other) > 1e-4


def test_dropout_draws_what_peft_draws():
    made = tiny("flux", dropout=0.5)
    made.denoiser.train()
    torch.manual_seed(1)
    loss, gradients = made.gradients()
    made.bind(dropout=True)
    torch.manual_seed(1)
    bound_loss, bound = made.gradients()
    assert bound_loss == pytest.approx(loss, rel=1e-5)
    assert relative(flat(bound), flat(gradients)) < 1e-5


def test_layers_of_unlike_shape_are_not_joined():
    from lib import adapter

    made = tiny("flux")
    shared = [("attn.to_q", "ff.net.2"), ("attn.to_k", "attn.absent")]  # features, and no such one
    scale = adapter.scale_of(made.config)
    bind(
        made.denoiser, made.parameters, shared=shared, mode="fp32", device=CPU,
        dtype=torch.float32, scale=scale,
    )  # fmt: skip
    assert {len(group.members) for group in made.groups()} == {1}


# Layers in few bits at full size, by name with `*` for numbers: none but these.
BLOCKS = {
    "flux": {
        r"transformer_blocks\.\*\.attn\.(to_[qkv]|to_out\.\*|add_[qkv]_proj|to_add_out)": 19 * 8,
        r"transformer_blocks\.\*\.ff(_context)?\.net\.\*(\.proj)?": 19 * 4,
        r"single_transformer_blocks\.\*\.(proj_mlp|proj_out|attn\.to_[qkv])": 38 * 5,
    },
    "flux2_klein": {
        r"transformer_blocks\.\*\.attn\.(to_[qkv]|to_out\.\*|add_[qkv]_proj|to_add_out)": 5 * 8,
        r"transformer_blocks\.\*\.ff(_context)?\.linear_(in|out)": 5 * 4,
        r"single_transformer_blocks\.\*\.attn\.(to_qkv_mlp_proj|to_out)": 20 * 2,
    },
    "krea2": {r"transformer_blocks\.\*\.(attn\.to_.*|ff\.(gate|up|down))": 28 * 8},
    "qwen_image": {
        r"transformer_blocks\.\*\.attn\.(to_[qkv]|to_out\.\*|add_[qkv]_proj|to_add_out)": 60 * 8,
        r"transformer_blocks\.\*\.(img|txt)_mlp\.net\.\*(\.proj)?": 60 * 4,
    },
    "sdxl": {
        r".*\.transformer_blocks\.\*\.attn[12]\.to_([qkv]|out\.\*)": 70 * 8,
        r".*\.transformer_blocks\.\*\.ff\.net\.\*(\.proj)?": 70 * 2,
    },
    "z_image": {
        r"(layers|noise_refiner|context_refiner)\.\*\.attention\.to_([qkv]|out\.\*)": 34 * 4,
        r"(layers|noise_refiner|context_refiner)\.\*\.feed_forward\.w[123]": 34 * 3,
    },
}
DENSE = {
    "flux": ("proj_out", "x_embedder", "context_embedder", "single_transformer_blocks.0.norm.linear"),
    "flux2_klein": ("proj_out", "single_stream_modulation.linear", "double_stream_modulation_img.linear"),
    "krea2": ("img_in", "final_layer.linear", "time_mod_proj", "text_fusion.refiner_blocks.0.attn.to_q"),
    "qwen_image": ("proj_out", "transformer_blocks.0.img_mod.1", "transformer_blocks.59.txt_mod.1"),
    "sdxl": ("time_embedding.linear_1", "mid_block.attentions.0.proj_in", "mid_block.resnets.0.time_emb_proj"),
    "z_image": ("layers.0.adaLN_modulation.0", "cap_embedder.1", "all_final_layer.2-1.linear"),
}  # fmt: skip


@pytest.fixture(scope="module")
def full_size():
    """A family's denoiser at full size, without memory."""
    from bench.full_size import make_denoiser
    from bench.full_size_bases import FULL

    def make(name):
        return make_denoiser(families.get(name), FULL[name], device=torch.device("meta"))

    return make


@pytest.mark.parametrize("name", families.names())
def test_large_layers_of_the_blocks_alone_are_stored_in_few_bits(name, full_size):
    denoiser = full_size(name)
    found = quantisable(denoiser)
    spelt = [re.sub(r"\.\d+(?=\.|$)", ".*", layer) for layer in found]
    counts = {
        names: sum(re.fullmatch(names, layer) is not None for layer in spelt)
        for names in BLOCKS[name]
    }
    assert counts == BLOCKS[name]
    assert sum(counts.values()) == len(found) == len(set(found))
    layers = dict(linears(denoiser))
    assert layers.keys() >= set(DENSE[name])
    assert not set(found) & set(DENSE[name])
    assert min(min(layers[n].in_features, layers[n].out_features) for n in found) >= LEAST_SIDE


def test_a_side_that_is_no_multiple_of_16_keeps_a_layer_dense():
    made = tiny("z_image")
    found = quantisable(made.denoiser)
    layers = dict(linears(made.denoiser))
    odd = {n for n, m in layers.items() if 85 in (m.in_features, m.out_features)}
    assert odd
    assert not odd & set(found)


@pytest.mark.parametrize("mode", ["fp8", "int8"])
@pytest.mark.parametrize("name", families.names())
def test_layers_are_replaced_where_they_stand_and_the_others_left(name, mode):
    made = tiny(name)
    expected = set(quantisable(made.denoiser))
    with torch.no_grad():
        dense = made.predict()
    made.bind(mode=mode)
    few = {id(m) for m in made.denoiser.modules() if isinstance(m, FrozenLinear)}
    assert few
    groups = [group for group in made.groups() if group.base.kind == mode]
    in_groups = sum(len(group.members) for group in groups)
    alone = {n for n, m in made.denoiser.named_modules() if n in expected and id(m) in few}
    assert in_groups + len(alone) == len(expected)
    # Whatever is in few bits is held so alone: no dense weight stays beside it.
    held = {n for n, p in made.denoiser.named_parameters() if n.endswith("weight")}
    assert (
        not {n for layer in expected for n in (f"{layer}.weight", f"{layer}.base_layer.weight")}
        & held
    )
    with torch.no_grad():
        assert relative(made.predict(), dense) < {"fp8": 0.15, "int8": 0.03}[mode]


@pytest.mark.parametrize("mode", ["fp8", "int8"])
def test_gradients_through_layers_in_few_bits_point_the_same_way(mode):
    exact, few = tiny("flux"), tiny("flux")
    exact.bind()
    few.bind(mode=mode)
    one, other = (flat(made.gradients()[1]) for made in (exact, few))
    assert torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.99

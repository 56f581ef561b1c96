"""Models that a base stores in 4 bits compute what bitsandbytes' own numbers say."""

import json
import shutil
from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.full_size import preset_of
from lib import adapter, components, families, frozen, prequantised, products
from lib.binding import linears, quantisable
from lib.errors import InputRefused
from lib.hub import Base
from lib.memory import Memory
from lib.prequantised import StoredNf4
from lib.schema import AdapterConfig
from lib.training.previews import twin_of
from tests.unit import stored_in_nf4
from tests.unit.bound import CPU, Tiny, fill, flat, relative, tiny

pytest.importorskip("bitsandbytes", exc_type=ImportError)

NESTED = pytest.mark.parametrize("nested", [True, False], ids=["nested", "not nested"])
FAMILIES = pytest.mark.parametrize("name", families.names())
STORED = [
    pytest.param(name, nested, marks=() if nested or name == "flux" else pytest.mark.nightly)
    for name in families.names()
    for nested in (True, False)
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A family's tiny base: dense, stored in nf4, and dense with the stored numbers."""
    made = {}

    def found(name, nested=True):
        if (name, nested) not in made:
            root = tmp_path_factory.mktemp(name)
            families.get(name).build_tiny(root / "dense")
            component = families.get(name).FACTS.denoiser
            kind = {"component": component}
            stored_in_nf4.store(root / "dense", root / "few", nested=nested, **kind)
            stored_in_nf4.widened(root / "few", root / "wide", **kind)
            made[name, nested] = root
        return made[name, nested]

    return found


def opened(folder):
    return Base(str(folder), root=folder, name=f"file:{folder}", memory=Memory(folder / "store"))


def loaded(name, folder, *, dtype=torch.float32):
    return families.get(name).load_denoiser(opened(folder), dtype=dtype, device=CPU)


def adapted(name, folder, *, dtype=torch.float32):
    """With an adapter that is not zero, and the batch of every tiny denoiser."""
    denoiser, like = loaded(name, folder, dtype=dtype), tiny(name)
    injected = adapter.inject(denoiser, like.config, seed=0)
    fill(injected.parameters)
    return Tiny(like.family, denoiser, like.config, injected.parameters, like.batch)


@pytest.mark.parametrize(("name", "nested"), STORED)
def test_it_computes_and_teaches_what_a_dense_base_of_its_numbers_does(bases, name, nested):
    few, wide = (adapted(name, bases(name, nested) / kind) for kind in ("few", "wide"))
    few.bind(mode="nf4")
    wide.bind(mode="fp32")
    with torch.no_grad():
        assert relative(few.predict(), wide.predict()) < 1e-5
    (loss, found), (expected_loss, expected) = few.gradients(), wide.gradients()
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert found.keys() == expected.keys()
    assert float(flat(expected).norm()) > 0
    assert relative(flat(found), flat(expected)) < 1e-5


@pytest.mark.parametrize("name", ["flux", "krea2"])
def test_in_16_bits_it_is_near(bases, name):
    few, wide = (
        adapted(name, bases(name) / kind, dtype=torch.bfloat16) for kind in ("few", "wide")
    )
    few.bind(mode="nf4", dtype=torch.bfloat16)
    wide.bind(mode="bf16", dtype=torch.bfloat16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert few.predict().dtype == torch.bfloat16
        assert relative(few.predict().float(), wide.predict().float()) < 0.02


@FAMILIES
def test_before_it_is_bound_it_computes_the_same(bases, name):
    """As samples are drawn: by PEFT's own layers around the stored ones."""
    few, wide = (adapted(name, bases(name) / kind) for kind in ("few", "wide"))
    with torch.no_grad():
        assert relative(few.predict(), wide.predict()) < 1e-5


@FAMILIES
def test_groups_are_those_of_a_dense_base_in_nf4(bases, name):
    few, dense = adapted(name, bases(name) / "few"), adapted(name, bases(name) / "dense")
    few.bind(mode="nf4")
    dense.bind(mode="nf4")
    odd = 85  # of Z-Image's tiny one: its blocks of 64 do not end with its rows
    found = Counter(group.sizes for group in few.groups() if odd not in group.sizes)
    assert found == Counter(group.sizes for group in dense.groups() if odd not in group.sizes)
    assert all(isinstance(group.base, frozen.Nf4Linear) for group in few.groups())


@FAMILIES
def test_everything_stored_stays_in_few_bits_and_nothing_of_it_trains(bases, name):
    few = adapted(name, bases(name) / "few")
    expected = set(stored_in_nf4.linears(dict(few.denoiser.config, _class_name=_class_of(few))))
    assert {n for n, m in few.denoiser.named_modules() if isinstance(m, StoredNf4)} == {
        f"{n}.base_layer" if f"{n}.lora_A.default.weight" in few.parameters else n for n in expected
    }
    before = _packed_bytes(few)
    few.bind(mode="nf4")
    assert _packed_bytes(few) == before
    learning = {n for n, p in few.denoiser.named_parameters() if p.requires_grad}
    assert learning == set(few.parameters)
    held = {n for n, p in few.denoiser.named_parameters() if n.endswith("weight")}
    assert not {f"{n}{end}" for n in expected for end in (".weight", ".base_layer.weight")} & held


def _packed_bytes(made):
    """All that is held, by the denoiser or by its groups, each once."""
    held = [made.denoiser, *(group.base for group in made.groups())]
    found = {t.data_ptr(): t for m in held for n, t in m.named_buffers() if n.endswith("packed")}
    return sum(tensor.nbytes for tensor in found.values())


def _class_of(made):
    return type(made.denoiser).__name__


@NESTED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_joined_layer_has_the_very_numbers_that_bitsandbytes_gives_each(bases, nested, dtype):
    folder = bases("flux", nested) / "few"
    made = adapted("flux", folder, dtype=dtype)
    made.bind(mode="nf4", dtype=dtype)
    tensors = load_file(folder / "transformer" / stored_in_nf4.WEIGHTS)
    names = {id(m): n for n, m in made.denoiser.named_modules()}
    joined = [group for group in made.groups() if len(group.members) > 1]
    assert joined
    for group in joined:
        rows = [f"{names[id(member)]}.weight" for member in group.members]
        expected = [stored_in_nf4.dequantised(tensors, row).to(dtype) for row in rows]
        found = products.from_nf4(group.base.stored, tuple(torch.cat(expected).shape), dtype)
        assert torch.equal(found, torch.cat(expected))
        for member, one in zip(group.members, expected, strict=True):
            unit = torch.eye(one.shape[1], dtype=dtype)
            bias = 0 if group.base.bias is None else member.base_layer(0 * unit)
            torch.testing.assert_close(member.base_layer(unit) - bias, one.t(), atol=1e-2, rtol=0)


def test_it_equals_a_dense_base_in_nf4_where_the_same_layers_are_quantised(bases, tmp_path):
    """Alone, layer by layer: joined ones share the statistics of their maxima."""
    dense = bases("flux") / "dense"
    only = quantisable(loaded("flux", dense))
    few = adapted("flux", stored_in_nf4.store(dense, tmp_path / "few", only=only))
    ours, joined = adapted("flux", dense), adapted("flux", dense)
    for made in (few, ours):
        made.bind(mode="nf4", dropout=True)
    joined.bind(mode="nf4")
    kinds = [
        Counter(isinstance(m, frozen.Nf4Linear) for m in x.denoiser.modules()) for x in (few, ours)
    ]
    assert kinds[0][True] == kinds[1][True] == len(only)
    with torch.no_grad():
        assert relative(few.predict(), ours.predict()) < 1e-6
        assert 0 < relative(few.predict(), joined.predict()) < 0.02
    assert relative(flat(few.gradients()[1]), flat(ours.gradients()[1])) < 1e-6


def test_what_is_stored_dense_stays_dense(bases, tmp_path):
    dense = bases("flux") / "dense"
    only = [n for n in quantisable(loaded("flux", dense)) if not n.endswith("to_k")]
    made = adapted("flux", stored_in_nf4.store(dense, tmp_path / "few", only=only))
    made.bind(mode="nf4")
    few = [n for n, m in linears(made.denoiser) if isinstance(m, StoredNf4 | frozen.Nf4Linear)]
    keys = [m for n, m in linears(made.denoiser) if n.endswith("to_k")]
    assert keys
    assert all(type(m.base_layer) is torch.nn.Linear for m in keys)
    assert {len(m.group.members) for m in keys} == {1}
    assert set(few) <= set(only)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@FAMILIES
def test_all_that_is_dense_is_as_diffusers_loads_it(bases, name, dtype):
    few, wide = (loaded(name, bases(name) / kind, dtype=dtype) for kind in ("few", "wide"))
    stored = {n for n, m in few.named_modules() if isinstance(m, StoredNf4)}
    parts = [f"{n}.{part}" for n in stored for part in (*frozen.Nf4Linear.PARTS, "nothing")]
    found = {**dict(few.named_parameters()), **dict(few.named_buffers())}
    expected = {**dict(wide.named_parameters()), **dict(wide.named_buffers())}
    dense = {n: t for n, t in expected.items() if n.removesuffix(".weight") not in stored}
    assert found.keys() - set(parts) == dense.keys()
    for tensor, other in ((found[n], dense[n]) for n in dense):
        assert tensor.dtype == other.dtype
        assert torch.equal(tensor, other)
    assert not few.training
    told = few.config["quantization_config"]
    assert (told["quant_method"], told["bnb_4bit_quant_type"]) == ("bitsandbytes", "nf4")
    asked = [n for n in wide.config if not n.startswith("_")]
    assert {n: few.config[n] for n in asked} == {n: wide.config[n] for n in asked}


def test_a_layer_says_its_size_and_its_numbers_to_nobody(bases):
    layer = loaded("flux", bases("flux") / "few", dtype=torch.bfloat16).x_embedder
    assert layer.weight.shape == (layer.out_features, layer.in_features)
    assert (layer.weight.dtype, layer.weight.device) == (torch.bfloat16, CPU)
    assert layer.weight.isnan().all()
    assert layer.weight.untyped_storage().nbytes() == 2


def test_a_twin_for_previews_shares_what_is_stored(bases):
    made = adapted("flux", bases("flux") / "few")
    made.bind(mode="nf4")
    twin = twin_of(made.denoiser)
    held = {t.data_ptr() for t in made.denoiser.buffers()}
    assert {t.data_ptr() for t in twin.buffers()} == held
    with torch.no_grad():
        assert relative(made.predict(twin), made.predict()) < 1e-5


@pytest.mark.parametrize("operator", ["forth", "back"])
def test_operators_take_maxima_that_are_not_nested(bases, operator):
    made = loaded("flux", bases("flux", False) / "few").transformer_blocks[0].attn
    whole = prequantised.joined([made.to_q, made.to_k, made.to_v])
    assert whole.parts == ("packed", "maxima", "code")
    sides, rest = [whole.in_features, whole.out_features], (None, None)
    if operator == "back":
        sides.reverse()
    else:
        rest = (None, [], [])
    bias = [None] if operator == "forth" else []
    x = torch.ones(2, sides[0])
    asked = (x, None, "nf4", list(whole.stored), *bias, sides[1], torch.float32, *rest)
    torch.library.opcheck(
        getattr(products, operator), asked, test_utils=("test_schema", "test_faketensor")
    )


def edited(folder, made, change):
    """A copy whose tensors, all in two files with an index, were changed."""
    part = shutil.copytree(folder, made) / "transformer"
    tensors = load_file(part / stored_in_nf4.WEIGHTS)
    (part / stored_in_nf4.WEIGHTS).unlink()
    change(tensors)
    names = [f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    # Of a layer's parts some here, some there.
    split = {name: dict(sorted(tensors.items())[i::2]) for i, name in enumerate(names)}
    for name, held in split.items():
        save_file(held, part / name)
    where = {key: name for name, held in split.items() for key in held}
    index = {"metadata": {}, "weight_map": where}
    (part / f"{stored_in_nf4.WEIGHTS}.index.json").write_text(json.dumps(index))
    return made


def test_a_base_in_several_files_is_read_whole(bases, tmp_path):
    folder = bases("flux") / "few"
    parts = edited(folder, tmp_path / "base", lambda tensors: None)
    found, whole = (loaded("flux", one).state_dict() for one in (parts, folder))
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


LAYER = "transformer_blocks.0.attn.to_q.weight"
STATE = f"{LAYER}.quant_state.bitsandbytes__nf4"


def reblocked(tensors, key=STATE):
    state = json.loads(bytes(tensors[key].tolist()))
    coded = json.dumps({**state, "blocksize": 128}).encode()
    tensors[key] = torch.tensor(list(coded), dtype=torch.uint8)


CHANGES = {
    "lacks": (lambda tensors: tensors.pop(f"{LAYER}.absmax"), "lacks"),
    "has no state": (lambda tensors: tensors.pop(STATE), "other tensors"),
    "is of another size": (
        lambda tensors: tensors.update({LAYER: tensors[LAYER][:-1].clone()}),
        "other tensors: ['transformer_blocks.0.attn.to_q.weight']",
    ),
    "is unknown": (lambda tensors: tensors.update({"x": torch.zeros(1)}), "other tensors: ['x']"),
    "is absent": (lambda tensors: tensors.pop("proj_out.bias"), "['proj_out.bias']"),
    "is in other blocks": (reblocked, "blocks of (128, 256), not (64, 256)"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_what_cannot_be_read_is_refused_with_its_name(bases, tmp_path, what):
    change, why = CHANGES[what]
    folder = edited(bases("flux") / "few", tmp_path / "base", change)
    with pytest.raises(InputRefused) as refused:
        loaded("flux", folder)
    (problem,) = refused.value.problems
    assert problem.subject == f"family.base={folder}"
    assert problem.why.startswith("transformer cannot be read: ")
    assert why in problem.why


def test_any_dtype_of_storage_holds_the_same_bytes(bases, tmp_path):
    """bnb_4bit_quant_storage, which FSDP needs to be the dtype of the rest."""

    def view(tensors):
        tensors[LAYER] = tensors[LAYER].view(torch.uint8).reshape(-1).view(torch.bfloat16)[:, None]

    folder = bases("flux") / "few"
    other = loaded("flux", edited(folder, tmp_path / "base", view)).transformer_blocks[0].attn.to_q
    like = loaded("flux", folder).transformer_blocks[0].attn.to_q
    assert torch.equal(other.packed, like.packed)


def test_a_target_that_no_layer_has_is_refused_as_ever(bases):
    denoiser = loaded("flux", bases("flux") / "few")
    config = AdapterConfig(rank=4, alpha=4.0, targets=["to_q", "to_nowhere"])
    with pytest.raises(InputRefused, match="to_nowhere"):
        adapter.inject(denoiser, config, seed=0)


def test_presets_match_what_they_match_in_the_dense_base(bases):
    config = AdapterConfig(rank=4, alpha=4.0, targets=list(preset_of("flux")["targets"]))
    few, dense = (loaded("flux", bases("flux") / kind) for kind in ("few", "dense"))
    found, expected = (adapter.inject(one, config, seed=0) for one in (few, dense))
    assert found.matches == expected.matches
    for name, parameter in expected.parameters.items():
        assert torch.equal(found.parameters[name], parameter)


@pytest.fixture(scope="module")
def encoders(bases, tmp_path_factory):
    """FLUX with both encoders stored in nf4, and with those numbers dense.

    CLIP's layers have biases, nested maxima and another dtype to compute in; rows of both end
    within a block.
    """
    from transformers import CLIPTextModel, T5EncoderModel

    root, dense = tmp_path_factory.mktemp("encoders"), bases("flux") / "dense"
    clip, t5 = ({"component": part} for part in ("text_encoder", "text_encoder_2"))
    settings = {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    stored_in_nf4.store_encoder(dense, root / "clip", model_class=CLIPTextModel, **clip, **settings)
    stored_in_nf4.store_encoder(root / "clip", root / "few", model_class=T5EncoderModel, **t5)
    stored_in_nf4.widened(root / "few", root / "t5", **t5)
    stored_in_nf4.widened(root / "t5", root / "wide", **clip)
    return root


def texts(folder, dtype=torch.float32):
    flux = families.get("flux")
    encoders = flux.load_text_encoders(opened(folder), dtype=dtype, device=CPU)
    return encoders, flux.encode_captions(encoders, ["a red fox"], max_length=16)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_text_encoders_say_what_dense_ones_of_their_numbers_do(encoders, dtype):
    (few, found), (wide, expected) = (texts(encoders / kind, dtype) for kind in ("few", "wide"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)
    for one, other in ((few.clip, wide.clip), (few.t5, wide.t5)):
        dense = dict(other.named_parameters())
        held = {n: p for n, p in one.named_parameters() if n in dense}
        assert {n: p.dtype for n, p in held.items()} == {n: dense[n].dtype for n in held}
        assert not any(p.requires_grad for p in one.parameters())
        assert not any(module.training for module in one.modules())


def test_on_a_cpu_an_encoder_has_layers_of_ours_where_transformers_puts_bitsandbytes(encoders):
    from bitsandbytes.nn import Linear4bit
    from transformers import T5EncoderModel

    base, part = opened(encoders / "few"), "text_encoder_2"
    model = T5EncoderModel.from_pretrained(base.folder(part), device_map={"": "cpu"})
    theirs = {n: m for n, m in model.named_modules() if isinstance(m, Linear4bit)}
    assert theirs
    prequantised.take_over(model, base, part, dtype=torch.float32)
    ours = {n: m for n, m in model.named_modules() if isinstance(m, StoredNf4)}
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        assert layer.packed.data_ptr() == theirs[name].weight.data_ptr()
        assert layer.maxima.data_ptr() == theirs[name].weight.quant_state.absmax.data_ptr()


def test_on_a_gpu_an_encoder_keeps_the_layers_of_bitsandbytes(encoders):
    from bitsandbytes.nn import Linear4bit
    from transformers import T5EncoderModel

    class Gpu:
        """Reads as transformers does there, and what it reads lies here."""

        @staticmethod
        def from_pretrained(folder, *, device_map, **options):
            assert device_map == {"": "cuda"}
            return T5EncoderModel.from_pretrained(folder, device_map={"": "cpu"}, **options)

    options = {"dtype": torch.bfloat16, "device": "cuda"}
    model = components.load_encoder(Gpu, opened(encoders / "few"), "text_encoder_2", **options)
    kinds = Counter(type(m) for m in model.modules() if isinstance(m, torch.nn.Linear))
    assert kinds.keys() == {Linear4bit, torch.nn.Linear}
    packed = [m.weight for m in model.modules() if isinstance(m, Linear4bit)]
    assert {weight.dtype for weight in packed} == {torch.uint8}
    rest = {p.dtype for p in model.parameters() if p.is_floating_point()}
    assert rest == {torch.bfloat16}


def reblocked_query(tensors, name):
    reblocked(tensors, f"{name}.quant_state.bitsandbytes__nf4")


def dense_query(tensors, name):
    weight = stored_in_nf4.dequantised(tensors, name)
    for key in [key for key in tensors if key.startswith(name)]:
        del tensors[key]
    tensors[name] = weight


@pytest.mark.parametrize(
    ("change", "why"),
    [(reblocked_query, "blocks of (128, 256), not (64, 256)"), (dense_query, "is dense")],
)
def test_an_encoder_that_cannot_be_read_is_refused_with_its_name(encoders, tmp_path, change, why):
    base = shutil.copytree(encoders / "few", tmp_path / "base")
    file = base / "text_encoder_2" / "model.safetensors"
    tensors = load_file(file)
    change(tensors, "encoder.block.0.layer.0.SelfAttention.q.weight")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputRefused) as refused:
        texts(base)
    (problem,) = refused.value.problems
    assert problem.subject == f"family.base={base}"
    assert problem.why.startswith("text_encoder_2 cannot be read: encoder.block.0.layer.0")
    assert why in problem.why


def test_a_text_encoder_that_cannot_be_moved_is_loaded_where_it_stays(encoders, monkeypatch):
    """As bitsandbytes' layers on a GPU refuse to be."""
    from transformers import T5EncoderModel

    def refuse(self, *places):
        raise ValueError("`.to` is not supported for `4-bit` models")

    monkeypatch.setattr(T5EncoderModel, "to", refuse)
    texts(encoders / "few")
    with pytest.raises(ValueError, match="not supported"):
        texts(encoders / "wide")


@pytest.mark.parametrize("part", ["text_encoder_2", "transformer"])
def test_a_component_in_few_bits_is_another_than_the_dense_one(bases, encoders, part, tmp_path):
    few = encoders / "few" if part == "text_encoder_2" else bases("flux") / "few"
    known = opened(few).identity(part)
    assert known != opened(bases("flux") / "dense").identity(part)
    shutil.copytree(few, tmp_path / "base")
    assert opened(tmp_path / "base").identity(part) == known
    config = tmp_path / "base" / part / "config.json"
    config.write_text(config.read_text().replace('"nf4"', '"fp4"'))
    assert opened(tmp_path / "base").identity(part) != known


@pytest.mark.parametrize("name", ["krea2", "qwen_image"])
def test_it_computes_what_it_computes_as_diffusers_loads_it(bases, name, tmp_path, monkeypatch):
    """diffusers asks for a GPU first; bitsandbytes' own layers compute on a CPU as well."""
    from diffusers.quantizers.bitsandbytes.bnb_quantizer import BnB4BitDiffusersQuantizer

    stored_in_nf4.compute_alike(monkeypatch)
    made = adapted(name, bases(name) / "few")
    config = shutil.copytree(bases(name) / "few", tmp_path / "base") / "transformer" / "config.json"
    config.write_text(config.read_text().replace('"bfloat16"', '"float32"'))
    monkeypatch.setattr(BnB4BitDiffusersQuantizer, "validate_environment", lambda *_, **__: None)
    theirs = type(made.denoiser).from_pretrained(
        config.parent, torch_dtype=torch.float32, device_map={"": "cpu"}, use_safetensors=True
    )
    made.denoiser.disable_adapters()
    with torch.no_grad():
        assert relative(made.predict(), made.predict(theirs)) < 1e-5


# torch's own: its compiler makes an instance of each Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_stored_layer_is_compiled_whole(bases):
    layer = loaded("flux", bases("flux") / "few").transformer_blocks[0].norm1.linear
    x = torch.ones(3, layer.in_features)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    torch._dynamo.reset()

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from hypothesis import given
from hypothesis import strategies as st

from lib import adapter
from lib.errors import InputRefused
from lib.families import flux
from lib.schema import AdapterConfig
from tests.unit.bound import storages

CONFIG = AdapterConfig(rank=4, alpha=8.0, targets=["to_q", "to_out.0", "ff.net.2"])


def denoiser(dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = FluxTransformer2DModel(**flux.TINY["transformer"])
    return model.requires_grad_(False).eval().to(dtype)


def injected(config=CONFIG, *, seed=0, dtype=torch.float32):
    return adapter.inject(denoiser(dtype), config, seed=seed).parameters


def test_b_is_zero_and_a_normal_with_std_one_over_rank():
    parameters = injected(AdapterConfig(rank=16, alpha=1.0, targets=["to_q", "to_k", "to_v"]))
    downs = [p.detach().flatten() for name, p in parameters.items() if "lora_A" in name]
    ups = [p for name, p in parameters.items() if "lora_B" in name]
    numbers = torch.cat(downs)
    assert len(downs) == len(ups) > 0
    assert not any(bool(up.any()) for up in ups)
    assert float(numbers.std()) == pytest.approx(1 / 16, rel=0.05)
    assert abs(float(numbers.mean())) < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_adapter_is_float32_and_alone_learns(dtype):
    model = denoiser(dtype)
    parameters = adapter.inject(model, CONFIG, seed=0).parameters
    assert {p.dtype for p in parameters.values()} == {torch.float32}
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning == set(parameters)
    assert {p.dtype for n, p in model.named_parameters() if n not in parameters} == {dtype}


def test_a_fresh_adapter_changes_nothing():
    plain, adapted = denoiser(), denoiser()
    adapter.inject(adapted, CONFIG, seed=0)
    inputs = torch.randn(2, 32, generator=torch.Generator().manual_seed(1))
    layer = "transformer_blocks.0.attn.to_q"
    assert torch.equal(plain.get_submodule(layer)(inputs), adapted.get_submodule(layer)(inputs))


def test_a_module_s_numbers_depend_on_its_name_and_the_seed_alone():
    few = injected(AdapterConfig(rank=4, targets=["to_q"]))
    many = injected(AdapterConfig(rank=4, targets=["ff.net.2", "to_v", "to_q"]))
    other = injected(AdapterConfig(rank=4, targets=["to_q"]), seed=1)
    assert few.keys() < many.keys()
    for name, parameter in few.items():
        assert torch.equal(parameter, many[name])
        assert torch.equal(parameter, other[name]) == ("lora_B" in name)
    downs = [p for name, p in many.items() if "lora_A" in name and p.shape == (4, 32)]
    assert len({tuple(p.flatten().tolist()) for p in downs}) == len(downs) > 2


def test_torch_s_own_generator_is_neither_read_nor_moved():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = injected()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    other = injected()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_all_values_go_at_once_to_where_the_denoiser_is(device):
    found = adapter.inject(denoiser().to(device), CONFIG, seed=0).parameters
    assert {parameter.device.type for parameter in found.values()} == {device}
    assert {parameter.dtype for parameter in found.values()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in found.values())
    if device == "cpu":
        assert len(found) > len(storages(found.values())) == 1


def test_every_target_s_matches_are_counted():
    found = adapter.inject(denoiser(), CONFIG, seed=0)
    modules = [n for n, m in denoiser().named_modules() if isinstance(m, torch.nn.Linear)]
    assert found.matches.keys() == set(CONFIG.targets)
    assert all(count > 0 for count in found.matches.values())
    wrapped = {name.split(".lora_")[0] for name in found.parameters}
    assert sum(found.matches.values()) == len(wrapped)
    assert wrapped <= set(modules)


@given(st.lists(st.sampled_from(["to_q", "a.to_q", "b.a.to_q", "not_to_q", "a.to_q.b"])))
def test_a_target_names_a_whole_module_or_its_dotted_ending(names):
    found = adapter.target_matches(names, ["to_q", "a.to_q"])
    assert found["to_q"] == sum(name in ("to_q", "a.to_q", "b.a.to_q") for name in names)
    assert found["a.to_q"] == sum(name in ("a.to_q", "b.a.to_q") for name in names)


def test_targets_that_match_nothing_are_all_refused_with_the_names_there_are():
    config = AdapterConfig(rank=4, targets=["to_q", "to_x", "attn", "norm_q"])
    with pytest.raises(InputRefused) as caught:
        adapter.inject(denoiser(), config, seed=0)
    assert [problem.subject for problem in caught.value.problems] == [
        "adapter.targets=attn",
        "adapter.targets=norm_q",
        "adapter.targets=to_x",
    ]
    near = caught.value.problems[0].allowed.split(", ")
    assert {"to_q", "to_k", "to_add_out", "proj_mlp"} <= set(near)
    assert near == sorted(set(near))


def test_saved_tensors_come_back_into_a_fresh_adapter():
    model = denoiser()
    parameters = adapter.inject(model, CONFIG, seed=0).parameters
    with torch.no_grad():
        for number, parameter in enumerate(parameters.values()):
            parameter.fill_(number + 0.5)
    saved = {name: tensor.clone() for name, tensor in adapter.state_dict(model).items()}
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in saved)
    fresh = denoiser()
    blank = adapter.inject(fresh, CONFIG, seed=9).parameters
    adapter.load_state_dict(blank, saved)
    assert {n: t.tolist() for n, t in adapter.state_dict(fresh).items()} == {
        n: t.tolist() for n, t in saved.items()
    }
    assert all(torch.equal(blank[name], parameters[name]) for name in parameters)


@pytest.mark.parametrize("change", ["missing", "extra"])
def test_a_state_of_other_modules_is_refused(change):
    model = denoiser()
    parameters = adapter.inject(model, CONFIG, seed=0).parameters
    state = adapter.state_dict(model)
    name = next(iter(state))
    tensor = state.pop(name)
    if change == "extra":
        state |= {name: tensor, "other.lora_A.weight": tensor}
    with pytest.raises(ValueError, match="adapter keys differ"):
        adapter.load_state_dict(parameters, state)


def test_an_adapter_is_untrained_while_every_b_is_zero():
    model = denoiser()
    parameters = adapter.inject(model, CONFIG, seed=0).parameters
    assert adapter.is_untrained(adapter.state_dict(model))
    last = [p for name, p in parameters.items() if "lora_B" in name][-1]
    with torch.no_grad():
        last[0, 0] = 1e-30
    assert not adapter.is_untrained(adapter.state_dict(model))


def test_alpha_over_rank_scales_the_adapter_and_dropout_is_passed_on():
    config = adapter.peft_config(AdapterConfig(rank=4, alpha=2.5, targets=["to_q"], dropout=0.1))
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 2.5, 0.1)
    model = denoiser()
    adapter.inject(model, AdapterConfig(rank=4, alpha=2.5, targets=["to_q"]), seed=0)
    layer = model.get_submodule("transformer_blocks.0.attn.to_q")
    assert layer.scaling["default"] == 2.5 / 4


RANKS = {"to_q": 2, "single_transformer_blocks.*.attn.to_k": 12, "ff.net.2": 4}
WIDE = {"rank": 8, "targets": ["to_q", "to_k", "to_out.0", "ff.net.2"], "rank_pattern": RANKS}


def rank_of(module, config):
    """The rank that a module should have, by its name as written out here."""
    if module.endswith("to_q"):
        return 2
    if module.startswith("single_transformer_blocks.") and module.endswith(".attn.to_k"):
        return 12
    return 4 if module.endswith("ff.net.2") else config.rank


def filled(model):
    """The adapter's tensors by module, once they hold numbers other than zero."""
    source = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters_of(model).values():
            parameter.copy_(torch.randn(parameter.shape, generator=source) / 8)
    pairs = {}
    for name, tensor in adapter.state_dict(model).items():
        module, _, which = name.partition(".lora_")
        pairs.setdefault(module, {})[which[0]] = tensor
    return pairs


def deltas(model, base):
    """What merging adds to each weight."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "merge"):
            module.merge()
            found[name] = module.base_layer.weight.detach() - base.get_submodule(name).weight
    return found


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("alpha", [8.0, 16.0, 3.0])
@pytest.mark.parametrize("pattern", [{}, RANKS])
def test_every_module_s_output_has_one_scale_whatever_its_rank(rslora, alpha, pattern):
    config = AdapterConfig(**{**WIDE, "rank_pattern": pattern}, alpha=alpha, rslora=rslora)
    model = denoiser()
    adapter.inject(model, config, seed=0)
    pairs, expected = filled(model), alpha / (8**0.5 if rslora else 8)
    added = deltas(model, denoiser())
    assert added.keys() == pairs.keys()
    for module, delta in added.items():
        product = pairs[module]["B"] @ pairs[module]["A"]
        scale = float((delta * product).sum() / product.square().sum())
        assert scale == pytest.approx(expected, rel=1e-4), module
        assert torch.allclose(delta, expected * product, atol=1e-5)


def test_a_pattern_gives_the_modules_it_names_their_rank_and_no_others():
    config = AdapterConfig(**WIDE, alpha=8.0)
    model = denoiser()
    found = adapter.inject(model, config, seed=0)
    pairs = filled(model)
    ranks = {module: pair["A"].shape[0] for module, pair in pairs.items()}
    assert ranks == {module: rank_of(module, config) for module in pairs}
    assert set(ranks.values()) == {2, 4, 8, 12}
    assert all(pair["B"].shape[1] == ranks[module] for module, pair in pairs.items())
    counts = [sum(rank == given for rank in ranks.values()) for given in RANKS.values()]
    assert [*found.patterns] == [*RANKS]
    assert [*found.patterns.values()] == counts
    assert found.matches.keys() == set(config.targets)


def test_a_has_a_std_of_one_over_its_own_rank():
    config = AdapterConfig(rank=4, targets=["to_q", "to_k"], rank_pattern={"to_q": 16})
    parameters = injected(config)
    for leaf, rank in (("to_q", 16), ("to_k", 4)):
        downs = [p.detach().flatten() for n, p in parameters.items() if f"{leaf}.lora_A" in n]
        assert float(torch.cat(downs).std()) == pytest.approx(1 / rank, rel=0.1)


def test_a_rank_pattern_leaves_the_numbers_of_other_modules_alone():
    plain = injected(AdapterConfig(rank=4, targets=["to_q", "to_k"]))
    ranked = injected(AdapterConfig(rank=4, targets=["to_q", "to_k"], rank_pattern={"to_q": 2}))
    assert plain.keys() == ranked.keys()
    for name, parameter in plain.items():
        assert torch.equal(parameter, ranked[name]) == (".to_q." not in name)


def test_patterns_that_match_nothing_are_refused_beside_the_targets_that_do_not():
    pattern = {"to_v": 2, "q": 2, "to_q": 2}
    config = AdapterConfig(rank=4, targets=["to_q", "to_x"], rank_pattern=pattern)
    with pytest.raises(InputRefused) as caught:
        adapter.inject(denoiser(), config, seed=0)
    problems = {problem.subject: problem for problem in caught.value.problems}
    assert problems.keys() == {
        "adapter.rank_pattern=q",
        "adapter.rank_pattern=to_v",
        "adapter.targets=to_x",
    }
    assert problems["adapter.rank_pattern=to_v"].allowed == "to_q"


def test_two_ranks_for_one_module_are_refused_and_one_told_twice_is_not():
    def inject(pattern):
        config = AdapterConfig(rank=4, targets=["to_q", "to_k"], rank_pattern=pattern)
        return adapter.inject(denoiser(), config, seed=0)

    with pytest.raises(InputRefused) as caught:
        inject({"to_q": 2, "transformer_blocks.*.attn.to_q": 8, "to_k": 8})
    subjects = [problem.subject for problem in caught.value.problems]
    assert subjects == ["adapter.rank_pattern=to_q:2, transformer_blocks.*.attn.to_q:8"]
    inject({"to_q": 2, "transformer_blocks.*.attn.to_q": 2})


@pytest.mark.parametrize("change", [{"rslora": True}, {"rank_pattern": RANKS}])
def test_peft_s_description_in_a_file_adds_the_same_in_diffusers_own_pipeline(change, tmp_path):
    config = AdapterConfig(**{"rank": 8, "targets": WIDE["targets"], "alpha": 16.0, **change})
    model, base = denoiser(), denoiser()
    adapter.inject(model, config, seed=0)
    filled(model)
    described = adapter.peft_config(config).to_dict()
    FluxPipeline.save_lora_weights(
        str(tmp_path),
        transformer_lora_layers=adapter.state_dict(model),
        transformer_lora_adapter_metadata={
            name: sorted(value) if isinstance(value, set) else value
            for name, value in described.items()
        },
    )
    theirs = denoiser()
    state, *_, metadata = FluxPipeline.lora_state_dict(
        str(tmp_path), weight_name=LORA_WEIGHT_NAME_SAFE, return_lora_metadata=True
    )
    FluxPipeline.load_lora_into_transformer(state, None, theirs, metadata=metadata)
    ours, loaded = deltas(model, base), deltas(theirs, base)
    assert ours.keys() == loaded.keys()
    assert all(torch.allclose(ours[name], loaded[name], atol=1e-6) for name in ours)
    assert max(float(delta.abs().max()) for delta in ours.values()) > 0.01

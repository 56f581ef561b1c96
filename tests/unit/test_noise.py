import pytest
import torch

from lib.errors import InputRefused
from lib.noise import DDPM, Flow
from lib.random import normal
from lib.schema import ObjectiveConfig, TimestepsConfig
from lib.timesteps import draw_sigma

SHAPE = (3, 4, 2, 6)
FLOW = Flow({})
SDXL = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
}
BASES = {
    "noise": SDXL,
    "velocity": {**SDXL, "prediction_type": "v_prediction"},
    "velocity, no signal at the last step": {
        **SDXL,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
    },
}
EVERY = torch.arange(1000, dtype=torch.float32)
MIN_SNR = ObjectiveConfig(weighting="min_snr", snr_gamma=5.0)


@pytest.fixture
def pair():
    """Latents and noise."""
    return tuple(
        torch.from_numpy(normal(SHAPE, seed=0, stream="noise", counter=0, sample_id=name))
        for name in ("latents", "noise")
    )


@pytest.fixture(params=BASES)
def ddpm(request):
    return DDPM.of(BASES[request.param])


def kept(base):
    """The share of the signal's variance at each step, from the published definition."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler.from_config(base)
    return scheduler.alphas_cumprod


def test_at_sigma_zero_there_are_the_latents_and_at_one_the_noise(pair):
    latents, noise = pair
    assert torch.equal(FLOW.add_noise(latents, noise, torch.zeros(3)), latents)
    assert torch.equal(FLOW.add_noise(latents, noise, torch.ones(3)), noise)


def test_the_target_is_the_derivative_of_the_mixture_by_sigma(pair):
    latents, noise = pair
    low, high = torch.tensor([0.1, 0.4, 0.7]), torch.tensor([0.35, 0.65, 0.95])
    rise = FLOW.add_noise(latents, noise, high) - FLOW.add_noise(latents, noise, low)
    found = FLOW.target(latents, noise, low)
    assert torch.allclose(rise / (high - low).view(-1, 1, 1, 1), found, atol=1e-5)


@pytest.mark.parametrize("process", [FLOW, *map(DDPM.of, BASES.values())])
def test_each_sample_has_its_own_level(pair, process):
    latents, noise = pair
    level = torch.tensor([0.0, 0.25, 1.0]) if process is FLOW else torch.tensor([0.0, 250.0, 999.0])
    for function in (process.add_noise, process.target):
        together = function(latents, noise, level)
        for row in range(3):
            one = slice(row, row + 1)
            assert torch.equal(together[one], function(latents[one], noise[one], level[one]))


def test_a_flows_mixture_is_linear_in_sigma(pair):
    latents, noise = pair
    mixed = FLOW.add_noise(latents, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert torch.allclose(mixed[1], 0.75 * latents[1] + 0.25 * noise[1])


def test_the_mixture_along_the_target_leads_back_to_the_latents(pair):
    latents, noise = pair
    level = torch.tensor([0.2, 0.5, 0.9])
    noisy, target = (f(latents, noise, level) for f in (FLOW.add_noise, FLOW.target))
    assert torch.allclose(noisy - level.view(-1, 1, 1, 1) * target, latents, atol=1e-6)


def test_half_precision_is_refused_where_the_mathematics_is_float32(pair):
    latents, noise = pair
    with pytest.raises(Exception, match=r"noise\.py|Float32"):
        FLOW.add_noise(latents.bfloat16(), noise.bfloat16(), torch.zeros(3))


def test_a_level_is_a_sigma_of_the_settings():
    where = {"seed": 3, "counter": 8, "sample_id": "a"}
    settings = TimestepsConfig(shift=3.0)
    assert FLOW.draw_level(settings, tokens=9, **where) == draw_sigma(settings, **where)


def test_a_bell_weighs_the_middle_most_and_one_on_average():
    levels = (torch.arange(1000, dtype=torch.float32) + 1) / 1000
    weights = FLOW.loss_weight(levels, ObjectiveConfig(weighting="bell"))
    assert abs(float(weights.mean()) - 1) < 1e-3
    assert float(levels[weights.argmax()]) == 0.5
    assert float(weights.min()) >= 0


@pytest.mark.parametrize("process", [FLOW, *map(DDPM.of, BASES.values())])
def test_without_a_weighting_every_level_counts_the_same(process):
    level = torch.tensor([0.5, 1.0]) if process is FLOW else EVERY
    weights = process.loss_weight(level, ObjectiveConfig(weighting="none"))
    assert torch.equal(weights, torch.ones_like(level))


@pytest.mark.parametrize("name", BASES)
def test_ddpm_mixes_and_aims_as_published(pair, name):
    latents, noise = pair
    level = torch.tensor([3.0, 500.0, 999.0])
    signal = kept(BASES[name])[level.long()].view(-1, 1, 1, 1)
    process = DDPM.of(BASES[name])
    mixed = signal.sqrt() * latents + (1 - signal).sqrt() * noise
    aim = noise if name == "noise" else signal.sqrt() * noise - (1 - signal).sqrt() * latents
    torch.testing.assert_close(process.add_noise(latents, noise, level), mixed)
    torch.testing.assert_close(process.target(latents, noise, level), aim)


def test_ddpm_has_the_bases_betas_and_not_a_bare_schedulers(pair):
    level = torch.tensor([100.0, 500.0, 900.0])
    bare = DDPM.of({"prediction_type": "epsilon"})
    noisy, other = (process.add_noise(*pair, level) for process in (DDPM.of(SDXL), bare))
    assert (noisy - other).abs().max() > 0.1
    assert DDPM.of(SDXL).identity != bare.identity


def test_what_a_base_leaves_out_is_in_its_identity_as_if_it_were_written():
    written = {**SDXL, "rescale_betas_zero_snr": False, "num_train_timesteps": 1000}
    assert DDPM.of(SDXL).identity == DDPM.of(written).identity


@pytest.mark.parametrize("changed", [{"trained_betas": [0.01] * 1000}, {"beta_end": 0.02}])
def test_other_betas_are_another_identity(changed):
    assert DDPM.of({**SDXL, **changed}).identity != DDPM.of(SDXL).identity


@pytest.mark.parametrize("name", BASES)
def test_min_snr_weights_are_those_of_the_public_formulae(name):
    from diffusers import DDPMScheduler
    from diffusers.training_utils import compute_snr

    snr = compute_snr(DDPMScheduler.from_config(BASES[name]), EVERY.long())
    least = torch.stack([snr, 5.0 * torch.ones_like(snr)], dim=1).min(dim=1)[0]
    expected = least / snr if name == "noise" else least / (snr + 1)
    found = DDPM.of(BASES[name]).loss_weight(EVERY, MIN_SNR)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr"),
        ({"prediction_type": "sample"}, "prediction_type"),
        ({"num_train_timesteps": 100}, "num_train_timesteps"),
    ],
    ids=["noise without signal at the last step", "another target", "other steps"],
)
def test_a_scheduler_that_would_train_to_nothing_is_refused_by_name(changed, word):
    with pytest.raises(InputRefused, match=word):
        DDPM.of({**SDXL, **changed})


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_a_samplers_latents_reach_the_denoiser_as_it_was_trained(pair):
    from diffusers import EulerDiscreteScheduler

    latents, noise = pair
    scheduler = EulerDiscreteScheduler.from_config({**SDXL, "timestep_spacing": "linspace"})
    process = DDPM.of(SDXL)
    for step in (0.0, 400.0, 999.0):
        [place] = (scheduler.timesteps == step).nonzero().flatten().tolist()
        sigma = scheduler.sigmas[place]
        seen = process.denoiser_input(latents + sigma * noise, sigma)
        trained = process.add_noise(latents, noise, torch.full((3,), step))
        torch.testing.assert_close(seen, trained, rtol=1e-4, atol=1e-5)


def test_a_perfect_prediction_leads_a_sampler_straight_along_the_noise(pair, ddpm):
    latents, noise = pair
    for step in (10.0, 400.0, 900.0):
        level = torch.full((3,), step)
        clean, mixed = (
            ddpm.add_noise(torch.ones(1, 1, 1, 1), torch.full((1, 1, 1, 1), given), level[:1])
            for given in (0.0, 1.0)
        )
        sigma = ((mixed - clean) / clean).squeeze()
        found = ddpm.derivative(latents + sigma * noise, ddpm.target(latents, noise, level), sigma)
        torch.testing.assert_close(found, noise, rtol=1e-3, atol=1e-3)


def test_ddpm_levels_are_whole_steps_and_a_larger_mean_is_noisier(ddpm):
    def levels(mean):
        settings = TimestepsConfig(mean=mean)
        return [
            ddpm.draw_level(settings, tokens=9, seed=0, counter=counter, sample_id="a")
            for counter in range(200)
        ]

    usual, noisier = levels(0.0), levels(1.0)
    assert all(level == int(level) and 0 <= level <= 999 for level in usual)
    assert sum(noisier) > sum(usual)


def test_places_are_spread_over_all_steps(ddpm):
    places = [(step + 1) / 1000 for step in range(1000)]
    levels = [ddpm.level_at(place, settings=TimestepsConfig(), tokens=9) for place in places]
    assert levels == list(range(1000))
    assert [ddpm.noisiness(level) for level in levels] == pytest.approx(places)

import pytest
import torch

from lib.noise import FLOW
from lib.schema import TimestepsConfig
from lib.timesteps import draw_sigma

SHAPE = (3, 4, 2, 6)


@pytest.fixture
def pair():
    source = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=source), torch.randn(SHAPE, generator=source)


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


def test_each_sample_has_its_own_sigma(pair):
    latents, noise = pair
    level = torch.tensor([0.0, 0.25, 1.0])
    together = FLOW.add_noise(latents, noise, level)
    for row in range(3):
        one = slice(row, row + 1)
        assert torch.equal(together[one], FLOW.add_noise(latents[one], noise[one], level[one]))
    assert torch.allclose(together[1], 0.75 * latents[1] + 0.25 * noise[1])


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
    assert FLOW.draw_level(settings, **where) == draw_sigma(settings, **where)

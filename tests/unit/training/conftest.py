"""A toy family and denoiser that train in milliseconds."""

import pytest
import torch

from lib.batches import Batch, StepBatches
from lib.family import Conditioning
from lib.optimizers import make_optimizer
from lib.schema import OptimizerConfig
from lib.training.step import Trainer


@pytest.fixture
def make_trainer(fake_family):
    """Makes a trainer of one linear layer over 8 features, weights drawn from a fixed seed."""

    def predict(denoiser, noisy, level, *, conditioning, guidance):
        features = noisy.flatten(1) * (1 + level[:, None]) + conditioning["text_embeds"]
        return denoiser(features).view(noisy.shape)

    def make(
        *, lr=0.01, max_grad_norm=0.0, dropout=0.0, seed=0, autocast_dtype=None, optimizer="adamw"
    ):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            denoiser = torch.nn.Sequential(torch.nn.Dropout(dropout), torch.nn.Linear(8, 8))
        parameters = dict(denoiser.named_parameters())
        return Trainer(
            family=fake_family(predict=predict),
            denoiser=denoiser.train(),
            parameters=parameters,
            optimizer=make_optimizer(parameters.values(), OptimizerConfig(name=optimizer, lr=lr)),
            device=torch.device("cpu"),
            autocast_dtype=autocast_dtype,
            max_grad_norm=max_grad_norm,
            seed=seed,
            dropout=dropout,
        )

    return make


@pytest.fixture
def make_step():
    """Makes a step of six samples cut into micro-batches, each short one filled at weight 0."""

    def make(number=0, *, micro_batch=6, scale=1.0):
        source = torch.Generator().manual_seed(number)
        noisy, target = (torch.randn(6, 2, 2, 2, generator=source) * scale for _ in range(2))
        level, text = torch.rand(6, generator=source), torch.randn(6, 8, generator=source)
        batches = []
        for start in range(0, 6, micro_batch):
            rows = list(range(start, min(start + micro_batch, 6)))
            weights = [1.0] * len(rows) + [0.0] * (micro_batch - len(rows))
            rows += [start] * (micro_batch - len(rows))
            batches.append(
                Batch(
                    noisy=noisy[rows],
                    target=target[rows],
                    level=level[rows],
                    weights=torch.tensor(weights),
                    loss_weights=torch.ones(micro_batch),
                    conditioning=Conditioning({"text_embeds": text[rows]}),
                    names=tuple(f"{row}.png" for row in rows),
                )
            )
        numbers = tuple(range(len(batches)))
        return StepBatches(number, tuple(batches), numbers, num_samples=6)

    return make

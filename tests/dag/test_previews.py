"""Grids drawn while a run trains: what they show, and that the run does not notice."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

ASKED = ("sample.every=2", "sample.steps=2", "sample.prompts=[a fox, a red key]")


def folder_of(manifest, root):
    from lib import runs

    found = runs.completed(root / "store", manifest.key)
    assert found is not None
    return found


def test_a_grid_is_drawn_at_every_step_asked_for_and_told(ensure, seen, tmp_path):
    folder = folder_of(ensure("train", *ASKED), tmp_path)
    names = [f"step-{step:06d}.png" for step in (2, 4, 6)]
    assert sorted(path.name for path in folder.glob("samples/*")) == names
    told = [e.data for e in seen if e.kind == "picture"]
    assert [(data["step"], Path(data["file"]).name) for data in told] == list(
        zip((2, 4, 6), names, strict=True)
    )
    pictures = [(folder / "samples" / name).read_bytes() for name in names]
    assert len(set(pictures)) == 3


def test_drawing_moves_no_bit_of_the_adapter(ensure, results_of, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    drawn = ensure("train", *ASKED, "adapter.dropout=0.2", root=one)
    plain = ensure("train", *ASKED[1:], "adapter.dropout=0.2", root=two)
    assert drawn.key == plain.key
    assert results_of(drawn, one) == results_of(plain, two)


def test_the_last_grid_shows_what_the_sample_stage_shows(ensure, tmp_path):
    manifest = ensure("sample", *ASKED)
    folder = folder_of(ensure("train", *ASKED), tmp_path)
    with (
        Image.open(manifest.payload["files"]["grid"]["file"]) as grid,
        Image.open(folder / "samples" / "step-000006.png") as preview,
    ):
        column = grid.width - preview.width  # the base's, which a preview has not
        same = np.asarray(grid.crop((column, 0, grid.width, grid.height))).astype(int)
        assert np.abs(same - np.asarray(preview))[20:150].max() <= 1


class Denoiser(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.lora_A = torch.nn.Parameter(torch.zeros(4))


@pytest.fixture
def toy():
    """A trainer and a sampler that draws nothing until it may, keeping which adapter it drew."""
    from lib.drawing import Sampler
    from lib.families import flux
    from lib.optimizers import make_optimizer
    from lib.schema import OptimizerConfig
    from lib.training.step import Trainer

    class Waiting(Sampler):
        def __init__(self):
            vars(self).update(may_go=threading.Event(), drawn=[], fails=False)

        def load_autoencoder(self):
            return None

        def column(self, denoiser, *, each_step):
            while not self.may_go.wait(0.01):
                each_step()
            self.drawn.append(float(denoiser.lora_A.detach()[0]))
            yield torch.zeros(1)

        def decode(self, autoencoder, latents):
            if self.fails:
                raise ValueError("a fault of ours")
            return Image.new("RGB", (8, 8))

        def grid(self, columns):
            return Image.new("RGB", (8, 8))

    denoiser = Denoiser()
    trainer = Trainer(
        family=flux,
        denoiser=denoiser,
        parameters={"lora_A": denoiser.lora_A},
        optimizer=make_optimizer([denoiser.lora_A], OptimizerConfig()),
        device=torch.device("cpu"),
        autocast_dtype=None,
        max_grad_norm=0.0,
        seed=0,
        dropout=0.0,
    )
    return trainer, Waiting()


def previews_of(toy, folder, events):
    from lib.training.previews import Previews

    return Previews(*toy, folder=folder, events=events)


def test_the_twin_shares_the_base_and_has_an_adapter_of_its_own(toy):
    from lib.training.previews import twin_of

    denoiser = toy[0].denoiser
    twin = twin_of(denoiser)
    assert twin.frozen.data_ptr() == denoiser.frozen.data_ptr()
    assert twin.lora_A.data_ptr() != denoiser.lora_A.data_ptr()


def test_a_grid_shows_the_adapter_as_it_was_when_asked_for(toy, tmp_path):
    from lib.events import Events

    trainer, sampler = toy
    previews = previews_of(toy, tmp_path, Events())
    for step in (1, 2, 3):
        torch.nn.init.constant_(trainer.denoiser.lora_A, step)
        previews.ask(step)
    torch.nn.init.constant_(trainer.denoiser.lora_A, 9)
    sampler.may_go.set()
    previews.finish()
    previews.close()
    assert sampler.drawn == [1, 2, 3]


def test_a_run_that_ends_early_leaves_what_is_not_drawn(toy, tmp_path):
    from lib.events import Events

    previews = previews_of(toy, tmp_path, Events())
    previews.ask(1)
    previews.ask(2)
    previews.close()
    assert toy[1].drawn == []
    assert list(tmp_path.iterdir()) == []


def test_too_many_grids_at_once_make_the_step_wait_and_say_so(toy, tmp_path):
    from lib.events import Events
    from lib.training.previews import MOST_WAITING

    seen = []
    previews = previews_of(toy, tmp_path, Events(sinks=(seen.append,)))
    for step in range(MOST_WAITING):
        previews.ask(step)
    threading.Timer(0.2, toy[1].may_go.set).start()
    previews.ask(MOST_WAITING)
    previews.finish()
    previews.close()
    assert any("waits" in e.data["text"] for e in seen if e.kind == "warning")
    assert len(toy[1].drawn) == MOST_WAITING + 1


def test_a_fault_while_drawing_is_raised_at_the_next_grid(toy, tmp_path):
    from lib.events import Events

    vars(toy[1])["fails"] = True
    toy[1].may_go.set()
    previews = previews_of(toy, tmp_path, Events())
    previews.ask(1)
    with pytest.raises(ValueError, match="a fault of ours"):
        previews.finish()
    previews.close()

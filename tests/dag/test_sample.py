"""The grid: base | adapter | EMA from one noise, and text embeddings from the store."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SIDE, ZOOM = 64, 2  # a small picture is enlarged in the grid


def cells(path: Path, columns: int) -> list[list[np.ndarray]]:
    """The pictures of a grid, by row and column, in their own size."""
    from lib.pictures import LINE, MARGIN

    with Image.open(path) as picture:
        image = np.asarray(picture)
    side, top = SIDE * ZOOM, LINE + MARGIN
    down = side + LINE + 2 * MARGIN
    rows = (image.shape[0] - top) // down
    across = [MARGIN + (side + MARGIN) * column for column in range(columns)]
    return [
        [image[top + down * row :, left:][:side:ZOOM, :side:ZOOM] for left in across]
        for row in range(rows)
    ]


def test_the_grid_has_a_row_a_prompt_and_three_columns_that_differ(ensure):
    manifest = ensure("sample", "sample.steps=2", "sample.prompts=[a fox, a red key, a boat]")
    drawn = cells(Path(manifest.payload["files"]["grid"]["file"]), 3)
    assert len(drawn) == 3
    for base, adapter, average in drawn:
        assert not np.array_equal(base, adapter)
        assert not np.array_equal(adapter, average)
    assert not np.array_equal(drawn[0][0], drawn[1][0])


def test_without_an_average_there_are_two_columns(ensure):
    manifest = ensure("sample", "sample.steps=1", "trainer.ema_decay=0")
    with Image.open(manifest.payload["files"]["grid"]["file"]) as image:
        assert image.width == 8 + 2 * (SIDE * ZOOM + 8)


def test_a_warm_grid_loads_no_text_encoder_and_a_second_one_nothing(
    ensure, counted, seen, monkeypatch
):
    overrides = ("sample.steps=1", "sample.prompts=[a fox]")
    ensure("encode_captions", *overrides)
    encoded = counted["captions"]
    ensure("sample", *overrides)
    assert counted["captions"] == encoded
    from diffusers import AutoencoderKL, FluxTransformer2DModel

    def refuse(self, *args, **kwargs):
        raise AssertionError("a model was built")

    monkeypatch.setattr(AutoencoderKL, "__init__", refuse)
    monkeypatch.setattr(FluxTransformer2DModel, "__init__", refuse)
    ensure("sample", *overrides)
    assert [e.data["status"] for e in seen if e.stage == "sample"] == ["hit"]


def test_another_prompt_trains_nothing_again_and_encodes_one_text(ensure, counted, seen):
    ensure("sample", "sample.steps=1", "sample.prompts=[a fox]")
    encoded = counted["captions"]
    ensure("sample", "sample.steps=1", "sample.prompts=[a fox, a crab]")
    assert counted["captions"] == encoded + 1
    status = {e.stage: e.data["status"] for e in seen if e.kind == "phase"}
    assert (status["train"], status["export"], status["sample"]) == ("hit", "hit", "done")


def test_the_same_seed_draws_the_same_picture_and_another_does_not(ensure, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    files = [
        ensure("sample", "sample.steps=2", f"sample.seed={seed}", root=root).payload["files"][
            "grid"
        ]["file"]
        for root, seed in ((one, 3), (two, 3), (two, 4))
    ]
    first, second, third = (Path(file).read_bytes() for file in files)
    assert first == second
    assert first != third


def test_each_prompt_is_drawn_with_as_many_seeds_as_asked(ensure):
    overrides = ("sample.steps=1", "sample.prompts=[a fox]", "sample.seed=3")
    three = ensure("sample", *overrides, "sample.num_seeds=3").payload["files"]["grid"]["file"]
    one = ensure("sample", "sample.steps=1", "sample.prompts=[a fox]", "sample.seed=4")
    with Image.open(three) as image:
        strip = np.asarray(image)[23:, 8:][: SIDE * ZOOM : ZOOM, : 3 * SIDE * ZOOM : ZOOM]
    drawn = [strip[:, SIDE * n : SIDE * (n + 1)].astype(int) for n in range(3)]
    alone = cells(Path(one.payload["files"]["grid"]["file"]), 1)[0][0].astype(int)
    assert not np.array_equal(drawn[0], drawn[1])
    assert np.abs(drawn[1] - alone).max() <= 1


def test_a_prompt_of_a_held_out_picture_is_shown_beside_that_picture(ensure, data):
    prepared = ensure("prepare_dataset", "validation.fraction=0.4").payload
    shown = next(s for s in prepared["held_out"] if s["height"] == s["width"])
    prompts = f"sample.prompts=['{shown['caption']}', something else]"
    manifest = ensure("sample", "sample.steps=1", "validation.fraction=0.4", prompts)
    (_, _, _, target), (*_, nothing) = cells(Path(manifest.payload["files"]["grid"]["file"]), 4)
    with Image.open(data / shown["name"]) as image:
        true = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    assert np.abs(target.astype(int) - true).max() <= 1
    assert (nothing == 255).all()


def test_held_out_captions_are_drawn_unless_prompts_are_given(ensure):
    manifest = ensure("sample", "sample.steps=1", "validation.fraction=0.4")
    assert all(manifest.inputs["targets"])


def test_the_adapter_column_is_the_pipelines_own_picture(ensure, base, configure):
    """diffusers' pipeline with the exported file, the same noise and prompt: the same pixels."""
    import torch
    from diffusers import FluxPipeline

    from lib.pictures import to_image
    from lib.random import normal

    overrides = ("sample.steps=2", "sample.prompts=[a red circle]", "sample.seed=5")
    drawn = cells(Path(ensure("sample", *overrides).payload["files"]["grid"]["file"]), 3)[0]
    exported = ensure("export", *overrides).payload["files"]
    shape = (1, 16, SIDE // 8, SIDE // 8)
    noise = torch.from_numpy(normal(shape, seed=5, stream="noise", counter=0, sample_id="sample"))
    pipe = FluxPipeline.from_pretrained(base, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for column, name in ((1, "adapter"), (2, "ema")):
        file = Path(exported[name]["file"])
        pipe.load_lora_weights(file.parent, weight_name=file.name)
        image = pipe(
            prompt="a red circle",
            height=SIDE,
            width=SIDE,
            num_inference_steps=2,
            guidance_scale=3.5,
            latents=pipe._pack_latents(noise, 1, *shape[1:]),
            max_sequence_length=configure().captions.max_length,
            output_type="pt",
        ).images[0]
        pipe.unload_lora_weights()
        reference = np.asarray(to_image((image * 2 - 1).numpy())).astype(int)
        assert np.abs(reference - drawn[column].astype(int)).max() <= 1


def test_a_negative_prompt_without_effect_is_refused(configure):
    from lib.pipeline import graph

    config = configure("sample.negative_prompt=ugly")
    found = [str(problem) for problem in graph.problems(config, online=True)]
    assert any("sample.negative_prompt" in line and "second prediction" in line for line in found)


@pytest.mark.parametrize("prompts", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_prompts_and_captions_stay_out_of_events(ensure, seen, prompts):
    texts = [f"secret number {n}" for n in range(prompts)]
    ensure("sample", "sample.steps=1", f"sample.prompts=[{', '.join(texts)}]")
    assert "secret" not in "\n".join(event.line() for event in seen)

"""`sample.base`: an adapter drawn on another base of its family, such as one distilled to few steps."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

SIDE, ZOOM = 64, 2  # a small picture is enlarged in the grid
STEPS = 2
PROMPT = "a red circle"
FEW_STEPS = (f"sample.steps={STEPS}", "sample.guidance=0", f"sample.prompts=[{PROMPT}]")


@pytest.fixture(scope="module")
def krea(tmp_path_factory):
    """A tiny base of a family that is distilled elsewhere."""
    from lib.families import krea2
    from lib.quiet import without_library_bars

    folder = tmp_path_factory.mktemp("krea") / "base"
    with without_library_bars():
        krea2.build_tiny(folder)
    return folder


@pytest.fixture(scope="module")
def distilled(krea, tmp_path_factory):
    """Its distilled variant: another denoiser, by another schedule, with all else the same."""
    from diffusers import Krea2Transformer2DModel

    from lib.families import krea2

    folder = shutil.copytree(krea, tmp_path_factory.mktemp("distilled") / "krea-turbo")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        denoiser = Krea2Transformer2DModel(**krea2.TINY["transformer"])
    denoiser.save_pretrained(folder / "transformer")
    edit(folder / "model_index.json", is_distilled=True)
    return folder


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """The store and outputs of all runs here, whose training is one and the same."""
    return tmp_path_factory.mktemp("canvas")


@pytest.fixture
def on(krea):
    """The words of a run on the base, drawn on a canvas."""

    def words(canvas=None, *overrides):
        drawn_on = () if canvas is None else (f"sample.base={canvas}",)
        return ("family=krea2", f"family.base={krea}", *FEW_STEPS, *drawn_on, *overrides)

    return words


@pytest.fixture
def planned(configure, root):
    """The plans of a grid by stage."""

    def made(words):
        from lib.pipeline import graph

        return {plan.stage: plan for plan in graph.plan("sample", configure(*words, root=root))}

    return made


@pytest.fixture
def key_of(planned):
    """The key that a grid would have; None where it is not known yet."""

    def found(words):
        manifest = planned(words)["sample"].manifest
        return manifest.key if manifest else None

    return found


@pytest.fixture
def made(ensure, root, seen):
    """Ensures a stage; its manifest, and the stages that were no hits."""

    def make(stage, words):
        manifest = ensure(stage, *words, root=root)
        statuses = {e.stage: e.data["status"] for e in seen if e.kind == "phase"}
        return manifest, [stage for stage, status in statuses.items() if status != "hit"]

    return make


@pytest.fixture
def refusals(configure):
    def found(words):
        from lib.pipeline import graph

        return {p.subject: p for p in graph.problems(configure(*words), online=True)}

    return found


def column(manifest, place):
    """A column of the grid's one row, in the pictures' own size."""
    from lib.pictures import LINE, MARGIN

    with Image.open(manifest.payload["files"]["grid"]["file"]) as image:
        sheet = np.asarray(image)
    left = MARGIN + (SIDE * ZOOM + MARGIN) * place
    return sheet[LINE + MARGIN :, left:][: SIDE * ZOOM : ZOOM, : SIDE * ZOOM : ZOOM].astype(int)


def pictures_of(pipeline, adapter):
    """What the family's own pipeline draws, without and with an exported adapter."""
    from lib.pictures import to_image
    from lib.random import normal

    shape = (1, 16, SIDE // 8, SIDE // 8)
    noise = normal(shape, seed=0, stream="noise", counter=0, sample_id="sample")
    for file in (None, adapter):
        if file:
            pipeline.load_lora_weights(file.parent, weight_name=file.name)
        image = pipeline(
            prompt=PROMPT,
            height=SIDE,
            width=SIDE,
            num_inference_steps=STEPS,
            guidance_scale=0.0,
            latents=pipeline._pack_latents(torch.from_numpy(noise), *shape),
            max_sequence_length=24,
            output_type="pt",
        ).images[0]
        yield np.asarray(to_image((image * 2 - 1).numpy())).astype(int)


def test_the_grid_is_what_the_distilled_pipeline_draws_with_the_adapter(made, on, distilled):
    from diffusers import Krea2Pipeline

    own, _ = made("sample", on())
    grid, ran = made("sample", on(distilled))
    assert ran == ["sample"]
    exported, _ = made("export", on(distilled))
    pipeline = Krea2Pipeline.from_pretrained(distilled, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    expected = list(pictures_of(pipeline, Path(exported.payload["files"]["adapter"]["file"])))
    for place, picture in enumerate(expected):
        assert np.abs(column(grid, place) - picture).max() <= 1
    assert not np.array_equal(*expected)
    assert not np.array_equal(column(own, 0), column(grid, 0))
    assert made("sample", on())[1] == made("sample", on(distilled))[1] == []


def test_the_key_of_a_grid_follows_all_of_the_canvas_that_draws(
    made, on, key_of, krea, distilled, tmp_path
):
    made("export", on())
    copy = shutil.copytree(krea, tmp_path / "copy")
    own, of_copy = key_of(on()), key_of(on(copy))
    assert own == of_copy  # the same denoiser by the same schedule, wherever it lies
    edit(copy / "scheduler" / "scheduler_config.json", max_shift=2.0)
    of_schedule = key_of(on(copy))
    edit(copy / "model_index.json", is_distilled=True)
    of_setting = key_of(on(copy))
    shutil.copytree(distilled / "transformer", copy / "transformer", dirs_exist_ok=True)
    assert len({own, of_schedule, of_setting, key_of(on(copy)), key_of(on(distilled))}) == 5


def test_the_key_of_a_grid_follows_the_schedule_of_the_base_itself(
    made, on, planned, krea, tmp_path
):
    made("export", on())
    base = shutil.copytree(krea, tmp_path / "base")
    words = (*on(), f"family.base={base}")
    before = planned(words)
    edit(base / "scheduler" / "scheduler_config.json", max_shift=2.0)
    after = planned(words)
    keys = [{stage: plan.known().key for stage, plan in plans.items()} for plans in (before, after)]
    assert [stage for stage, key in keys[0].items() if keys[1][stage] != key] == ["sample"]


def test_a_tiny_canvas_is_planned_unbuilt_and_built_when_it_is_drawn_on(made, on, key_of, root):
    made("export", on())
    assert key_of(on("tiny")) is None
    assert not (root / "store" / "bases").exists()
    assert made("sample", on("tiny", "sample.seed=2"))[1] == ["sample"]
    assert key_of(on("tiny")) == key_of(on())  # the very weights of the folder


def test_a_plan_shows_the_rows_that_another_canvas_draws(made, on, planned, distilled):
    made("sample", on())
    plans = planned(on(distilled, "sample.seed=1"))
    assert [stage for stage, plan in plans.items() if not plan.hit] == ["sample"]
    assert (plans["sample"].total, plans["sample"].missing) == (1, 1)


def test_the_settings_that_dvc_compares_name_the_canvas(on, configure, distilled):
    from lib.pipeline import sample

    settings = sample.key_settings(configure(*on(distilled)))
    assert settings["sample.base"] == str(distilled)
    assert settings["sample.revision"] is None


def test_a_canvas_may_be_distilled_and_the_base_may_not(on, refusals, distilled):
    assert refusals(on(distilled)) == {}
    (problem,) = refusals(("family=krea2", f"family.base={distilled}")).values()
    assert "is distilled" in problem.why


def test_a_canvas_that_is_none_is_refused_by_its_own_name(on, refusals, base, krea, tmp_path):
    """`base` is of another family."""
    broken = shutil.copytree(krea, tmp_path / "broken")
    (broken / "transformer" / "config.json").unlink()
    said = {
        base: "holds a FluxPipeline; family=krea2 needs Krea2Pipeline",
        broken: "transformer/config.json is missing",
        tmp_path / "nowhere": "no such folder",
    }
    for canvas, why in said.items():
        # ... beside whatever else is wrong.
        found = refusals(on(canvas, "objective=min_snr"))
        assert list(found) == ["objective.weighting=min_snr", f"sample.base={canvas}"]
        assert why in found[f"sample.base={canvas}"].why


def test_a_canvas_that_is_gone_stops_a_run_by_its_own_name(made, on, tmp_path):
    from lib.errors import InputRefused

    with pytest.raises(InputRefused, match=r"sample\.base=.*no such folder"):
        made("sample", on(tmp_path / "nowhere"))


def test_a_negative_prompt_is_judged_by_the_canvas(on, refusals, distilled):
    (problem,) = refusals(on(distilled, "sample.negative_prompt=ugly")).values()
    assert (problem.subject, str(distilled) in problem.why) == ("sample.negative_prompt", True)
    guided = ("sample.negative_prompt=ugly", "sample.guidance=2")
    assert refusals(on(distilled, *guided)) == {}

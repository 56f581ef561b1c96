"""A small data set of real pictures, a tiny base as a folder, and configurations over both."""

import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

EMOJI = Path(__file__).resolve().parents[2] / "examples" / "emoji"
SQUARES = ("fox", "pizza", "rocket", "key")
WIDE, TALL = ("owl-crown", "whale-key"), ("crown-penguin-doughnut", "sunflower-honeybee-pineapple")
SMALL = (
    "family.base={base}",
    "dataset.root={data}",
    "paths.store={root}/store",
    "paths.outputs={root}/outputs",
    "precision=fp32",
    "buckets.resolution=64",
    "buckets.step=16",
    "buckets.max_aspect=3",
    "captions.max_length=24",
    "captions.dtype=fp32",
    "adapter.rank=4",
    "optimizer.lr=1e-2",
    "lr_schedule=constant",
    "trainer.max_steps=6",
    "trainer.batch_size=2",
    "trainer.save_every=2",
    "tracker=none",
)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    from lib.families import flux
    from lib.quiet import without_library_bars

    folder = tmp_path_factory.mktemp("bases") / "flux"
    with without_library_bars():
        flux.build_tiny(folder)
    return folder


@pytest.fixture(scope="session", autouse=True)
def libraries():
    """Imported and set aside from garbage collection, once."""
    import diffusers  # noqa: F401
    import peft  # noqa: F401
    import transformers  # noqa: F401

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def collected():
    """Stages collect garbage after each model, and need not look at what other tests imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """No contact sheet and no loss plot, half of a small run's time, unless a test asks."""
    if request.node.get_closest_marker("pictures") is None:
        from lib.pipeline import train

        monkeypatch.setattr(train, "_show_data", lambda *_: None)
        monkeypatch.setattr(train, "_show_losses", lambda *_: None)


@pytest.fixture(scope="session")
def put_pictures() -> Callable[[Path], Path]:
    """Makes a folder of eight pictures in three buckets, each with a sidecar of its own."""

    def put(folder: Path) -> Path:
        folder.mkdir()
        for name in (*SQUARES, *WIDE, *TALL):
            shutil.copy(EMOJI / f"{name}.png", folder / f"{name}.png")
            (folder / f"{name}.txt").write_text(f"a 3D emoji of {name}", encoding="utf-8")
        return folder

    return put


@pytest.fixture
def data(tmp_path, put_pictures) -> Path:
    return put_pictures(tmp_path / "data")


@pytest.fixture(scope="session")
def small(base) -> Callable[..., list[str]]:
    """Overrides of a small run over a data set, with its store and outputs under a root."""

    def made(*overrides: str, root: Path, data: Path) -> list[str]:
        given = [text.format(base=base, data=data, root=root) for text in SMALL]
        named = {text.split("=")[0]: text for text in (*given, *overrides)}
        return list(named.values())

    return made


@pytest.fixture
def settings(tmp_path, small, data) -> Callable[..., list[str]]:
    """Overrides of a small run; another `root` is another machine's store and outputs."""

    def made(*overrides: str, root: Path = tmp_path) -> list[str]:
        return small(*overrides, root=root, data=data)

    return made


@pytest.fixture
def configure(settings):
    """A `Config` of the small run."""

    def made(*overrides: str, **options):
        from stages.composing import compose

        return compose(settings(*overrides, **options))

    return made


@pytest.fixture
def seen():
    """A sink that keeps events."""
    return []


@pytest.fixture
def ensure(configure, seen):
    """Ensure a stage of the small run, keeping its events in `seen`."""

    def made(stage: str, *overrides: str, **options):
        from lib.events import Events
        from lib.pipeline import graph

        seen.clear()
        return graph.ensure(stage, configure(*overrides, **options), Events(sinks=(seen.append,)))

    return made


@pytest.fixture
def encoded(ensure, configure):
    """The configuration of the small run, its inputs, and what is upstream of its training."""

    def made(*overrides):
        from lib.pipeline import graph

        config = configure(*overrides)
        stages = ("prepare_dataset", "encode_captions", "build_latent_cache")
        upstream = {stage: ensure(stage, *overrides) for stage in stages}
        return config, graph.open_inputs(config), upstream

    return made


@pytest.fixture
def plan_text(configure):
    """What `plan` prints, up to the export."""

    def made(*overrides):
        from lib.pipeline import graph
        from lib.pipeline.planning import plan_lines

        config = configure(*overrides)
        plans = graph.plan("export", config)
        return "\n".join(plan_lines(plans, graph.open_inputs(config).store))

    return made


@pytest.fixture
def adapter_of(tmp_path):
    """The bytes of the adapter of a run by its train manifest."""

    def found(manifest, root: Path = tmp_path) -> bytes:
        from lib import runs

        folder = runs.completed(root / "store", manifest.key)
        assert folder is not None
        return (folder / runs.ADAPTER_FILE).read_bytes()

    return found


@pytest.fixture
def results_of(tmp_path):
    """All that a run made, by name: the bytes of its adapter and of the average."""

    def found(manifest, root: Path = tmp_path) -> dict[str, bytes]:
        from lib import runs

        folder = runs.completed(root / "store", manifest.key)
        assert folder is not None
        names = (runs.ADAPTER_FILE, runs.EMA_FILE)
        return {name: (folder / name).read_bytes() for name in names if (folder / name).exists()}

    return found


@pytest.fixture
def counted(monkeypatch):
    """Rows that reach the encoders' own classes."""
    from diffusers import AutoencoderKL
    from transformers import T5EncoderModel

    rows = {"captions": 0, "latents": 0}
    encode, forward = AutoencoderKL.encode, T5EncoderModel.forward

    def counting_encode(self, x, *args, **kwargs):
        rows["latents"] += x.shape[0]
        return encode(self, x, *args, **kwargs)

    def counting_forward(self, input_ids=None, *args, **kwargs):
        rows["captions"] += input_ids.shape[0]
        return forward(self, input_ids, *args, **kwargs)

    monkeypatch.setattr(AutoencoderKL, "encode", counting_encode)
    monkeypatch.setattr(T5EncoderModel, "forward", counting_forward)
    return rows

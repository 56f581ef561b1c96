"""Grids, contact sheets and loss plots: what they hold, and that they are whole."""

import io

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lib import pictures


def test_pixels_become_the_levels_they_came_from():
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = np.repeat((levels.astype(np.float32) / 255 * 2 - 1)[None], 3, axis=0)
    assert np.array_equal(np.asarray(pictures.to_image(pixels))[..., 0], levels)


def test_pixels_out_of_range_are_clipped():
    pixels = np.stack([np.full((2, 2), v, np.float32) for v in (-3, 0, 3)])
    assert np.asarray(pictures.to_image(pixels))[0, 0].tolist() == [0, 128, 255]


def test_a_grid_holds_each_picture_where_it_belongs():
    colours = [[(10 * (3 * r + c), 50, 200) for c in range(3)] for r in range(2)]
    rows = [[Image.new("RGB", (20, 12), colour) for colour in row] for row in colours]
    sheet = pictures.grid(rows, columns=["base", "adapter", "EMA"], captions=["one", "two"])
    found = set(map(tuple, np.asarray(sheet).reshape(-1, 3).tolist()))
    assert {colour for row in colours for colour in row} <= found


def test_a_contact_sheet_shows_every_picture():
    colours = [(200, n * 20, 7) for n in range(9)]
    shown = [pictures.Captioned(Image.new("RGB", (30, 30), c), "some words " * 9) for c in colours]
    sheet = pictures.contact_sheet({"30x30: 9 pictures": shown}, width=400)
    found = set(map(tuple, np.asarray(sheet).reshape(-1, 3).tolist()))
    assert set(colours) <= found


@given(st.lists(st.text("abc", min_size=1, max_size=9), max_size=30), st.integers(1, 40))
def test_wrapping_loses_no_word_and_makes_few_lines(words, width):
    lines = pictures.wrapped(" ".join(words), len, width)
    assert " ".join(lines).split() == words
    assert len(lines) <= pictures.CAPTION_LINES
    assert all(len(line) <= width or " " not in line for line in lines[:-1])


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=60), st.integers(1, 25))
def test_a_running_mean_is_the_mean_of_its_window(values, window):
    means = pictures.running_mean(values, window=window)
    for end, mean in enumerate(means, start=1):
        assert abs(mean - np.mean(values[max(0, end - window) : end])) < 1e-9


def test_a_loss_plot_is_a_png(tmp_path):
    path = tmp_path / "loss.png"
    pictures.save(pictures.loss_plot({"a": [(1, 1.0), (2, 0.5)], "b": [(1, 2.0)]}, title="x"), path)
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        assert image.format == "PNG"
        assert image.width > 400

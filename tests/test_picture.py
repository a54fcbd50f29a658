"""Colours of labels, and pictures read back with Pillow."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from zarr_dvid.picture import label_colors, save_label_image


def test_zero_is_black_and_no_label_is_dark() -> None:
    colors = label_colors(np.arange(20_000, dtype=np.uint64)).astype(float)
    assert not colors[0].any()
    assert (colors[1:] @ [0.2126, 0.7152, 0.0722]).min() > 80  # luma by Rec. 709


def test_colors_stay_the_same_for_ever() -> None:
    labels = np.array([[1, 2, 3], [10**10, 2**63, 2**64 - 1]], np.uint64)
    colors = label_colors(labels)
    assert colors.shape == (2, 3, 3)
    assert colors.dtype == np.uint8
    assert colors.reshape(-1, 3).tolist() == [
        [169, 195, 95],
        [154, 107, 190],
        [237, 140, 100],
        [108, 178, 80],
        [221, 122, 47],
        [72, 133, 207],
    ]


@pytest.mark.parametrize("first", [1, 10**10, 2**40 - 1])
def test_neighbouring_labels_differ_for_the_eye(first: int) -> None:
    colors = label_colors(np.arange(first, first + 20_000, dtype=np.uint64)).astype(int)
    distance = np.abs(np.diff(colors, axis=0)).sum(1)
    assert (distance < 30).mean() < 0.05
    assert len(np.unique(colors, axis=0)) > 2000


def test_color_depends_on_nothing_but_the_label() -> None:
    labels = np.random.default_rng(0).integers(0, 2**64, (40, 70, 60), dtype=np.uint64)
    colors = label_colors(labels)
    views = np.s_[:, ::-2], np.s_[3], np.s_[:, :, 7], np.s_[5, 6, 7], np.s_[:0]
    for view in views:
        np.testing.assert_array_equal(label_colors(labels[view]), colors[view])
    np.testing.assert_array_equal(label_colors(labels.T), colors.transpose(2, 1, 0, 3))


def test_labels_are_left_as_they_were() -> None:
    labels = np.arange(100, dtype=np.uint64)
    labels.setflags(write=False)
    label_colors(labels)


def test_memory_is_the_picture_and_a_strip() -> None:
    labels = np.arange(2048 * 2048, dtype=np.uint64).reshape(2048, 2048)
    label_colors(labels[:1, :1])
    tracemalloc.start()
    try:
        colors = label_colors(labels)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < colors.nbytes + 4 * 2**20


def test_refuses_what_is_not_uint64() -> None:
    with pytest.raises(TypeError, match="uint64, not int32"):
        label_colors(np.zeros((2, 2), np.int32))


def test_png_holds_the_colors(tmp_path: Path) -> None:
    labels = np.arange(7 * 5, dtype=np.uint64).reshape(7, 5)
    save_label_image(tmp_path / "slice.png", labels)
    with Image.open(tmp_path / "slice.png") as image:
        assert (image.format, image.size, image.mode) == ("PNG", (5, 7), "RGB")
        np.testing.assert_array_equal(np.asarray(image), label_colors(labels))


@pytest.mark.parametrize("shape", [(4,), (2, 2, 2), (0, 3)])
def test_png_needs_a_slice(tmp_path: Path, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="two dimensions"):
        save_label_image(tmp_path / "slice.png", np.zeros(shape, np.uint64))


def test_without_pillow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"pip install 'zarr-dvid\[cli\]'"):
        save_label_image(tmp_path / "slice.png", np.zeros((2, 2), np.uint64))
    assert not list(tmp_path.iterdir())

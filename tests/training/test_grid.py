"""One picture of many, under labels in any alphabet of Europe."""
import numpy as np
from PIL import Image

from training.grid import labelled_grid


def drawn(label: str) -> np.ndarray:
    return np.asarray(labelled_grid([Image.new('RGB', (32, 32))], [label], 'title'))


def test_letters_with_accents_are_drawn_and_not_boxes():
    box = drawn('\uffff')  # a character of no font
    letters = [drawn(letter) for letter in 'ÜößéñŁжω']
    assert not any(np.array_equal(letter, box) for letter in letters)
    assert len({letter.tobytes() for letter in letters}) == len(letters)

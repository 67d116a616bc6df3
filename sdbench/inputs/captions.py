"""Store the captions of an image in MDS columns, read them again, and choose one of them for training."""
from collections.abc import Iterable, Mapping

import numpy as np

from sdbench.errors import UserError

ONE_CAPTION = 'caption'  # column with the first caption of an image, and the name of captions that have no other name
CAPTIONS = 'captions'  # column with all captions by name, and the key in index.json that counts the captions by name
MDS_CAPTION_COLUMNS = {ONE_CAPTION: 'str', CAPTIONS: 'json'}

Named = dict[str, list[str]]  # the captions of an image, by name: {'short': ['a cat'], 'long': [...]}


def to_columns(captions: Named) -> dict:
    """Return the MDS columns for an image's captions. CAPTIONS is empty for a single caption called ONE_CAPTION."""
    captions = {name: texts for name, texts in captions.items() if texts}
    [first, *_] = [text for texts in captions.values() for text in texts]
    if captions == {ONE_CAPTION: [first]}:
        captions = {}
    return {ONE_CAPTION: first, CAPTIONS: captions}


def from_columns(columns: Mapping, is_ours: bool) -> Named:
    """Return the captions of an image, by name, from the MDS columns of its sample.

    `is_ours` tells whether index.json has the key CAPTIONS, which only our converter writes. In shards of another
    program a column named `captions` may hold anything, so it is ignored.
    """
    if is_ours and columns.get(CAPTIONS):
        return columns[CAPTIONS]
    return {ONE_CAPTION: [columns[ONE_CAPTION]]}


def require_names(wanted: Iterable[str], index: dict, flag: str, data: str) -> None:
    """Raise UserError, which names `flag` and `data`, if a dataset has no captions with one of the wanted names."""
    names = index.get(CAPTIONS, [ONE_CAPTION])
    for name in wanted:
        if name not in names:
            raise UserError(f'{flag} {name}: {data} has no captions of that name; it has {", ".join(names)}')


def choose_caption(captions: Named, weights: Mapping[str, float], generator: np.random.Generator) -> str:
    """Choose one of an image's captions at random.

    The weight of a name is divided equally among the captions with that name. Every caption has the same chance if
    there are no weights, or if none of the image's captions has a weight.
    """
    texts = [text for texts_with_name in captions.values() for text in texts_with_name]
    chances = np.array([weights.get(name, 0) / len(texts_with_name)
                        for name, texts_with_name in captions.items() for _ in texts_with_name], dtype=float)
    return texts[generator.choice(len(texts), p=chances / chances.sum() if chances.any() else None)]

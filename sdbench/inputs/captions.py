"""The captions of an image in MDS shards: which it has, by name, and which of them a training draws."""
import random
from collections.abc import Iterable, Mapping

from sdbench.errors import UserError

ONE_CAPTION = 'caption'  # the column of the first caption of an image, and what captions without a name are called
CAPTIONS = 'captions'  # the column of all by their names, and in index.json how many there are of each name
CAPTION_COLUMNS = {ONE_CAPTION: 'str', CAPTIONS: 'json'}

Named = dict[str, list[str]]  # the captions of an image, by name


def to_columns(captions: Named) -> dict:
    """Return the columns of an image's captions. One alone is not written twice."""
    captions = {name: texts for name, texts in captions.items() if texts}
    [first, *_] = [text for texts in captions.values() for text in texts]
    if captions == {ONE_CAPTION: [first]}:
        captions = {}
    return {ONE_CAPTION: first, CAPTIONS: captions}


def from_columns(columns: Mapping, is_counted: bool) -> Named:
    """Return the captions of an image.

    Args:
        columns: of its sample.
        is_counted: whether index.json counts the captions in the column of all, as only our converter writes it. A
            column of that name in shards from another program may hold anything, so it is ignored.
    """
    if is_counted and columns.get(CAPTIONS):
        return columns[CAPTIONS]
    return {ONE_CAPTION: [columns[ONE_CAPTION]]}


def require_names(wanted: Iterable[str], index: dict, flag: str, data: str) -> None:
    """Raise UserError, by a flag, if by its index.json a dataset has no captions of the names that are wanted."""
    names = index.get(CAPTIONS, [ONE_CAPTION])
    for name in wanted:
        if name not in names:
            raise UserError(f'{flag} {name}: {data} has no captions of that name; it has {", ".join(names)}')


def draw_caption(captions: Named, weights: Mapping[str, float], seed: int, epoch: int, number: int) -> str:
    """Draw a caption of an image, by seed, epoch and number of the sample alone.

    So a resumed run draws the same, and so do other numbers of ranks and of processes that decode.

    Args:
        captions: of the image.
        weights: of each name, shared by the captions of that name. Without any, and where the image has no caption of
            a name with a weight, each of its captions has the same chance.
        seed: of the run.
        epoch: counted from 0.
        number: of the sample in the dataset.
    """
    texts = []
    chances = []
    for name, of_name in captions.items():
        for text in of_name:
            texts.append(text)
            chances.append(weights.get(name, 0) / len(of_name))
    if not any(chances):
        chances = None
    [drawn] = random.Random(f'{seed} {epoch} {number}').choices(texts, chances)
    return drawn

"""Make JPEGs that cost as much to decode as photographs do."""
import io

import numpy as np
from PIL import Image

SIDE = 256  # pixels


def photograph(random: np.random.Generator) -> bytes:
    """Return a JPEG of about 20 KB with the detail of a photograph: noise at every scale, the coarser the stronger."""
    picture = np.zeros((SIDE, SIDE, 3))
    for size in (4, 16, 64, 256):
        noise = Image.fromarray(random.integers(0, 256, (size, size, 3), dtype=np.uint8))
        picture += np.asarray(noise.resize((SIDE, SIDE), Image.BICUBIC), float) / size ** 0.5
    buffer = io.BytesIO()
    Image.fromarray(np.uint8((picture - picture.min()) * 255 / np.ptp(picture))).save(buffer, 'JPEG', quality=88)
    return buffer.getvalue()

"""Find the speed that a measured run should have by the forecast for its own flags. Nothing here needs torch."""
import math
from typing import NamedTuple

from sdbench.forecast.forecast import DoesNotFit, forecast
from sdbench.gpus import CARDS
from sdbench.setup import Setup, setup_of_record

# What a record must state so that its speed can be compared with a forecast. Records of our commands state all flags.
NEEDED = {'train': ('num_devices', 'image_size', 'batch_size', 'microbatch', 'latents', 'precision', 'compile',
                    'use_ema', 'gradient_checkpointing', 'half_precision_norms'),
          'encode': ('num_devices', 'image_size', 'compile', 'encoder_precision')}


class Expected(NamedTuple):
    """What is expected of a run.

    Attributes:
        setup: its setup, with defaults if it fits; None if its record does not state what a forecast needs.
        images_per_sec: forecast speed of all GPUs together, for encoding if the run encoded; NaN if there is none.
        why_none: why no speed is forecast; '' if one is.
    """
    setup: Setup | None
    images_per_sec: float
    why_none: str = ''


def expected_of(record: dict) -> Expected:
    """Return the setup of a training or an encoding, and the speed that is forecast for it on its GPU."""
    stage = record['stage']
    if stage not in NEEDED or record['device'] not in CARDS:
        return Expected(None, math.nan, 'there is no forecast for its stage or its GPU')
    setup = setup_of_record(record)
    missing = [name for name in NEEDED[stage] if getattr(setup, name) is None]
    if 'command' in record and 'microbatch' in missing:  # it ended before the search, which takes the largest that fits
        missing.remove('microbatch')
    if missing:
        return Expected(None, math.nan, f'its record does not state {", ".join(missing)}')
    try:
        found = forecast(setup, CARDS[setup.device])
    except DoesNotFit as error:
        return Expected(setup, math.nan, f'by the forecast it does not fit ({error})')
    except (ValueError, TypeError, LookupError) as error:  # for values that no flag has, in a record by hand
        return Expected(None, math.nan, f'nothing is forecast for its settings ({error})')
    speed = found.speed_of(stage)
    if not speed > 0:
        return Expected(found.setup, math.nan, 'no speed is forecast for its precision')
    return Expected(found.setup, speed)

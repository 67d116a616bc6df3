r"""Plan a training of Stable Diffusion: days, dollars and their ranges on each GPU, and what to do first. Needs no GPU.

    python plan.py                                   # Stable Diffusion 2 as its makers trained it, on 8 of each GPU
    python plan.py --gpu '8 H100-80GB' '8 B200' '16 L40S' --network_gbits 100 --images 100000000 \
        --max_dollars 30000 --max_days 42            # your images, GPUs and limits
    python plan.py results.jsonl --gpu '8 H100-80GB' # corrected by what was measured
    python plan.py --spot --html plan.html           # on spot machines; a page to send to others

Each GPU gets the fastest plan with the flags of recipes/fastest.txt: on latents or images, with or without the compiler
and gradient checkpointing, with the largest microbatch that fits. Days and whole costs have ranges. Plans whose ranges
overlap cannot be told apart before they are measured.
"""
import datetime
import math
import signal
import sys
from pathlib import Path

from sdbench.flags.parser import parse
from sdbench.flags.plan import HOURS_BETWEEN_PREEMPTIONS, PlanSettings
from sdbench.flags.times import to_batches
from sdbench.plan.answer import Answer
from sdbench.plan.measured import Speeds, read_measurements
from sdbench.plan.parts import Plan, Preemptions
from sdbench.plan.prices import LIST_PRICES, ON_DEMAND, SPOT, read_prices
from sdbench.plan.search import Phase, Training, base_setup, cards_wanted, find_plan, with_other_arithmetic
from sdbench.plan.verdict import Limit
from sdbench.process import begin, one_line_errors
from sdbench.records.read import read_all

PROGRAM = 'plan.py'
ROOT = Path(__file__).parent


def main(argv: list[str] | None = None, today: datetime.date | None = None) -> Answer:
    """Run the command, and return its answer. `today` decides which prices are old."""
    begin()
    settings = parse(PlanSettings, __doc__, argv, PROGRAM)
    with one_line_errors(PROGRAM):
        words = sys.argv[1:] if argv is None else argv
        answer = make_answer(settings, [word for word in words if word not in settings.records], today)
        print(answer.text, flush=True)
        write_files(answer, settings)
    return answer


def make_answer(settings: PlanSettings, command: list[str], today: datetime.date | None) -> Answer:
    """Return the answer to a command line. `command` is its words without the records."""
    # Read what was measured: by the user, which corrects forecasts, and in results/, which decides the ranges.
    training = training_of(settings)
    model = training.base.model_name
    measurements, corrections = read_measurements(read_all(settings.records), model)
    published, _ = read_measurements(read_all(sorted(map(str, ROOT.glob('results/*.jsonl')))), model)
    speeds = Speeds(measurements, published + measurements)
    prices = read_prices(settings.prices or LIST_PRICES, SPOT if settings.spot else ON_DEMAND,
                         settings.dollars_per_gpu_hour)

    # Plan for each GPU that was asked for, and then with each change of the arithmetic.
    outcomes = [find_plan(card, count, training, prices, speeds) for card, count in cards_wanted(settings.gpu)]
    changes = {plan: with_other_arithmetic(plan, training, speeds) for plan in outcomes if isinstance(plan, Plan)}
    limits = [Limit(metric, most) for metric, most in (('dollars', settings.max_dollars), ('days', settings.max_days))
              if most is not None]
    return Answer(training, outcomes, limits, changes, corrections, command, settings.records,
                  today or datetime.date.today())


def write_files(answer: Answer, settings: PlanSettings) -> None:
    """Write the files that --csv, --html and --figure name."""
    if settings.csv:
        import pandas as pd
        pd.DataFrame(answer.rows()).to_csv(settings.csv, index=False)
    if settings.html:
        from sdbench.plan.sheet import write_sheet
        write_sheet(answer, settings.html)
    if settings.figure:
        from sdbench.plan.sheet import draw_intervals
        from sdbench.report.pictures import save
        save(draw_intervals(answer.plans, answer.limits), settings.figure)


def training_of(settings: PlanSettings) -> Training:
    """Return the training that the flags describe."""
    base, fixed = base_setup(settings)
    different = settings.images if len(settings.images) > 1 else settings.images * len(settings.schedule)
    phases = [Phase(size, steps, steps * base.batch_size, images)
              for (steps, size), images in zip(settings.schedule, different, strict=True)]
    hours = settings.hours_between_preemptions or (HOURS_BETWEEN_PREEMPTIONS if settings.spot else math.inf)
    return Training(tuple(phases), base, fixed, Preemptions(hours, to_batches(settings.save_interval)),
                    settings.dollars_per_tb_month, settings.dollars_per_tb_read)


if __name__ == '__main__':
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `plan.py ... | head` ends silently when head does
    main()

"""The whole answer of plan.py: title, verdict, table, notes and first steps, from which text, CSV and HTML are made."""
import datetime
import math
import re
import shlex
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sdbench.errors import plural
from sdbench.flags.plan import SD2_SCHEDULE
from sdbench.flags.train import SD2_BASE
from sdbench.forecast.forecast import network_sentence
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.plan.measured import MEASURED_ERROR, UNSEEN_ERROR
from sdbench.plan.parts import ENCODE, FORECAST, RESTART_HOURS, TRAIN, Impossible, Part, Plan
from sdbench.plan.prices import YOUR_PRICE
from sdbench.plan.search import INPUT_FLAGS, RECIPE, Training, flags_of
from sdbench.plan.verdict import (
    OUTSIDE,
    PROBABLY_OUTSIDE,
    PROBABLY_WITHIN,
    WITHIN,
    Limit,
    Verdict,
    and_list,
    distances,
    judge,
    lowest_speed,
    standing,
)
from sdbench.records.metrics import WIDTH, filled, rounded, text_table
from sdbench.report.trainings import grouped

RANGE_REASONS = {
    MEASURED_ERROR: 'the same GPUs and code differ by 2 to 4 % between MLPerf submitters',
    LARGEST_ERROR: 'published and measured runs like it differed by no more from their forecasts',
    UNSEEN_ERROR: 'published forecasts of this kind were off by up to 28 % on GPUs that their authors had not measured'}
MEASURED_STEPS = 100  # of each phase, in the commands that measure a plan
WARMUP_STEPS = 3
ENCODED_PER_GPU = 3200  # images to encode for a measurement: 100 batches on each GPU
MOST_CHANGED = 4  # plans for which a change of the arithmetic is shown in any case
SMALLEST_CHANGE = 0.005  # fraction of the days below which a change is not worth a line
QUOTED = r''''[^']*'|"[^"]*"'''  # in a shell command
MINUTES_TO_START = 5  # of a measurement: it starts and compiles


@dataclass(frozen=True)
class Answer:
    """The answer to one call of plan.py."""
    training: Training
    outcomes: list[Plan | Impossible]  # for all GPUs that were asked for
    limits: list[Limit]
    changes: dict[Plan, dict[str, Plan]]  # for each plan, those with one change of its arithmetic, by what it changes
    corrections: list[str]  # sentences about measurements that correct nothing
    command: list[str]  # words of the command line, without the records
    records: Sequence[str]  # files with measurements
    today: datetime.date  # on which the ages of prices are counted

    @cached_property
    def plans(self) -> list[Plan]:
        """Return the plans with the lowest cost first, and those without a price after them by their days."""
        plans = [outcome for outcome in self.outcomes if isinstance(outcome, Plan)]
        return sorted(plans, key=lambda plan: (math.isnan(plan.dollars.likely), plan.dollars.likely, plan.days.likely)
                      if plan.price else (True, 0, plan.days.likely))

    @property
    def title(self) -> str:
        """Return the training as one sentence. Every plan has these phases and these images."""
        phases = []
        for phase in self.training.phases:
            epochs = rounded(phase.images / phase.different_images)
            phases.append(f'{plural(phase.steps, "step")} at {phase.size} px ({phase.images:,} images, {epochs} epochs '
                          f'of {phase.different_images:,} different images)')
        ema = 'with EMA' if self.training.base.use_ema else 'WITHOUT EMA'
        return (f'Train {self.training.base.model_name} {ema}: {", then ".join(phases)}; batch '
                f'{self.training.base.batch_size:,}.')

    @cached_property
    def verdict(self) -> Verdict:
        return judge(self.plans, self.limits)

    def names(self, plans: Sequence[Plan]) -> str:
        """Return the names of some plans as text, or of the others if most plans are among them."""
        others = [plan.name for plan in self.plans if plan not in plans]
        if not others and len(plans) > 1:
            return 'all plans'
        if others and len(others) < len(plans) / 3:
            return f'all except {", ".join(others)}'
        return ', '.join(plan.name for plan in plans)

    def cells(self, plan: Plan) -> dict[str, str]:
        """Return the cells of a plan in the table, by heading; '' for a cost without a price."""
        has_price = plan.price is not None
        return {'GPUs': plan.name, 'days': plan.days.text(2), 'GPU-hours': f'{plan.gpu_hours.likely:,.0f}',
                'GPU cost': f'${plan.gpu_dollars.likely:,.0f}' if has_price else '',
                'whole cost': f'${plan.dollars.text(0)}' if has_price else '',
                'per GPU-hour': plan.price.describe(self.today) if has_price else 'no price'}

    @property
    def not_within(self) -> list[str]:
        """Return sentences about the GPUs that are not certainly within the limits, each with its distances."""
        groups = grouped((standing(plan, self.limits), f'{plan.name}, {distances(plan, self.limits)}')
                         for plan in self.plans)
        sentences = [f'{name.capitalize()}: {"; ".join(groups[name])}.'
                     for name in (PROBABLY_WITHIN, PROBABLY_OUTSIDE, OUTSIDE) if name in groups]
        impossible = grouped(((outcome.reason, outcome.remedy), outcome.name) for outcome in self.outcomes
                             if isinstance(outcome, Impossible))
        sentences += [f'Impossible: {", ".join(names)}, because {reason}. This would help: {remedy}.'
                      for (reason, remedy), names in impossible.items()]
        if any(plan.price is None for plan in self.plans):
            sentences.append('For a GPU without a price, give --dollars_per_gpu_hour NAME=DOLLARS, or NAME=0 if it is '
                             'your own.')
        return sentences

    @property
    def details(self) -> list[str]:
        """Return sentences about the ranges, the flags, and what is assumed."""
        network = network_sentence(part.setup for plan in self.plans for part in plan.training)
        sentences = [*self.ranges(), *self.flags(), *self.arithmetic(), *self.corrections, self.storage(), network]
        preemptions = self.training.preemptions
        if math.isfinite(preemptions.hours):
            sentences.append(f'Each machine is preempted every {preemptions.hours:g} hours on average. Each time, '
                             f'{60 * RESTART_HOURS:.0f} minutes pass until the work goes on, and a training repeats '
                             f'half of a save interval of {preemptions.batches} steps.')
        sentences.append('Not included: waiting for data, evaluations and failures.')
        return [sentence for sentence in sentences if sentence]

    def ranges(self) -> list[str]:
        """Return sentences that say for each part how wide its range is, and why."""
        groups = grouped((part.speed.basis, (plan, part.name)) for plan in self.plans for part in plan.parts)
        sentences = []
        for (error, source, ratio, missing), chosen in groups.items():
            how = source if source == FORECAST else f'{source}, {ratio:.2f} of the forecast speed'
            if missing:
                how += f', because this program never measured {and_list(missing)}'
            plans_by_parts = grouped((and_list(parts), plan) for plan, parts in grouped(chosen).items())
            where = '; '.join(f'{parts} on {self.names(plans)}' for parts, plans in plans_by_parts.items())
            sentences.append(f'Range of {100 * error:.0f} % for {where}: {how}.')
        errors = dict.fromkeys(error for error, *_ in groups)
        return sentences + [f'A range of {100 * error:.0f} %: {RANGE_REASONS[error]}.' for error in errors]

    def flags(self) -> list[str]:
        """Return a sentence about the flags of each plan."""
        by_flags = grouped((', then '.join(dict.fromkeys(' '.join(switches(part)) for part in plan.training)), plan)
                           for plan in self.plans)
        texts = [f'{text} for {self.names(plans)}' for text, plans in by_flags.items()]
        return [f'Flags, after {RECIPE}: {"; ".join(texts)}.'] if texts else []

    def arithmetic(self) -> list[str]:
        """Return a sentence for each change of the arithmetic, with the days that it would give.

        It names the first plans, and every plan whose standing to the limits would change.
        """
        texts = []
        for number, plan in enumerate(self.plans):
            for how, changed in self.changes[plan].items():
                matters = standing(plan, self.limits) != standing(replace(changed, price=plan.price), self.limits)
                is_shown = number < MOST_CHANGED and abs(plan.days.likely / changed.days.likely - 1) >= SMALLEST_CHANGE
                if matters or is_shown:
                    days = f'{changed.days.likely:.2f} instead of {plan.days.likely:.2f} days'
                    texts.append((how, f'{plan.name} {days}'))
        return [f'With {how}: {", ".join(days)}.' for how, days in grouped(texts).items()]

    def storage(self) -> str:
        """Return a sentence about storage and traffic of the first plan."""
        if not self.plans:
            return ''
        storage = self.plans[0].storage
        return (f'Storage of {self.plans[0].name}: {rounded(storage.images_tb)} TB of images, '
                f'{rounded(storage.latents_tb)} TB of latents and {rounded(storage.checkpoints_tb)} TB of checkpoints '
                f'at ${storage.dollars_per_tb_month:g} per TB and month (--dollars_per_tb_month). Traffic: '
                f'{rounded(storage.read_tb)} TB read at ${storage.dollars_per_tb_read:g} per TB '
                '(--dollars_per_tb_read).')

    @property
    def first_steps(self) -> list[tuple[str, list[str]]]:
        """Return what to do first: sentences, each with commands: measure up to two plans, plan again, and train."""
        to_measure = []
        for plan in [plan for plan in self.verdict.best if plan.unmeasured][:2]:
            commands = tuple(measuring_command(plan, part) for part in plan.unmeasured)
            to_measure.append((commands, self.measuring_sentence(plan)))
        steps = [('\n'.join(sentences), list(commands)) for commands, sentences in grouped(to_measure).items()]
        if steps:
            records = [*self.records, *([] if 'results.jsonl' in self.records else ['results.jsonl'])]
            steps.append(('Then ask again with the measurements:',
                          [shlex.join(['python', 'plan.py', *records, *self.command])]))
        best = self.verdict.best
        if best and standing(best[0], self.limits) in (WITHIN, PROBABLY_WITHIN):
            steps.append(whole_training(best[0]))
        return steps

    def measuring_sentence(self, plan: Plan) -> str:
        """Return what to measure of a plan, where, how long it takes, what it costs, and the speed it needs."""
        on_one_machine = ENCODED_PER_GPU * plan.num_devices // plan.machines  # images
        whats = {TRAIN: f'{MEASURED_STEPS} steps',
                 ENCODE: f'the encoding of {on_one_machine:,} IMAGES from convert.py'}
        what = and_list(dict.fromkeys(whats[part.kind] for part in plan.unmeasured))
        sizes = and_list(dict.fromkeys(f'{part.setup.image_size} px' for part in plan.unmeasured))
        images = {TRAIN: (MEASURED_STEPS + WARMUP_STEPS) * self.training.base.batch_size,
                  ENCODE: ENCODED_PER_GPU * plan.num_devices}  # one machine takes as long for its part of them
        minutes = sum(MINUTES_TO_START + images[part.kind] / part.speed.images_per_sec / 60 for part in plan.unmeasured)
        cost = f' and ${minutes / 60 * plan.num_devices * plan.price.dollars:,.2f}' if plan.price else ''
        is_listed = plan.price and plan.price.provider != YOUR_PRICE
        place = f'{plan.name} from {plan.price.provider}' if is_listed else plan.name
        sentence = f'Measure {what}, at {sizes}, on {place}: about {minutes:.0f} minutes{cost}.'
        needed = lowest_speed(plan, self.limits)
        if needed is not None:
            speeds = ' or '.join(f'{rounded(part.speed.images_per_sec * needed)} images/s at {part.setup.image_size} px'
                                 for part in plan.training)
            sentence += (f' Stop if the training is slower than {speeds}, {math.ceil(100 * needed) / 100:.2f} of the '
                         'forecast.')
        return sentence

    def rows(self) -> list[dict[str, Any]]:
        """Return a row of unrounded numbers for each of the GPUs that were asked for."""
        rows = []
        for outcome in self.outcomes:
            row = {'gpus': outcome.num_devices, 'gpu': outcome.card.name}
            rows.append(row)
            if isinstance(outcome, Impossible):
                row |= {'standing': 'impossible', 'reason': outcome.reason, 'remedy': outcome.remedy}
                continue
            row['standing'] = standing(outcome, self.limits) if self.limits else ''
            for figure in ('days', 'gpu_hours', 'gpu_dollars', 'storage_dollars', 'dollars'):
                value = getattr(outcome, figure)
                row |= {figure: value.likely, f'{figure}_least': value.least, f'{figure}_most': value.most}
            if outcome.price:
                row |= {'dollars_per_gpu_hour': outcome.price.dollars, 'provider': outcome.price.provider,
                        'price_date': outcome.price.date, 'price_is_old': outcome.price.is_old(self.today)}
            for number, part in enumerate(outcome.parts, start=1):
                row |= {f'part_{number}': part.name, f'part_{number}_images': part.images,
                        f'part_{number}_days': part.days.likely} | {
                            f'part_{number}_{key}': value for key, value in vars(part.speed).items()}
        return rows

    @property
    def text(self) -> str:
        """Return the answer for a terminal."""
        blocks = [filled([sentence]) for sentence in [*self.verdict.sentences, self.title]]
        for has_price in (True, False):
            rows = [self.cells(plan) for plan in self.plans if (plan.price is not None) == has_price]
            if rows:
                blocks.append(text_table(rows, ['GPUs', 'per GPU-hour']))
        blocks.append(filled(self.not_within))
        for sentence, commands in self.first_steps:
            blocks.append('\n'.join([filled(sentence.splitlines()), *(shell_lines(command) for command in commands)]))
        blocks.append(filled(self.details))
        return '\n\n'.join(filter(None, blocks))


def switches(part: Part) -> list[str]:
    """Return the flags of a part that trains besides those of RECIPE and its image size."""
    return [f'--{INPUT_FLAGS[part.setup.latents]}', *flags_of(part.setup)]


def whole_training(plan: Plan) -> tuple[str, list[str]]:
    """Return a sentence and the command that trains a plan, where the recipe for one machine can train it."""
    setups = {replace(part.setup, image_size=None, model_name=SD2_BASE) for part in plan.training}
    sizes = [part.setup.image_size for part in plan.training]
    if plan.machines > 1 or len(setups) > 1 or sizes != [size for _, size in SD2_SCHEDULE]:
        return f'docs/two-phases.md says how to train {plan.name} with these flags.', []
    [setup] = setups
    variables = '' if setup.latents else 'LATENTS= '
    flags = flags_of(setup)
    if flags:
        variables += f'PHASE_FLAGS={shlex.quote(" ".join(["@recipes/fastest.txt", *flags]))} '
    for number, (part, (steps, _)) in enumerate(zip(plan.training, SD2_SCHEDULE, strict=True), start=1):
        if part.steps != steps:
            variables += f'STEPS_{number}={part.steps} '
    model = plan.training[0].setup.model_name
    model = 'FOLDER' if model == SD2_BASE else shlex.quote(model)
    start = 'If the measurements agree, train' if plan.unmeasured else 'Train'
    return (f'{start} it on {plan.name}, with your images in the folder photos and the weights of the encoders in '
            f'{model} (docs/two-phases.md):',
            [f'{variables}MODEL={model} SOURCE=photos sh recipes/stable-diffusion-2.sh'])


def measuring_command(plan: Plan, part: Part) -> str:
    """Return the command that measures a part of a plan: a training on all of its machines, an encoding on one."""
    size = part.setup.image_size
    if part.kind == ENCODE:
        mode = {True: ['--compile'], False: []}.get(part.setup.compile, [f'--compile {part.setup.compile}'])
        flags = [flag for flag in flags_of(part.setup) if flag.startswith(('--model_name', '--encoder_precision'))]
        return ' '.join(['python encode.py --remote IMAGES --out', f'trial-latents-{size} --image_size {size}', *flags,
                         *mode])
    launcher = 'composer'  # on all GPUs of a machine
    each = plan.num_devices // plan.machines
    if plan.machines == 1 and each != plan.card.gpus_per_node:
        launcher += f' -n {each}'
    if plan.machines > 1:
        launcher += (f' -n {each} --world_size {plan.num_devices} --node_rank $N --base_rank $(({each} * N)) '
                     '--master_addr $HOST --master_port 29500')
    return ' '.join([launcher, 'benchmark.py', RECIPE, *switches(part), f'--image_size {size}',
                     f'--measure_batches {MEASURED_STEPS}'])


def shell_lines(command: str) -> str:
    """Return a shell command in lines of at most WIDTH characters, none of which ends between quotes."""
    whole = re.sub(QUOTED, lambda quoted: quoted[0].replace(' ', '\0'), command)
    lines = textwrap.wrap(whole, WIDTH - 2, initial_indent=4 * ' ', subsequent_indent=8 * ' ', break_on_hyphens=False,
                          break_long_words=False)
    return ' \\\n'.join(lines).replace('\0', ' ')

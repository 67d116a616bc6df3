"""The whole answer of plan.py: title, verdict, table, notes and first steps, from which text, CSV and HTML are made."""
import datetime
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sdbench.errors import plural
from sdbench.forecast.forecast import network_sentence
from sdbench.forecast.speed import LARGEST_ERROR
from sdbench.plan.commands import MEASURED_STEPS, measuring_command, shell_lines, switches, training_command
from sdbench.plan.measured import MEASURED_ERROR, UNSEEN_ERROR
from sdbench.plan.parts import ENCODE, FORECAST, RESTART_HOURS, TRAIN, Impossible, Plan
from sdbench.plan.prices import YOUR_PRICE
from sdbench.plan.search import RECIPE, Training
from sdbench.plan.verdict import INSIDE, UNSURE, Limit, Verdict, and_list, distances, judge, lowest_speed, standing
from sdbench.records.metrics import filled, rounded, text_table
from sdbench.report.trainings import grouped

RANGE_REASONS = {
    MEASURED_ERROR: 'the same GPUs and code differ by 2 to 4 % between MLPerf submitters',
    LARGEST_ERROR: 'the largest error of the forecast on published speeds that were not used to fit it',
    UNSEEN_ERROR: 'published forecasts of this kind were off by up to 28 % on GPUs that their authors had not measured'}
WARMUP_STEPS = 3
ENCODED_PER_GPU = 3200  # images to encode for a measurement: 100 batches on each GPU
MOST_CHANGED = 4  # plans for which a change of the arithmetic is shown in any case
SMALLEST_CHANGE = 0.005  # fraction of the days below which a change is not worth a line
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
        return sorted(plans, key=lambda plan: (plan.price is None, plan.dollars.likely if plan.price else 0,
                                               plan.days.likely))

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
        return {'GPUs': plan.name, 'days': plan.days.text(2), 'GPU-hours': rounded(plan.gpu_hours.likely),
                'GPU cost': f'${rounded(plan.gpu_dollars.likely)}' if has_price else '',
                'whole cost': f'${plan.dollars.text(0)}' if has_price else '',
                'per GPU-hour': plan.price.describe(self.today) if has_price else 'no price'}

    @property
    def not_within(self) -> list[str]:
        """Return sentences about the GPUs that are not certainly within the limits, each with its distances."""
        groups = grouped((standing(plan, self.limits),
                          ', '.join(filter(None, [plan.name, distances(plan, self.limits)]))) for plan in self.plans)
        sentences = [f'{name.capitalize()}: {"; ".join(groups[name])}.' for name in UNSURE if name in groups]
        impossible = grouped(((outcome.reason, outcome.remedy), outcome.name) for outcome in self.outcomes
                             if isinstance(outcome, Impossible))
        sentences += [f'Impossible: {", ".join(names)}, because {reason}. This would help: {remedy}.'
                      for (reason, remedy), names in impossible.items()]
        if any(plan.price is None for plan in self.plans):
            sentences.append('For a GPU without a price, give --dollars_per_gpu_hour NAME=DOLLARS, or NAME=0 if it is '
                             'your own.')
        stored = [plan.name for plan in self.plans
                  if plan.price and plan.storage_dollars.likely > plan.gpu_dollars.likely]
        if stored:
            sentences.append(f'Most of the cost of {and_list(stored)} is for storage. If you have disks for the data, '
                             'give --dollars_per_tb_month 0.')
        if any(plan.price and plan.price.is_old(self.today) for plan in self.plans):
            sentences.append('Ranges are about speeds, not prices: look up each price that is old or has no date.')
        larger = [plan.name for plan in self.plans
                  if plan.price and (plan.price.gpus_per_machine or 0) > plan.num_devices // plan.machines]
        if larger:
            sentences.append(f'The price of {and_list(larger)} is per GPU of a machine with more GPUs, which may be '
                             'rented only as a whole.')
        return sentences

    @property
    def details(self) -> list[str]:
        """Return sentences about the ranges, the flags, and what is assumed."""
        sentences = [*self.ranges(), *self.flags(), *self.arithmetic(), *self.corrections]
        for plan in self.plans[:1]:
            kept = plan.storage
            sentences.append(f'Storage of {plan.name}: {rounded(kept.images_tb)} TB of images, '
                             f'{rounded(kept.latents_tb)} TB of latents and {rounded(kept.checkpoints_tb)} TB of '
                             f'checkpoints at ${kept.dollars_per_tb_month:g} per TB and month '
                             f'(--dollars_per_tb_month). Traffic: {rounded(kept.read_tb)} TB read at '
                             f'${kept.dollars_per_tb_read:g} per TB (--dollars_per_tb_read).')
        sentences.append(network_sentence(part.setup for plan in self.plans for part in plan.training))
        preemptions = self.training.preemptions
        if math.isfinite(preemptions.hours):
            sentences.append(f'Each machine is assumed to be preempted every {preemptions.hours:g} h on average. Each '
                             f'time, {60 * RESTART_HOURS:.0f} minutes pass until the work goes on, and a training '
                             f'repeats half of a save interval of {preemptions.batches} steps.')
        sentences.append('Not included: waiting for data, evaluations and failures.')
        return [sentence for sentence in sentences if sentence]

    def ranges(self) -> list[str]:
        """Return sentences that say for each part how wide its range is, and why."""
        pairs = []
        for plan in self.plans:
            parts = grouped((replace(part.speed, images_per_sec=0), part.name) for part in plan.parts)
            pairs += [((why, and_list(names)), plan) for why, names in parts.items()]
        groups = grouped(pairs)
        sentences = []
        for (why, names), plans in groups.items():
            how = why.source if why.source == FORECAST else f'{why.source}, {why.ratio:.2f} of the forecast speed'
            if why.missing:
                how += f', because this program never measured {and_list(why.missing)}'
            sentences.append(f'Range of {100 * why.error:.0f} % for {names} on {self.names(plans)}: {how}.')
        errors = dict.fromkeys(why.error for why, _ in groups)
        return sentences + [f'A range of {100 * error:.0f} %: {RANGE_REASONS[error]}.' for error in errors]

    def flags(self) -> list[str]:
        """Return a sentence about the flags of each plan."""
        by_flags = grouped((', then '.join(dict.fromkeys(' '.join(switches(part)) for part in plan.training)), plan)
                           for plan in self.plans)
        texts = [f'{text} for {self.names(plans)}' for text, plans in by_flags.items()]
        return [f'Flags, after {RECIPE}: {"; ".join(texts)}.'] if texts else []

    def arithmetic(self) -> list[str]:
        """Return a sentence for each change of the arithmetic, with the days that it would give.

        It names the first plans, and every plan whose standing to the limits would change, unless the days hardly do.
        """
        texts = []
        for number, plan in enumerate(self.plans):
            for how, changed in self.changes[plan].items():
                matters = number < MOST_CHANGED or standing(plan, self.limits) != standing(changed, self.limits)
                if matters and abs(plan.days.likely / changed.days.likely - 1) >= SMALLEST_CHANGE:
                    texts.append((how, f'{plan.name} {rounded(changed.days.likely, 2)} instead of '
                                  f'{rounded(plan.days.likely, 2)} days'))
        return [f'With {how}: {", ".join(days)}.' for how, days in grouped(texts).items()]

    @property
    def first_steps(self) -> list[tuple[str, list[str]]]:
        """Return what to do first: sentences, each with commands: measure up to two plans, plan again, and train."""
        to_measure = grouped((tuple(measuring_command(plan, part) for part in plan.unmeasured),
                              self.measuring_sentence(plan)) for plan in self.verdict.to_measure)
        steps = [('\n'.join(sentences), list(commands)) for commands, sentences in to_measure.items()]
        if steps:
            records = [*self.records, *([] if 'results.jsonl' in self.records else ['results.jsonl'])]
            steps.append(('Then ask again with the measurements:',
                          [shlex.join(['python', 'plan.py', *records, *self.command])]))
        for plan in self.verdict.best[:1]:
            if standing(plan, self.limits) in INSIDE:
                steps.append(self.training_step(plan))
        return steps

    def training_step(self, plan: Plan) -> tuple[str, list[str]]:
        """Return a sentence and the command that trains a plan, if the recipe for one machine can train it."""
        command = training_command(plan)
        if command is None:
            page = 'two-phases' if len(self.training.phases) == 2 else 'training'
            return f'docs/{page}.md says how to train the model on {plan.name}; the flags are listed below.', []
        start = 'If the measurements confirm this, train' if plan.unmeasured else 'Train'
        sentence = (f'{start} it on {plan.name}, with your images in the folder photos and the weights of the encoders '
                    'in MODEL (docs/two-phases.md).')
        first, second = self.training.phases
        if second.different_images != first.different_images:
            sentence += (f' Give the {second.different_images:,} images of the second phase as SOURCE_2, with EVAL, or '
                         'it uses those of the first phase.')
        return sentence, [command]

    def measuring_sentence(self, plan: Plan) -> str:
        """Return what to measure of a plan, where, how long it takes, what it costs, and the speed it needs."""
        # Say what is measured. An encoding runs on one of the machines, with a part of the user's images.
        parts = plan.unmeasured
        on_one_machine = min([ENCODED_PER_GPU * plan.num_devices // plan.machines,
                              *(part.images for part in parts if part.kind == ENCODE)])
        whats = {TRAIN: f'{MEASURED_STEPS} steps',
                 ENCODE: f'the encoding of {on_one_machine:,} IMAGES from convert.py'}
        what = and_list(dict.fromkeys(whats[part.kind] for part in parts))
        sizes = and_list(dict.fromkeys(f'{part.setup.image_size} px' for part in parts))
        has_provider = plan.price and plan.price.provider != YOUR_PRICE
        place = f'{plan.name} from {plan.price.provider}' if has_provider else plan.name

        # Calculate the minutes and the cost. One machine encodes its images as fast as all machines encode theirs.
        images = {TRAIN: (MEASURED_STEPS + WARMUP_STEPS) * self.training.base.batch_size,
                  ENCODE: on_one_machine * plan.machines}
        minutes = sum(MINUTES_TO_START + images[part.kind] / part.speed.images_per_sec / 60 for part in parts)
        cost = f' and ${math.ceil(minutes / 60 * plan.num_devices * plan.price.dollars):,}' if plan.price else ''
        sentence = f'Measure {what}, at {sizes}, on {place}: about {minutes:.0f} minutes{cost}.'

        # Say which speed the limits need.
        training = [part for part in parts if part.kind == TRAIN]
        needed = lowest_speed(plan, self.limits)
        if training and needed is not None:
            speeds = ' or '.join(f'{rounded(part.speed.images_per_sec * needed)} images/s at {part.setup.image_size} px'
                                 for part in training)
            sentence += (f' Stop if the training is slower than {speeds}, {math.ceil(100 * needed) / 100:.2f} of the '
                         f'{training[0].speed.source}.')
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
            for metric in ('days', 'gpu_hours', 'gpu_dollars', 'storage_dollars', 'dollars'):
                value = getattr(outcome, metric)
                row |= {metric: value.likely, f'{metric}_least': value.least, f'{metric}_most': value.most}
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
        for has_price in (True, False):  # a table without costs has room for long names
            rows = [self.cells(plan) for plan in self.plans if (plan.price is not None) == has_price]
            if rows:
                blocks.append(text_table(rows, ['GPUs', 'per GPU-hour']))
        blocks.append(filled(self.not_within))
        for sentence, commands in self.first_steps:
            blocks.append('\n'.join([filled(sentence.splitlines()), *(shell_lines(command) for command in commands)]))
        blocks.append(filled(self.details))
        return '\n\n'.join(filter(None, blocks))

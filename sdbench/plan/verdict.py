"""Compare plans with limits and with each other, but not more precisely than their ranges allow."""
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sdbench.plan.parts import Plan, Range
from sdbench.records.metrics import rounded

# How a plan stands to the limits. The likely numbers decide between within and outside, so a wider range makes a
# statement less certain, and never turns 'outside' into 'within'.
WITHIN, PROBABLY_WITHIN = 'within', 'probably within'
PROBABLY_OUTSIDE, OUTSIDE = 'probably outside', 'outside'
NO_PRICE = 'no price'
INSIDE = (WITHIN, PROBABLY_WITHIN)
UNSURE = (PROBABLY_WITHIN, PROBABLY_OUTSIDE, OUTSIDE, NO_PRICE)  # not certainly within
FACTORS = (0.01, 2.0)  # lowest and highest fraction of the forecast speed for which a plan is tried
# What the verdict says, by metric: of the best of several plans, of the only one, and of those that are equal
BEST = {'dollars': 'Cheapest', 'days': 'Fastest'}
ALONE = {'dollars': 'Cost', 'days': 'Duration'}
COMPARED = {'dollars': 'cost', 'days': 'days'}
DOUBTS = {  # of a plan that the verdict names, by its standing
    PROBABLY_WITHIN: 'Only probably within the limits: {}. The slow end of the range exceeds one.',
    PROBABLY_OUTSIDE: 'Probably outside the limits: {}. The fast end of the range is within them.',
    NO_PRICE: 'Without a price it is not known whether the limits hold for {}.'}


@dataclass(frozen=True)
class Limit:
    """A limit for a metric of a plan: 'dollars' or 'days'."""
    metric: str
    most: float

    @property
    def name(self) -> str:
        if self.metric == 'dollars':
            return f'${rounded(self.most)}'
        return '1 day' if self.most == 1 else f'{self.most:g} days'

    def of(self, plan: Plan) -> Range:
        """Return the number of a plan as a fraction of the limit."""
        return getattr(plan, self.metric) * (1 / self.most)


def standing(plan: Plan, limits: Sequence[Limit]) -> str:
    """Return how a plan stands to the limits: WITHIN, PROBABLY_WITHIN, PROBABLY_OUTSIDE, OUTSIDE or NO_PRICE."""
    fractions = [limit.of(plan) for limit in limits]
    if any(fraction.least > 1 for fraction in fractions):
        return OUTSIDE
    if any(fraction.likely > 1 for fraction in fractions):
        return PROBABLY_OUTSIDE
    if any(math.isnan(fraction.likely) for fraction in fractions):
        return NO_PRICE
    return PROBABLY_WITHIN if any(fraction.most > 1 for fraction in fractions) else WITHIN


def distances(plan: Plan, limits: Sequence[Limit]) -> str:
    """Return the fraction of each limit that a plan takes, such as '108 % of 42 days (85 to 139 %)'."""
    percentages = {limit.name: limit.of(plan) * 100 for limit in limits}
    return ' and '.join(f'{share.likely:.0f} % of {limit} ({share.least:.0f} to {share.most:.0f} %)'
                        for limit, share in percentages.items() if not math.isnan(share.likely))


def lowest_speed(plan: Plan, limits: Sequence[Limit]) -> float | None:
    """Return the fraction of its speeds with which a plan just keeps the limits; None if no fraction in FACTORS does.

    It is above 1 for a plan outside the limits. Days and dollars fall with the speed, so bisection finds the fraction.
    """
    def keeps(factor: float) -> bool:
        slower = plan.at_speed(factor)
        return all(limit.of(slower).likely <= 1 for limit in limits)

    low, high = FACTORS
    if not limits or not keeps(high):
        return None
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if keeps(middle) else (middle, high)
    return high


class Verdict(NamedTuple):
    """What is said of some plans."""
    sentences: list[str]  # the answer first
    best: list[Plan]  # the best plan within the limits, and those that may be better; [] if all are surely outside

    @property
    def to_measure(self) -> list[Plan]:
        """Return at most two plans whose measurements may change the answer."""
        return [plan for plan in self.best if plan.unmeasured][:2]


def judge(plans: Sequence[Plan], limits: Sequence[Limit]) -> Verdict:
    """Return the verdict on some plans. It compares their dollars, unless none costs anything, and their days."""
    if not plans:
        return Verdict(['This training is possible on none of these GPUs.'], [])
    standings = {plan: standing(plan, limits) for plan in plans}
    inside = [plan for plan in plans if standings[plan] in INSIDE]
    rivals = [plan for plan in plans if standings[plan] != OUTSIDE]  # each may be the best within the limits
    known = [plan for plan in plans if standings[plan] != NO_PRICE]
    within = ' and '.join(limit.name for limit in limits)
    if inside:
        metrics = [metric for metric in BEST if metric == 'days' or any(plan.dollars.most > 0 for plan in inside)]
        ties = {metric: best_and_ties(inside, rivals, metric) for metric in metrics}
        best = ties[metrics[0]]
        named = [plan for plan in rivals if any(plan in tied for tied in ties.values())]
        sentences = compare(ties, f' within {within}' if limits else '', BEST if len(plans) > 1 else ALONE,
                            all(plan.price for plan in rivals))
    elif known:
        named = [min(known, key=lambda plan: max(limit.of(plan).likely for limit in limits))]
        best = [plan for plan in named if plan in rivals]
        which = 'No plan with a price' if len(known) < len(plans) else 'No plan'
        sentences = [f'{which} is within {within}. The nearest is {named[0].name}: {distances(named[0], limits)}.']
    else:
        best = named = plans[:1]
        sentences = [f'No plan has a price, so none can be compared with {within}: give --dollars_per_gpu_hour.']
    for how, doubt in DOUBTS.items():
        doubtful = [plan.name for plan in named if standings[plan] == how]
        if doubtful:
            sentences.append(doubt.format(and_list(doubtful)))
    return Verdict(sentences, best)


def best_and_ties(inside: Sequence[Plan], rivals: Sequence[Plan], metric: str) -> list[Plan]:
    """Return the plan with the lowest metric among `inside`, and then the rivals that may have a lower one."""
    known = [plan for plan in inside if not math.isnan(getattr(plan, metric).likely)]
    best = min(known, key=lambda plan: getattr(plan, metric).likely)
    others = [plan for plan in rivals if plan != best and getattr(plan, metric).least <= getattr(best, metric).most]
    return [best, *sorted(others, key=lambda plan: getattr(plan, metric).likely)]


def compare(ties: dict[str, list[Plan]], where: str, labels: dict[str, str], have_prices: bool) -> list[str]:
    """Return a sentence for each metric, which names the best plan, or all plans that may be the best.

    The first one also says which of them to measure. `where` names the limits, such as ' within $30,000'.
    """
    sentences = []
    for metric, tied in ties.items():
        unpriced = ' (some GPUs have no price)' if metric == 'dollars' and not have_prices else ''
        if len(tied) == 1:
            sentences.append(f'{labels[metric]}{where}{unpriced}: {tied[0].name}, {tied[0].text_of(metric)}.')
            continue
        how = f'cannot be told apart by {COMPARED[metric]}'
        if any(getattr(plan, metric).most < getattr(tied[0], metric).least for plan in tied):
            # A plan is better, whatever its exact numbers are, but it is probably outside the limits.
            how = f'may each be the {BEST[metric].lower()}'
        sentence = f'{and_list(plan.name for plan in tied)} {how}{where}{unpriced}'
        if not sentences:
            to_measure = [plan.name for plan in Verdict([], tied).to_measure]
            sentence += f': measure {and_list(to_measure)}' if to_measure else ', and all of them are measured'
        sentences.append(f'{sentence}.')
    return sentences


def and_list(names: Iterable[str]) -> str:
    """Return names as a list in words: 'A', 'A and B', 'A, B and C'."""
    *first, last = names
    return f'{", ".join(first)} and {last}' if first else last

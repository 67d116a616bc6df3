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
FACTORS = (0.01, 2.0)  # lowest and highest fraction of the forecast speed for which a plan is tried


@dataclass(frozen=True)
class Limit:
    """A limit for the `dollars` or the `days` of a plan."""
    figure: str
    most: float

    @property
    def name(self) -> str:
        if self.figure == 'dollars':
            return f'${rounded(self.most)}'
        return '1 day' if self.most == 1 else f'{self.most:g} days'

    def of(self, plan: Plan) -> Range:
        """Return the number of a plan as a fraction of the limit."""
        return getattr(plan, self.figure) * (1 / self.most)


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
    texts = []
    for limit in limits:
        share = limit.of(plan) * 100
        if math.isnan(share.likely):  # no price
            continue
        texts.append(f'{share.likely:.0f} % of {limit.name} ({share.least:.0f} to {share.most:.0f} %)')
    return ' and '.join(texts)


def best_and_ties(plans: Sequence[Plan], figure: str) -> list[Plan]:
    """Return the plan with the lowest number, and then the others whose ranges overlap with its range."""
    known = [plan for plan in plans if not math.isnan(getattr(plan, figure).likely)]
    known.sort(key=lambda plan: getattr(plan, figure).likely)
    return [plan for plan in known if getattr(plan, figure).overlaps(getattr(known[0], figure))]


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
    best: list[Plan]  # the best plan, and those that cannot be told apart from it; [] if no plan is possible


def judge(plans: Sequence[Plan], limits: Sequence[Limit]) -> Verdict:
    """Return the verdict on some plans. They are compared by their dollars, or by their days if none has a price."""
    if not plans:
        return Verdict(['This training is possible on none of these GPUs.'], [])
    standings = {plan: standing(plan, limits) for plan in plans}
    inside = [plan for plan in plans if standings[plan] in (WITHIN, PROBABLY_WITHIN)]
    within = ' and '.join(limit.name for limit in limits)
    if not inside:
        # Name the plan that exceeds its limits least.
        known = [plan for plan in plans if standings[plan] != NO_PRICE]
        if not known:
            sentence = f'No plan has a price, so none can be compared with {within}: give --dollars_per_gpu_hour.'
            return Verdict([sentence], [plans[0]])
        closest = min(known, key=lambda plan: max(limit.of(plan).likely for limit in limits))
        which = 'No plan with a price' if len(known) < len(plans) else 'No plan'
        sentences = [f'{which} is within {within}. The nearest is {closest.name}: {distances(closest, limits)}.']
        if standings[closest] == PROBABLY_OUTSIDE:
            sentences.append('The fast end of its range is within the limits, so a measurement may change this answer.')
        return Verdict(sentences, [closest])

    # Name the plan that costs least, or those that cannot be told apart, and then the fastest.
    prices = [plan for plan in inside if plan.price]
    ties = {figure: best_and_ties(inside, figure) for figure in (['dollars', 'days'] if prices else ['days'])}
    sentences = []
    for number, (figure, tied) in enumerate(ties.items()):
        where = f' within {within}' if limits and number == 0 else ''
        if figure == 'dollars' and len(prices) < len(inside):
            where += ' (some GPUs have no price)'
        sentences.append(comparison(tied, figure, where))
    unsure = [plan.name for plan in inside if standings[plan] == PROBABLY_WITHIN
              and any(plan in tied for tied in ties.values())]
    if unsure:
        sentences.append(f'Only probably within the limits: {and_list(unsure)}. The slow end of the range exceeds one.')
    return Verdict(sentences, next(iter(ties.values())))


def comparison(tied: Sequence[Plan], figure: str, where: str) -> str:
    """Return a sentence that names the best plan by days or cost, or those that cannot be told apart from it.

    `where` names the limits that they keep, such as ' within $30,000'.
    """
    if len(tied) == 1:
        best = {'dollars': 'Cheapest', 'days': 'Fastest'}[figure]
        return f'{best}{where}: {tied[0].name}, {tied[0].text_of(figure)}.'
    to_measure = [plan.name for plan in tied if plan.unmeasured][:2]
    advice = f'measure {and_list(to_measure)}' if to_measure else 'their measurements differ by less than their ranges'
    by = {'dollars': 'by cost', 'days': 'by days'}[figure]
    return f'{and_list([plan.name for plan in tied])} cannot be told apart {by}{where}: {advice}.'


def and_list(names: Iterable[str]) -> str:
    """Return names as a list in words: 'A', 'A and B', 'A, B and C'."""
    *first, last = names
    return f'{", ".join(first)} and {last}' if first else last

"""plan.py: every plan adds up, says how sure it is, and is the same in text, CSV and HTML.

Most tests use a simple forecast of their own, which any GPU count and switch changes, so they are quick and know the
right answer.
"""
import csv
import datetime
import html
import itertools
import json
import math
import re
import shlex
import shutil
import statistics
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import plan
from sdbench.flags.parser import parse
from sdbench.flags.train import ENCODERS, SD2_BASE, Train, divisors
from sdbench.forecast.forecast import DoesNotFit, Forecast
from sdbench.gpus import CARDS, Card, peak_of
from sdbench.models.folders import BUILT_IN
from sdbench.plan import measured
from sdbench.plan.commands import flags_of, shell_lines
from sdbench.plan.parts import ENCODE, FORECAST, MEASURED, TRAIN, Impossible, Part, Plan, Preemptions, Speed
from sdbench.plan.prices import Price, Storage, read_prices
from sdbench.plan.search import recipe_flags
from sdbench.plan.verdict import OUTSIDE, PROBABLY_OUTSIDE, WITHIN, Limit, judge, lowest_speed, standing
from sdbench.records import expected
from sdbench.setup import Setup, setup_of_settings

TODAY = datetime.date(2026, 7, 1)
H100, H200, B200 = (CARDS[f'NVIDIA {name}'] for name in ('H100 80GB HBM3', 'H200', 'B200'))
FREE = Storage(0, 0, 0, 0, 0, 0)
ON_H200 = ('--gpu', '8 H200', '--images', 10 ** 6)


def simple_forecast(setup: Setup, card: Card) -> Forecast:
    """Return a forecast by the peak of the GPU. A step needs 20 GiB, and 1 GiB more for each image."""
    setup = replace(setup, device=card.name).with_defaults()
    gib = 12 if setup.gradient_checkpointing else 20
    if card.gib < gib:
        raise DoesNotFit(1, gib, card)
    sizes = divisors(setup.device_batch_size)
    largest = max(size for size in sizes if size == 1 or size * (gib / 20) < card.gib - gib)
    microbatch = setup.microbatch or largest
    work = (setup.image_size / 512) ** 2 * (1 if setup.latents else 2) * (0.6 if setup.compile else 1)
    work *= (1.3 if setup.gradient_checkpointing else 1) * (1 + 1 / microbatch)
    if setup.machines > 1:
        work *= 1 + 50 / (setup.network_gbits or 1000) / (2 if setup.allreduce_precision == 'bf16' else 1)
    peak = peak_of(card.name, setup.precision) or math.nan
    speed = setup.num_devices * peak / 10 / work
    setup = replace(setup, microbatch=microbatch)
    return Forecast(setup, card, gib, speed, Counter(), 4 * speed, False)


@pytest.fixture(autouse=True)
def simple_forecasts(monkeypatch):
    for module in (measured, expected):
        monkeypatch.setattr(module, 'forecast', simple_forecast)


def answer_to(*argv):
    return plan.main([str(word) for word in argv], TODAY)


def record_of(part: Part, card: Card, factor: float = 1.0, **others) -> dict:
    """Return the record of a run with the setup of a part, at `factor` times the speed of its forecast."""
    setup = simple_forecast(part.setup, card).setup
    speed = simple_forecast(part.setup, card)
    record = {key: value for key, value in vars(setup).items() if key not in ('latents', 'microbatch')}
    record |= {'stage': part.kind, 'status': 'complete', 'command': 'benchmark.py', 'num_nodes': part.setup.machines,
               'device': card.name, 'encoders': ENCODERS[setup.latents]}
    record['device_train_microbatch_size'] = setup.microbatch
    record['images_per_sec'] = factor * (speed.images_per_sec if part.kind == TRAIN else speed.encode_images_per_sec)
    return record | others


def answer_after(records: list[dict], *argv):
    """Return the answer to a command line, corrected by these records."""
    Path('results.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
    return answer_to('results.jsonl', *argv)


@pytest.fixture
def plain() -> Plan:
    """The plan for eight H200 that nothing corrects."""
    [plan] = answer_to(*ON_H200).plans
    return plan


CARD_NAMES = st.sampled_from(sorted(CARDS))
GPUS = st.lists(st.tuples(st.sampled_from([1, 4, 8, 12, 16, 64, 100]), CARD_NAMES), min_size=1, max_size=4, unique=True)
CASES = settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture],
                 phases=[Phase.explicit, Phase.generate])


@given(gpus=GPUS, images=st.integers(1, 10 ** 9), steps=st.integers(1, 10 ** 6), dollars=st.floats(1e2, 1e6),
       days=st.floats(1, 1e3), price=st.floats(0, 20), is_spot=st.booleans())
@CASES
def test_every_gpu_is_in_the_answer_whose_text_csv_and_html_agree(tmp_path, capsys, gpus, images, steps, dollars, days,
                                                                  price, is_spot):
    wanted = [f'{count} {name}' for count, name in gpus]
    flags = ['--spot'] if is_spot else []
    answer = answer_to('--gpu', *wanted, '--images', images, '--schedule', f'{steps}@256', f'{steps}@512',
                       '--max_dollars', dollars, '--max_days', days, '--dollars_per_gpu_hour', f'H200={price}', *flags,
                       '--csv', tmp_path / 'plan.csv', '--html', tmp_path / 'plan.html')
    text = ' '.join(capsys.readouterr().out.split())
    page = ' '.join(html.unescape(re.sub('<[^>]+>', ' ', (tmp_path / 'plan.html').read_text())).split())
    rows = list(csv.DictReader((tmp_path / 'plan.csv').open()))
    assert len(answer.outcomes) == len(rows) == len(wanted)
    assert {f'{row["gpus"]} {row["gpu"]}' for row in rows} == {*wanted}
    for outcome in answer.outcomes:
        [row] = [row for row in rows if (row['gpus'], row['gpu']) == (str(outcome.num_devices), outcome.card.name)]
        assert outcome.name in text and outcome.name in page
        if isinstance(outcome, Impossible):
            assert outcome.reason in text and outcome.reason in page and outcome.reason == row['reason']
            assert outcome.remedy in text and outcome.remedy in page
            continue

        # The table has the same figures as the plan.
        for cell in answer.cells(outcome).values():
            assert cell in text and cell in page
        assert float(row['days']) == pytest.approx(outcome.days.likely)
        assert float(row['dollars'] or 'nan') == pytest.approx(outcome.dollars.likely, nan_ok=True)
    assert all(' '.join(sentence.split()) in text and sentence in page for sentence in answer.verdict.sentences)
    assert f'of {images:,} different images' in text


@given(gpus=GPUS, images=st.lists(st.integers(1, 10 ** 9), min_size=2, max_size=2), price=st.floats(0, 20),
       steps=st.integers(1, 10 ** 6), hours=st.one_of(st.none(), st.floats(50, 1000)))
@CASES
def test_parts_add_up_and_the_stated_images_are_those_that_are_priced(gpus, images, price, steps, hours):
    flags = [] if hours is None else ['--hours_between_preemptions', hours, '--save_interval', '10ba']
    answer = answer_to('--gpu', *(f'{count} {name}' for count, name in gpus), '--images', *images, '--schedule',
                       f'{steps}@256', '20@512', '--dollars_per_gpu_hour', price, *flags)
    for one in answer.plans:
        assert one.days.likely == pytest.approx(sum(part.days.likely for part in one.parts))
        hours_of_gpus = sum(part.days.likely for part in one.parts) * 24 * one.num_devices
        assert one.gpu_hours.likely == pytest.approx(hours_of_gpus)
        assert one.dollars.likely == pytest.approx(hours_of_gpus * price + one.storage_dollars.likely)
        assert [part.images for part in one.training] == [steps * 2048, 20 * 2048]
        for part in one.parts:
            of_phase = images[[256, 512].index(part.setup.image_size)]
            assert part.kind == TRAIN or part.images == of_phase
            assert f'of {of_phase:,} different images' in answer.title
            ideal = part.images / part.speed.images_per_sec / 86_400
            assert part.days.likely >= ideal * (1 - 1e-9) if hours else part.days.likely == pytest.approx(ideal)
            assert part.days.least <= part.days.likely <= part.days.most
        on_latents = {part.setup.image_size for part in one.training if part.setup.latents}
        assert on_latents == {part.setup.image_size for part in one.parts if part.kind == ENCODE}


def test_of_the_switches_that_train_alike_the_fastest_that_fit_are_chosen_and_the_ema_stays(capsys):
    answer = answer_to('--gpu', '8 H100 80GB HBM3', '8 4080', '8 3090', '--images', 10 ** 6)
    for one in answer.plans:
        for part in one.training:
            assert part.setup.use_ema and part.setup.allreduce_precision == 'fp32'
            ways = []
            for latents, compile, checkpointing in itertools.product((True, False), repeat=3):
                setup = replace(part.setup, latents=latents, compile=compile, gradient_checkpointing=checkpointing,
                                compile_blocks=None, channels_last=None, microbatch=None)
                try:
                    found = simple_forecast(setup, one.card)
                except DoesNotFit:
                    continue
                ways.append(part.images / found.images_per_sec + latents * 10 ** 6 / found.encode_images_per_sec)
            encodings = [other for other in one.parts if other.kind == ENCODE
                         and other.setup.image_size == part.setup.image_size]
            assert part.days.likely + sum(other.days.likely for other in encodings) == pytest.approx(
                min(ways) / 86_400)
    # A GPU with 15.6 GiB trains with gradient checkpointing, and the flags of each plan are printed.
    text = ' '.join(capsys.readouterr().out.split())
    assert '--use_synth_latents --gradient_checkpointing for 8 x RTX 4080' in text


def test_flags_that_the_user_gives_are_fixed_and_named():
    answer = answer_to('--gpu', 'H200', '--training_flags', '--no-compile --use_synth_data --batch_size 1024')
    [one] = answer.plans
    assert {(part.kind, part.setup.compile, part.setup.batch_size) for part in one.parts} == {(TRAIN, False, 1024)}
    assert [part.images for part in one.training] == [550_000 * 1024, 850_000 * 1024]
    for command in answer.first_steps[0][1]:
        assert '--use_ema --use_synth_data --batch_size 1024 --no-compile --image_size' in command


def test_what_a_flag_gives_later_replaces_what_it_gave_before(tmp_path):
    (tmp_path / 'flags.txt').write_text('--images 790000000 300000000 --gpu "8 H200" "8 B200" --max_days 3\n')
    file = f'@{tmp_path}/flags.txt'
    earlier = answer_to(file, '--images', 1000, '--gpu', '4 L40S', '--max_days', 9)
    alone = answer_to('--images', 1000, '--gpu', '4 L40S', '--max_days', 9)
    assert earlier.title == alone.title and earlier.outcomes == alone.outcomes and earlier.limits == alone.limits


@given(card=CARD_NAMES, count=st.sampled_from([1, 8, 16]), network=st.sampled_from([None, 100.0]),
       hours=st.sampled_from([None, 200]))
@CASES
def test_a_measurement_that_equals_its_forecast_changes_nothing_but_the_range(card, count, network, hours):
    argv = ['--gpu', f'{count} {card}', '--images', 10 ** 6, *(['--network_gbits', network] if network else [])]
    argv += ['--hours_between_preemptions', hours, '--save_interval', '10ba'] if hours else []
    for one in answer_to(*argv).plans:
        [other] = answer_after([record_of(part, one.card) for part in one.parts], *argv).plans
        assert other.days.likely == pytest.approx(one.days.likely)
        assert other.dollars.likely == pytest.approx(one.dollars.likely, nan_ok=True)
        assert {part.speed.error for part in other.parts} == {measured.MEASURED_ERROR}
        assert [part.preemptions for part in other.parts] == [part.preemptions for part in one.parts]
        assert one.days.least < other.days.least and other.days.most < one.days.most


@given(factors=st.lists(st.floats(0.5, 2), min_size=1, max_size=3))
@CASES
def test_forecasts_are_multiplied_by_the_median_of_measured_over_forecast(factors):
    argv = ['--gpu', '8 H200', '8 H100 80GB HBM3', '--images', 10 ** 6, '--training_flags=--compile']
    before = {one.card: one for one in answer_to(*argv).plans}
    part = before[H200].training[0]
    records = [record_of(replace(part, setup=replace(part.setup, num_devices=count, image_size=size)), H200, factor,
                         date=f'2026-01-0{number}')
               for number, (factor, count, size) in enumerate(zip(factors, (1, 2, 4), (64, 128, 256), strict=False), 1)]
    after = {one.card: one for one in answer_after(records, *argv).plans}
    for one, other in zip(before[H200].training, after[H200].training, strict=True):
        expected = statistics.median(factors) * one.speed.images_per_sec
        assert other.speed.images_per_sec == pytest.approx(expected)

    # Neither other GPUs nor encodings are corrected, and save intervals and preemptions stay.
    assert after[H100].days == before[H100].days
    assert [part.speed for part in after[H200].parts if part.kind == ENCODE] == [
        part.speed for part in before[H200].parts if part.kind == ENCODE]


def test_an_encoding_is_corrected_by_encodings(plain):
    [after] = answer_after([record_of(plain.parts[0], H200, 0.5)], *ON_H200).plans
    for part, before in zip(after.parts, plain.parts, strict=True):
        factor = 0.5 if part.kind == ENCODE else 1
        assert part.speed.images_per_sec == pytest.approx(factor * before.speed.images_per_sec)


def test_a_preemption_costs_a_restart_and_half_a_save_interval():
    """500 steps of 2,048 images at 100 images/s are 2.84 hours; of every 6 hours, 0.25 + 2.84 / 2 are lost."""
    setup = Setup(device=H100.name, num_devices=8, image_size=512, batch_size=2048)
    part = Part(TRAIN, 8_640_000, setup, Speed(100, 0), Preemptions(6, 500))
    lost = 0.25 + 500 * 2048 / 2 / 100 / 3600
    assert part.days.likely == pytest.approx(1 / (1 - lost / 6))
    assert replace(part, kind=ENCODE).days.likely == pytest.approx(1 / (1 - 0.25 / 6))
    assert replace(part, setup=replace(setup, num_devices=16)).days.likely == pytest.approx(1 / (1 - lost / 3))
    assert math.isinf(replace(part, preemptions=Preemptions(1, 500)).days.likely)


def one_plan(days: float, error: float, price: float | None = 1.0, card: Card = H100, source: str = FORECAST) -> Plan:
    speed = Speed(1 / days / 86_400 * 1e9, error, source)
    part = Part(TRAIN, 10 ** 9, Setup(device=card.name, num_devices=1, image_size=512, batch_size=1), speed)
    return Plan(card, 1, (part,), None if price is None else Price(None, price, 'x'), FREE)


@given(days=st.floats(1, 100), error=st.floats(0, 1), wider=st.floats(0, 1), most=st.floats(1, 100))
@CASES
def test_a_wider_range_never_turns_outside_into_within(days, error, wider, most):
    limits = [Limit('days', most), Limit('dollars', 24 * most)]
    before, after = (standing(one_plan(days, width), limits) for width in (error, error + wider))
    is_inside = {WITHIN: True, 'probably within': True, PROBABLY_OUTSIDE: False, OUTSIDE: False}
    assert is_inside[before] == is_inside[after]
    if days != pytest.approx(most):
        assert is_inside[before] == (days < most)
    certain = (WITHIN, OUTSIDE)
    assert after not in certain or before in certain


@given(days=st.floats(1, 100), most=st.floats(1, 100), hours=st.floats(5, 50))
@CASES
def test_at_the_slowest_speed_that_is_stated_a_plan_just_keeps_its_limit(days, most, hours):
    one = one_plan(days, 0.1)
    one = replace(one, parts=(replace(one.parts[0], preemptions=Preemptions(hours, 1)),))
    factor = lowest_speed(one, [Limit('days', most)])
    if factor is None:
        assert one.at_speed(2).days.likely > most
    elif factor > 0.0101:
        assert one.at_speed(factor).days.likely == pytest.approx(most)


SIX_GPUS = st.permutations([H100, H200, B200, *(CARDS[f'NVIDIA {name}'] for name in ('L40S', 'A40', 'A10'))])
NUMBERS = st.tuples(st.floats(1, 100), st.floats(0, 0.5), st.sampled_from([None, 0, 1, 2]), st.booleans())


@given(numbers=st.lists(NUMBERS, min_size=2, max_size=6), cards=SIX_GPUS, most=st.floats(1, 100),
       spent=st.floats(10, 5000))
@settings(CASES, max_examples=100)
def test_the_verdict_names_every_plan_that_may_be_the_best_and_none_that_is_outside(numbers, cards, most, spent):
    plans = [one_plan(days, error, price, card, MEASURED if is_measured else FORECAST)
             for (days, error, price, is_measured), card in zip(numbers, cards, strict=False)]
    limits = [Limit('days', most), Limit('dollars', spent)]
    standings = {one: standing(one, limits) for one in plans}
    verdict = judge(plans, limits)
    sentences, best = verdict
    assert all(one in best and one.unmeasured and standings[one] != OUTSIDE for one in verdict.to_measure)
    inside = [one for one in plans if standings[one] in (WITHIN, 'probably within')]
    if not inside:
        assert sentences[0].startswith('No plan')
        return
    metric = 'dollars' if any(one.price.dollars for one in inside) else 'days'
    assert best[0] == min(inside, key=lambda one: getattr(one, metric).likely)
    overlap = all(getattr(one, metric).most >= getattr(best[0], metric).least for one in best)
    assert ('cannot be told apart' in sentences[0]) == (len(best) > 1 and overlap)
    for one in plans:
        may_be_best = getattr(one, metric).least <= getattr(best[0], metric).most and standings[one] != OUTSIDE
        assert (one in best) == (one.name in sentences[0]) == may_be_best
        if one in best and standings[one] != WITHIN:
            assert any(re.match('Only prob|Probably|Without', doubt) and one.name in doubt for doubt in sentences)


def test_plans_that_were_measured_are_not_measured_again():
    argv = ['--gpu', '8 H200', '8 H100 80GB HBM3', '--images', 10 ** 6, '--dollars_per_gpu_hour', 'H200=3', 'H100=2.95']
    plans = answer_to(*argv).plans
    for done in ([plans[0]], [plans[1]], plans):
        answer = answer_after([record_of(part, one.card) for one in done for part in one.parts], *argv)
        assert {one.card for one in answer.verdict.to_measure} == {one.card for one in plans if one not in done}


@given(words=st.lists(st.sampled_from(['python', '--gpu', '16 L40S', "it's", '42', "a 'b' c"]), min_size=1))
@CASES
def test_a_command_in_several_lines_is_the_same_command(words):
    shown = shell_lines(shlex.join(words))
    assert shlex.split(shown.replace('\\\n', '')) == words
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_the_last_price_for_a_machine_with_enough_gpus_counts_and_old_ones_are_marked(tmp_path):
    header = 'gpu,dollars_per_gpu_hour,provider,gpus_per_machine,kind,date,source\n'
    (tmp_path / 'p.csv').write_text(header + 'H200,3,A,8,on demand,2026-04-02,x\nH200,1,B,1,on demand,2026-06-30,x\n'
                                    'NVIDIA-H200,2,C,8,spot,,x\n')
    path = tmp_path / 'p.csv'

    def price(gpu, today=TODAY, *flags):
        answer = plan.main(['--gpu', gpu, '--images', '1000', '--prices', str(path), *flags], today)
        [text] = [answer.cells(one)['per GPU-hour'] for one in answer.plans]
        assert any('look up each price' in sentence for sentence in answer.not_within) == ('old' in text)
        return text

    assert price('1 H200') == '$1.00 B 2026-06-30'
    assert price('8 H200') == '$3.00 A 2026-04-02'
    assert price('8 H200', TODAY + datetime.timedelta(1)) == '$3.00 A 2026-04-02, old'
    assert price('8 B200') == 'no price'
    assert price('8 H200', TODAY, '--dollars_per_gpu_hour', '9', 'H200=4') == '$4.00 your price'
    [spot] = read_prices(str(path), 'spot', ())
    assert spot.describe(TODAY) == '$2.00 C no date' and spot.is_old(TODAY)


def test_storage_and_traffic_are_part_of_the_cost():
    """1,000,000 images of 512 px: 0.0786 TB of JPEGs and 0.0655 of latents, and 2 checkpoints of 0.014 TB."""
    answer = answer_to('--gpu', '8 H200', '--images', 10 ** 6, '--schedule', '2000@512', '--dollars_per_tb_month', 100,
                       '--dollars_per_tb_read', 10, '--dollars_per_gpu_hour', 0)
    [one] = answer.plans
    stored = 0.3 * 0.262144 + 0.25 * 0.262144 + 0.028
    read = 0.3 * 0.262144 + 0.25 * 0.262144 * 2000 * 2048 / 10 ** 6
    assert one.dollars.likely == pytest.approx(stored * 100 * one.days.likely / 30.4375 + read * 10)


def test_the_commands_to_measure_have_the_flags_of_the_plan_and_name_its_machines():
    answer = answer_to('--gpu', '16 L40S', '--network_gbits', 100, '--images', 10 ** 6, '--max_days', 1000)
    (sentence, commands), (_, [again]), (training, []) = answer.first_steps
    assert 'docs/two-phases.md' in training  # the recipe is for one machine
    [one] = answer.plans
    assert [(part.kind, str(part.setup.image_size)) for part in one.parts] == [
        ('encode' if ' encode.py ' in command else 'train', re.search('--image_size ([0-9]+)', command)[1])
        for command in commands]
    for command in commands[1::2]:
        assert command.startswith('composer -n 4 --world_size 16 --node_rank $N')
        assert '@recipes/fastest.txt --use_ema' in command and ' --network_gbits 100 ' in command
    assert again == ('python plan.py results.jsonl --gpu \'16 L40S\' --network_gbits 100 --images 1000000 --max_days '
                     '1000')

    # The stated time and cost are those of all commands: 5 minutes to start each, and its images.
    minutes, dollars = map(int, re.search(r'about ([0-9]+) minutes and \$([0-9]+)', sentence).groups())
    seconds = sum(103 * 2048 / part.speed.images_per_sec for part in one.training)
    seconds += sum(3200 * 4 / (part.speed.images_per_sec / 4) for part in one.parts if part.kind == ENCODE)
    assert minutes == round(4 * 5 + seconds / 60)
    assert dollars == math.ceil((20 + seconds / 60) / 60 * 16 * one.price.dollars)


def test_only_a_plan_within_the_limits_is_one_to_train_and_one_outside_says_how_fast_it_must_be(plain):
    for factor in (0.9, 1.1):
        answer = answer_to(*ON_H200, '--max_days', factor * plain.days.likely)
        assert any(' it on 8 x H200, with' in sentence for sentence, _ in answer.first_steps) == (factor > 1)
        assert f' px, {1 / factor:.1f}' in answer.first_steps[0][0]


@given(changes=st.fixed_dictionaries({}, optional={
    'compile': st.sampled_from([False, 'reduce-overhead']), 'gradient_checkpointing': st.just(True),
    'microbatch': st.just(4), 'batch_size': st.just(1024), 'use_ema': st.just(False), 'precision': st.just('fp32'),
    'half_precision_norms': st.just(False), 'clip_grad_norm': st.just(0.5)}))
@CASES
def test_the_printed_flags_give_the_setup_of_the_plan(changes):
    setup = setup_of_settings(parse(Train, '', recipe_flags()))
    changed = replace(setup, **changes)
    words = shlex.split(' '.join([*recipe_flags(), *flags_of(changed)]))
    assert setup_of_settings(parse(Train, '', words)) == changed


def test_what_was_never_measured_is_found_in_the_records():
    argv = ['--gpu', '8 H200', '8 B200', '--images', 10 ** 6]
    before = {one.card: one.training[0] for one in answer_to(*argv).plans}
    assert before[B200].speed.missing[0] == 'this GPU'
    assert before[H200].speed.missing[0] == 'several of these GPUs'
    after = {one.card: one.training[0] for one in answer_after([record_of(before[H200], H200)], *argv).plans}
    assert (after[H200].speed.missing, after[B200].speed.missing) == ((), before[B200].speed.missing)


def test_the_picture_has_each_plan_and_the_limits(tmp_path):
    answer = answer_to('--max_days', 20, '--max_dollars', 9999, '--figure', tmp_path / 'x.svg')
    svg = ' '.join(re.sub('<[^>]+>', ' ', (tmp_path / 'x.svg').read_text()).split())
    assert len(answer.plans) > 10
    for words in (*(one.name for one in answer.plans), '20 days', '$9,999'):
        assert words in svg


def test_records_of_a_copy_of_the_model_under_another_name_correct_the_plan(plain, tmp_path):
    copy = shutil.copytree(BUILT_IN[SD2_BASE], tmp_path / 'copy')
    records = [record_of(part, H200, 0.5, model_name=str(copy)) for part in plain.parts]
    [one] = answer_after(records, *ON_H200).plans
    assert one.days.likely == pytest.approx(2 * plain.days.likely)


def test_each_run_corrects_the_plan_or_is_named_with_why_it_does_not(plain, tmp_path):
    train = record_of(plain.training[0], H200, 0.5, device='H200 SXM')  # as clouds call it
    dated = train | {'date': '2026-01-31T20:00+00:00', 'images_per_sec': 0.8 * train['images_per_sec']}
    cases = [({'measured_batches': 3}, '3 measured batches'), ({'status': 'failed'}, 'failed'),
             ({'device': 'NVIDIA H800'}, 'no forecast'), ({'data_wait_fraction': 0.5}, 'waited for its data 50 %'),
             *(({'model_name': name}, f'its model is {name}') for name in ('tiny', 'unknown/model', str(tmp_path)))]
    answer = answer_after([train, dated, *(dated | other for other, _ in cases)], *ON_H200)
    assert answer.plans[0].training[0].speed.ratio == pytest.approx(0.5)  # a run without a date is the newest
    assert len(answer.corrections) == len(cases)
    for _, why in cases:
        assert any(why in sentence for sentence in answer.corrections)


def test_a_microbatch_that_a_flag_gives_is_corrected_by_runs_with_it(plain):
    def run_with(microbatch: int, factor: float, date: str) -> dict:
        setup = replace(plain.training[0].setup, microbatch=microbatch)
        return record_of(replace(plain.training[0], setup=setup), H200, factor, date=date)

    records = [run_with(8, 0.7, '2026-02-01T01:00+09:00'), run_with(4, 0.5, '2026-01-31T20:00+00:00')]
    for flags, ratio in (('--device_train_microbatch_size 4', 0.5), ('--device_train_microbatch_size 8', 0.7),
                         ('--batch_size 2048', 0.5)):  # the newest
        fixed = '--use_synth_latents --compile --no-gradient_checkpointing'
        [one] = answer_after(records, *ON_H200, '--training_flags', f'{fixed} {flags}').plans
        assert one.training[0].speed.ratio == pytest.approx(ratio)
        assert one.training[0].speed.source == MEASURED


def test_a_gpu_slower_than_its_forecast_does_not_make_a_setup_win_that_nobody_has_measured(plain):
    [after] = answer_after([record_of(plain.training[0], H200, 0.7)], *ON_H200).plans
    for part, before in zip(after.training, plain.training, strict=True):
        assert part.setup == before.setup
        assert part.speed.images_per_sec == pytest.approx(0.7 * before.speed.images_per_sec)


def test_a_gpu_that_is_slower_on_one_machine_is_not_faster_on_several_that_nobody_measured():
    argv = ['--gpu', '8 H200', '16 H200', '--network_gbits', 400, '--images', 10 ** 6]
    before = {one.num_devices: one for one in answer_to(*argv).plans}
    records = [record_of(part, H200, 0.7) for part in before[8].parts]
    after = {one.num_devices: one for one in answer_after(records, *argv).plans}
    for part, other in zip(before[16].training, after[16].training, strict=True):
        assert other.speed.images_per_sec == pytest.approx(0.7 * part.speed.images_per_sec)
        assert other.speed.missing == ('several machines with this GPU',)
        assert other.speed.error == measured.UNSEEN_ERROR

    # A network that is slower than its forecast says nothing about one machine.
    records = [record_of(part, H200, 0.7) for part in before[16].training]
    after = {one.num_devices: one for one in answer_after(records, *argv).plans}
    assert after[8].days.likely == before[8].days.likely


def test_no_more_images_are_encoded_for_a_measurement_than_the_user_has():
    answer = answer_to('--gpu', '8 H200', '--images', 5000, 10 ** 6)
    assert '5,000 IMAGES' in answer.first_steps[0][0]


def test_commands_start_as_many_processes_as_the_plan_has_gpus():
    for gpus, launcher in (('8 H100 80GB HBM3', 'composer benchmark.py'), ('4 H100 80GB HBM3', 'composer -n 4 bench')):
        [(_, commands), *_] = answer_to('--gpu', gpus, '--images', 10 ** 6).first_steps
        assert all(command.startswith(launcher) for command in commands[1::2])
    [outcome] = answer_to('--gpu', '20 H100 80GB HBM3', '--training_flags', '--batch_size 2000').outcomes
    assert '3 machines' in outcome.reason


def test_a_cost_that_is_mostly_for_storage_says_so():
    own = [*ON_H200, '--images', 10 ** 9, '--dollars_per_gpu_hour']
    assert any('8 x H200 is for storage' in sentence for sentence in answer_to(*own, 0).not_within)
    assert not any('for storage' in sentence for sentence in answer_to(*own, 3).not_within)

"""The recipes: the whole training, its two phases, and the recipes for speed."""
import json
import os
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from diffusers import StableDiffusionPipeline

import convert
import plan
from benchmark import main
from sdbench.flags.commands import Encode
from sdbench.flags.parser import parse
from sdbench.flags.plan import SD2_SCHEDULE
from sdbench.flags.train import Train
from sdbench.setup import setup_of_settings
from tests.runs import COMMANDS, ROOT, TINY, Signalled, calls_of, write_noting_programs
from tests.samples import write_photos

PHASES = {1: ROOT / 'recipes' / 'phase-1.txt', 2: ROOT / 'recipes' / 'phase-2.txt'}
WHOLE = ROOT / 'recipes' / 'stable-diffusion-2.sh'


def parsed(*argv) -> Train:
    return parse(Train, '', [str(argument) for argument in argv])


@pytest.mark.parametrize('phase, size, steps', [(1, 256, 550_000), (2, 512, 850_000)])
def test_the_recipe_of_a_phase_agrees_with_the_model_card_and_with_the_schedule_of_plans(phase, size, steps):
    args = parsed(f'@{PHASES[phase]}', '--use_synth_data', '--save_folder', 'kept')
    assert (args.image_size, args.batch_size, args.max_duration, args.use_ema) == (size, 2048, f'{steps}ba', True)
    assert (args.learning_rate, args.lr_warmup, args.caption_drop) == (1e-4, '10000ba', 0.1)
    assert 2 ** (-1 / int(args.ema_half_life.removesuffix('ba'))) == pytest.approx(0.9999, abs=1e-8)
    assert (steps, size) == SD2_SCHEDULE[phase - 1]


def commands_of(folder: Path, *argv: str, **variables: str) -> list:
    """Return the settings of each command of the whole training, whose programs only note their calls."""
    write_noting_programs(folder, 'python', 'composer')
    environment = {'PATH': f'{folder}:{os.defpath}', 'OUT': f'{folder}/out', **variables}
    subprocess.run(['sh', WHOLE, *argv], cwd=ROOT, env=environment, check=True, capture_output=True)
    commands = []
    for program, *arguments in calls_of(folder, 'python', 'composer'):
        commands.append(parse(COMMANDS[program], '', arguments))
    return commands


def test_each_command_of_the_whole_training_reads_the_output_of_earlier_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    networks, convert, samples, one, two, export, evaluate = commands_of(
        tmp_path, MODEL='sd2', SOURCE='my photos', WORK='s3://b/sd2', LATENTS='', PHASE_FLAGS='')
    assert (convert.source, convert.held_out) == (('my photos',), 0.01)
    assert convert.out == one.remote == two.remote
    assert one == parsed(f'@{PHASES[1]}', '--model_name', 'sd2', '--remote', convert.out, '--save_folder',
                         one.save_folder, '--results', one.results)
    assert two == parsed(f'@{PHASES[2]}', '--model_name', 'sd2', '--remote', convert.out, '--save_folder',
                         two.save_folder, '--load_weights', one.save_folder, '--results', two.results)
    assert (export.checkpoint, export.out) == (two.save_folder, evaluate.model)
    assert evaluate.data == f'{convert.out}-held-out'
    for check, what, data in ((networks, 'networks', 's3://b/sd2'), (samples, 'data', evaluate.data)):
        assert check == replace(evaluate, check_only=what, data=data, results=Train.results)
    assert len({convert.out, one.save_folder, two.save_folder}) == 3


def test_each_phase_on_latents_reads_latents_of_its_image_size(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    _, convert, neither, samples, large, first, second, one, two, _, evaluate = commands_of(
        tmp_path, MODEL='sd2', SOURCE_2='large photos', EVAL='other photos',
        ENCODE_FLAGS='--compile --batch_size 64')
    assert (large.source, neither.source) == (('large photos',), ('other photos',))
    assert not (convert.held_out or large.held_out or neither.held_out)
    assert samples.data == evaluate.data == neither.out
    for made, encode, train in ((convert, first, one), (large, second, two)):
        assert encode.remote == made.out
        assert (encode.out, encode.image_size) == (train.remote, train.image_size)
        assert (encode.model_name, encode.pretrained, encode.compile, encode.batch_size) == ('sd2', True, True, 64)


@pytest.mark.parametrize('flags', [
    ['--gpu', '8 H100-80GB'],
    ['--gpu', '1 4090', '--images', '5000000'],
    ['--gpu', '8 V100-SXM2-32GB', '--training_flags=--precision amp_fp16'],
    ['--gpu', '4 H100-80GB', '--save_interval', '400ba', '--hours_between_preemptions', '9', '--images', '5000000'],
    ['--gpu', '8 H100-80GB', '--training_flags=--batch_size 512 --use_synth_data --compile reduce-overhead'],
    ['--gpu', '8 B200',
     '--training_flags=--no-compile --encoder_precision fp16 --use_synth_latents --model_name tiny']])
def test_the_commands_that_a_plan_prints_run_with_its_own_setup(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(ROOT)
    answer = plan.main(flags)
    [planned] = answer.plans
    (_, measuring), _, (sentence, [training]) = answer.first_steps
    for part, words in zip(planned.parts, map(shlex.split, measuring), strict=True):
        program = next(word for word in words if word.endswith('.py'))
        given = parse(COMMANDS[program], '', words[words.index(program) + 1:])
        assert given.image_size == part.setup.image_size
        assert given.compile == part.setup.compile and given.model_name == part.setup.model_name

    # The recipe's commands are those of the plan, too.
    *variables, _, recipe = shlex.split(training)
    variables = dict(variable.split('=', maxsplit=1) for variable in variables)
    if len(flags) == 2:  # everything else is the recipe's default
        assert variables == {'MODEL': 'FOLDER', 'SOURCE': 'photos'}
    launcher = variables.pop('LAUNCH', 'composer').split()
    assert recipe == 'recipes/stable-diffusion-2.sh' and measuring[-1].startswith(' '.join(launcher))
    commands = commands_of(tmp_path, **variables | {'MODEL': planned.training[0].setup.model_name})
    trained = [command for command in commands if isinstance(command, Train)]
    for train, part in zip(trained, planned.training, strict=True):
        setup = replace(part.setup, device=None, num_devices=None)
        assert replace(setup_of_settings(train), num_devices=None, latents=setup.latents) == setup
        assert train.max_duration == f'{part.steps}ba'
        assert train.save_interval == f'{part.preemptions.batches}ba'
    for encode in (command for command in commands if isinstance(command, Encode)):
        assert encode.compile == setup.compile
        assert (encode.encoder_precision or 'bf16') == setup.with_defaults().encoder_precision
    assert setup.latents == any(isinstance(command, Encode) for command in commands)
    assert ('SOURCE_2' in sentence) == ('--images' not in flags)  # by default each phase has its own images


@pytest.mark.parametrize('words, variables, said', [
    ([], {}, 'give MODEL=FOLDER'), ([], {'MODEL': 'x', 'SOURCE_2': 'large'}, 'give EVAL=FOLDER'),
    pytest.param([], {'MODEL': 'x', 'SCORES': '--inception none.pth'}, "--inception none.pth is not torch-fidelity's",
                 marks=pytest.mark.long),  # this one starts evaluate.py
    (['plan'], {'MODEL': 'x'}, 'sh recipes/stable-diffusion-2.sh ')])
def test_the_whole_training_refuses_missing_or_wrong_variables_in_one_line(words, variables, said):
    variables = variables | {'PATH': f'{os.path.dirname(sys.executable)}:{os.defpath}'}
    done = subprocess.run(['sh', WHOLE, *words], cwd=ROOT, env=variables, text=True, capture_output=True)
    assert done.returncode != 0
    assert said in done.stdout + done.stderr
    assert done.stderr.count('error') + done.stderr.count('is empty') <= 1


def test_the_whole_training_stops_at_the_first_command_that_fails(tmp_path):
    (tmp_path / 'python').write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/calls; test "$1" != benchmark.py\n')
    (tmp_path / 'python').chmod(0o755)
    variables = {'PATH': f'{tmp_path}:{os.defpath}', 'MODEL': 'tiny', 'LAUNCH': 'python', 'LATENTS': ''}
    assert subprocess.run(['sh', WHOLE], cwd=ROOT, env=variables).returncode != 0
    assert (tmp_path / 'calls').read_text().split() == ['evaluate.py', 'convert.py', 'evaluate.py', 'benchmark.py']


@pytest.mark.long
def test_an_interrupted_whole_training_continues_and_ends_with_a_pipeline_and_its_scores(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    commands_of(tmp_path, MODEL='tiny', SOURCE=str(write_photos(tmp_path / 'photos', 40)), WORK=f'{tmp_path}/work',
                RESULTS=f'{tmp_path}/results.jsonl', LAUNCH='python', SIZE_1='32', SIZE_2='64', STEPS_1='6',
                STEPS_2='6', BATCH_SIZE='4', LATENTS='', HELD_OUT='0.3', SCORES='--samples 4 --steps 2',
                PHASE_FLAGS='--warmup_batches 1 --ema_half_life 5ba --save_interval 2ba --num_workers 0')
    calls = calls_of(tmp_path, 'python')
    shards, phase_1 = (next(argv for program, *argv in calls if program == name) for name in
                       ('convert.py', 'benchmark.py'))
    convert.main(shards)
    with pytest.raises(SystemExit):
        main(phase_1, [Signalled(signal.SIGINT)])
    capfd.readouterr()

    # Run all commands again. Finished work must not be repeated.
    for program, *argv in calls:
        import_module(program.removesuffix('.py')).main(argv)
    assert capfd.readouterr().out.count('done already') == 1  # the shards
    records = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
    assert [record['stage'] for record in records] == ['train', 'train', 'train', 'evaluate']
    stopped, one, two, evaluation = records
    assert [stopped['status'], one['status'], two['status']] == ['interrupted', 'complete', 'complete']
    assert (one['first_batch'], one['trained_batches']) == (4, 6)
    assert (two['first_batch'], two['trained_batches']) == (0, 6)
    assert two['load_weights'] == f'{tmp_path}/work/phase-1'
    assert evaluation['images_generated'] == 4
    StableDiffusionPipeline.from_pretrained(str(tmp_path / 'out'))


@pytest.mark.parametrize('recipe, flags', [
    ('fastest', ['--no-compile']), ('original', ['--precision', 'fp32'])])
def test_the_recipes_for_speed_also_run_on_a_cpu(recipe, flags):
    path = ROOT / 'recipes' / f'{recipe}.txt'
    record = main([f'@{path}', *flags, '--use_synth_data', *TINY])
    assert record['status'] == 'complete'
    assert record['precision'] == 'fp32'

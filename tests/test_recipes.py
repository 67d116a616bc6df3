"""Flags that are kept in a file, and the two phases of Stable Diffusion 2 as such files, with a tiny model instead."""
import json
import re

import pytest
import torch
from composer.utils import dist

import benchmarks.smoke
from benchmark import main
from settings.flags import parse
from settings.here import on_this_machine
from settings.train import Train
from tests.runs import ROOT

PHASES = {1: ROOT / 'recipes' / 'phase-1.txt', 2: ROOT / 'recipes' / 'phase-2.txt'}


def parsed(*argv) -> Train:
    return parse(Train, '', [str(argument) for argument in argv])


@pytest.mark.parametrize('phase, size, steps', [(1, 256, 550_000), (2, 512, 850_000)])
def test_a_recipe_has_the_numbers_of_the_model_card_and_of_the_plan_in_the_readme(phase, size, steps):
    args = parsed(f'@{PHASES[phase]}', '--use_synth_data', '--save_folder', 'kept')
    assert (args.image_size, args.batch_size, args.max_duration) == (size, 2048, f'{steps}ba')
    assert (args.learning_rate, args.lr_warmup, args.caption_drop) == (1e-4, '10000ba', 0.1)
    assert args.use_ema and 2 ** (-1 / int(args.ema_half_life.removesuffix('ba'))) == pytest.approx(0.9999, abs=1e-8)
    assert f'--phase {steps * 2048}@{size}' in (ROOT / 'README.md').read_text()


@pytest.mark.long
def test_the_recipes_train_two_phases_and_each_knows_its_end(shards, model_folder, results, tmp_path, capfd):
    small = ['--model_name', model_folder, '--remote', shards, '--batch_size', '4', '--lr_warmup', '2ba',
             '--max_duration', '4ba', '--warmup_batches', '1', '--num_workers', '0', '--results', str(results)]
    first = [f'@{PHASES[1]}', *small, '--image_size', '64', '--save_folder', str(tmp_path / 'one')]
    second = [f'@{PHASES[2]}', *small, '--image_size', '128', '--save_folder', str(tmp_path / 'two'),
              '--load_weights', str(tmp_path / 'one')]
    for argv, size in ((first, 64), (second, 128)):
        record = main(argv)
        assert (record['status'], record['image_size'], record['first_batch']) == ('complete', size, 0)
        assert record['weight_decay'] == 0.01 and record['caption_drop'] == 0.1 and record['pretrained']
        with pytest.raises(SystemExit) as exit:
            main(argv)
        assert exit.value.code == 0 and 'nothing left to do' in capfd.readouterr().out
    first_record, second_record = map(json.loads, results.read_text().splitlines())
    assert first_record['load_weights'] is None and second_record['load_weights'] == str(tmp_path / 'one')


def test_a_recipe_and_its_drawings_can_be_tried_with_tiny(shards, results, tmp_path):
    prompts = tmp_path / 'prompts'
    prompts.write_text('a cat\n')
    tiny = [f'@{PHASES[1]}', '--model_name', 'tiny', '--remote', shards, '--image_size', '64', '--batch_size', '4',
            '--max_duration', '4ba', '--num_workers', '0', '--save_folder', str(tmp_path / 'kept'), '--sample_prompts',
            str(prompts), '--sample_folder', str(tmp_path / 'drawn'), '--results', str(results)]
    record = main([*tiny, '--no-pretrained'])
    assert (record['status'], record['model_name'], record['pretrained']) == ('complete', 'tiny', False)
    assert [path.name for path in (tmp_path / 'drawn').iterdir()] == ['ba4.png']


def test_a_file_of_flags_may_have_comments_quotations_and_many_flags_a_line(tmp_path):
    recipe = tmp_path / 'flags.txt'
    recipe.write_text("# a comment, with an apostrophe's end\n\n--use_ema   --seed 3  # three\n--wandb_name 'a b#c'\n")
    args = parsed('--seed', '1', f'@{recipe}', '--batch_size', '8', '--use_synth_data')
    assert (args.use_ema, args.seed, args.wandb_name, args.batch_size) == (True, 3, 'a b#c', 8)
    assert parsed(f'@{recipe}', '--seed', '4', '--use_synth_data').seed == 4  # what comes later counts


@pytest.mark.parametrize('content, words', [
    (None, 'No such file'), (b"--wandb_name 'a b\n", 'No closing quotation'),
    (b'--sed 3\n', '--sed')])
def test_a_file_of_flags_that_cannot_be_read_is_one_line(tmp_path, capfd, content, words):
    recipe = tmp_path / 'flags.txt'
    if content is not None:
        recipe.write_bytes(content)
    with pytest.raises(SystemExit) as exit:
        parsed(f'@{recipe}')
    line = capfd.readouterr().err
    assert exit.value.code == 2 and words in line and line.count('\n') == 1


@pytest.mark.parametrize('gpus', [1, 8])
def test_smoke_runs_the_originals_recipe_and_the_fastest_on_gpus(as_on_a_gpu, monkeypatch, gpus):
    as_on_a_gpu(count=gpus)
    monkeypatch.setattr(torch.backends.cudnn, 'version', lambda: 90501)  # of the pinned stack
    monkeypatch.setattr(dist, 'get_world_size', lambda: gpus)
    monkeypatch.setenv('WORLD_SIZE', str(gpus))
    monkeypatch.chdir(ROOT)
    runs = benchmarks.smoke.commands(gpus, 39.4)
    speeds = {}
    for name, command in runs.items():
        launcher = f'composer -n {gpus}' if gpus > 1 else 'python'
        assert ' '.join(command).startswith(f'{launcher} benchmark.py --use_synth_data --use_ema')
        settings = on_this_machine(parsed(*command[command.index('benchmark.py') + 1:]))
        assert settings.batch_size == 64 * gpus and settings.use_ema
        speeds[name] = settings
    original, fastest = speeds['original'], speeds['fastest']
    assert (original.precision, original.device_train_microbatch_size, original.compile) == ('amp_fp16', 4, False)
    assert fastest.device_train_microbatch_size == 'auto' and fastest.compile
    assert fastest.half_precision_norms and fastest.cudnn_benchmark
    assert fastest.compile_blocks == (gpus > 1) and fastest.attention == 'sdpa'


def test_the_fastest_recipe_says_for_which_libraries_it_was_written():
    text = (ROOT / 'recipes' / 'fastest.txt').read_text()
    pinned = dict(re.findall(r'^(\w+)(?:\[.*\])?==(\S+)', (ROOT / 'requirements.txt').read_text(), re.MULTILINE))
    for library, name in (('torch', 'torch'), ('mosaicml', 'Composer'), ('diffusers', 'diffusers')):
        assert f'{name} {pinned[library]}' in text


def test_smoke_says_both_speeds_and_their_ratio_and_goes_on_where_one_fails(tmp_path, monkeypatch, capfd):
    """With a command in the place of each run that leaves a record, or fails."""
    results = tmp_path / 'results.jsonl'
    monkeypatch.setattr(benchmarks.smoke, 'RESULTS', results)
    leave = {name: ['sh', '-c', f"echo '{json.dumps({'images_per_sec': speed})}' >> {results}"]
             for name, speed in (('original', 20.0), ('fastest', 65.0))}
    monkeypatch.setattr(benchmarks.smoke, 'commands', lambda gpus, gib: leave)
    monkeypatch.setattr(benchmarks.smoke, 'gpus_here', lambda: (1, 39.4))
    assert benchmarks.smoke.main() == 0
    first, second, *_, fastest, _ = capfd.readouterr().out.splitlines()
    assert first.startswith('sh -c') and second.startswith('sh -c')  # what stands in for the runs
    assert '65 images/s, 3.25 times as fast' in fastest
    monkeypatch.setattr(benchmarks.smoke, 'commands', lambda gpus, gib: leave | {'original': ['false']})
    assert benchmarks.smoke.main() == 1
    assert len(results.read_text().splitlines()) == 3 and 'times as fast' not in capfd.readouterr().out


def test_smoke_runs_both_recipes_one_image_at_a_time_on_a_card_of_24_gib_and_says_so():
    for gib, size in ((23.5, 1), (31.4, 4)):
        original, fastest = benchmarks.smoke.commands(1, gib).values()
        assert parsed(*original[2:]).device_train_microbatch_size == size
        assert (parsed(*fastest[2:]).device_train_microbatch_size == 1) == (size == 1)
        words = benchmarks.smoke.comparison({'original': 20.0, 'fastest': 65.0}, gib)
        assert ('both with --device_train_microbatch_size 1: a GPU here has 23.5 GiB' in words) == (size == 1)


def test_smoke_on_a_cpu_is_one_run_without_the_launcher():
    [command] = benchmarks.smoke.commands(0, 0).values()
    assert command[:2] == ['python', 'benchmark.py'] and parsed(*command[2:]).model_name == 'tiny'

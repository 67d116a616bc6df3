"""The recipes: two phases of Stable Diffusion 2, and what `make smoke` compares on a GPU."""
import json
import re

import pytest
import torch
from composer.utils import dist

import benchmarks.smoke
from benchmark import main
from settings.flags import parse
from settings.here import resolve_defaults
from settings.train import Train
from tests.runs import ROOT

PHASES = {1: ROOT / 'recipes' / 'phase-1.txt', 2: ROOT / 'recipes' / 'phase-2.txt'}


def parsed(*argv) -> Train:
    return parse(Train, '', [str(argument) for argument in argv])


@pytest.mark.parametrize('phase, size, steps', [(1, 256, 550_000), (2, 512, 850_000)])
def test_a_recipe_has_the_numbers_of_the_model_card_and_of_the_plan_in_the_pages(phase, size, steps):
    args = parsed(f'@{PHASES[phase]}', '--use_synth_data', '--save_folder', 'kept')
    assert (args.image_size, args.batch_size, args.max_duration) == (size, 2048, f'{steps}ba')
    assert (args.learning_rate, args.lr_warmup, args.caption_drop) == (1e-4, '10000ba', 0.1)
    assert args.use_ema and 2 ** (-1 / int(args.ema_half_life.removesuffix('ba'))) == pytest.approx(0.9999, abs=1e-8)
    assert f'--phase {steps * 2048}@{size}' in (ROOT / 'docs/planning.md').read_text()


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
        settings = resolve_defaults(parsed(*command[command.index('benchmark.py') + 1:]))
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


def test_smoke_on_a_cpu_is_one_run_without_the_launcher():
    [command] = benchmarks.smoke.commands(0, 0).values()
    assert command[:2] == ['python', 'benchmark.py'] and parsed(*command[2:]).model_name == 'tiny'

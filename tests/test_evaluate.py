"""What is scored is what diffusers draws, whatever batches and processes drew it, and whatever was killed meanwhile."""
import dataclasses
import inspect
import json
import os
import shutil
import signal
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torchmetrics.image.fid import FrechetInceptionDistance, NoTrainInceptionV3
from torchmetrics.multimodal.clip_score import CLIPScore
from transformers import CLIPProcessor, CLIPTextConfig

import evaluate
from settings.commands import Evaluate
from settings.flags import parse
from inputs.errors import DataError
from inputs.text_files import read_captions
from measuring.quality import clip_score
from models.feature_extractors import LAYER, NETWORK, hash_of_files, load_clip, sha256_of
from models.flops import flops_of_a_picture
from models.sampling import noise_of_samples
from parts.claims import claim
from parts.devices import device_of_worker
from parts.engine import Part, make_parts
from parts.evaluation import (
    COSINES,
    FEATURES,
    Evaluator,
    Piece,
    QualitySettings,
    hash_of_pipeline,
    load_pipeline,
    read_features,
)
from parts.evaluation_plan import Model, read_reference, reference_file
from parts.local_workers import LocalWorkers
from parts.output import open_output
from parts.workers import make_evaluator
from tests.judges import ClipForTorchmetrics, processor_of, save_clip, save_inception, save_pipeline
from tests.measuring.test_quality import of_few
from tests.parts.commands import start_logged
from tests.runs import error_line, files_of, wait_until
from tests.samples import Hostile, encoded, picture, pillow_square, write_shards

SIZE = 32  # pixels
STEPS = 2
# torchmetrics 1.9 resizes with antialias unless it is told not to: its FID is then another one
WITHOUT_ANTIALIAS = {name: False for name in inspect.signature(NoTrainInceptionV3).parameters if name == 'antialias'}
FAST = ['--steps', str(STEPS), '--batch_size', '2']


@pytest.fixture(scope='module')
def judges(tmp_path_factory) -> dict[str, str]:
    """By their flags."""
    folder = tmp_path_factory.mktemp('judges')
    return {'--inception': save_inception(folder / 'inception.pth'), '--clip': save_clip(folder / 'clip')}


@pytest.fixture(scope='module')
def pipeline(tmp_path_factory) -> str:
    return save_pipeline(tmp_path_factory.mktemp('pipeline') / 'pipeline')


def run(model, data, out: Path, *flags) -> dict:
    return evaluate.main([str(model), str(data), '--out', str(out), '--results', str(out.with_name('results.jsonl')),
                          *FAST, *map(str, flags)])


def refusal(capfd, *arguments, status: int = 2) -> str:
    """The one line of a run that must end with that exit status."""
    capfd.readouterr()
    with pytest.raises(SystemExit) as exit:
        run(*arguments)
    assert exit.value.code == status
    return error_line(capfd)


@pytest.fixture(scope='module')
def evaluated(tmp_path_factory, pipeline, shards, judges) -> tuple[dict, Path]:
    """The record of an evaluation of two samples at two scales, and where it was made."""
    out = tmp_path_factory.mktemp('evaluated') / 'out'
    return run(pipeline, shards, out, *flags_of_evaluated(out, judges)), out


def flags_of_evaluated(out: Path, judges: dict[str, str]) -> list:
    return ['--samples', 2, '--guidance', 1, 4, '--save_pictures', '--reference', reference_of(out),
            *(word for pair in judges.items() for word in pair)]


def reference_of(out: Path) -> Path:
    return out.with_name('reference.safetensors')


def captions(number: int) -> list[str]:
    return [f'picture number {index}' for index in range(number)]


def pictures_of(out: Path, guidance: str) -> list[Image.Image]:
    return [Image.open(path) for path in sorted((out / 'pictures' / f'guidance-{guidance}').iterdir())]


def pixels_of(pictures: list[Image.Image]) -> torch.Tensor:
    """uint8 (B, 3, H, W)."""
    return torch.stack([torch.from_numpy(np.array(each)).permute(2, 0, 1) for each in pictures])


@pytest.mark.parametrize('guidance', [1.0, 4.0])
def test_the_pictures_are_those_of_diffusers_own_pipeline_from_noise_of_their_numbers(evaluated, pipeline, guidance):
    diffusers = StableDiffusionPipeline.from_pretrained(pipeline)
    diffusers.set_progress_bar_config(disable=True)
    drawn = diffusers(captions(2), latents=noise_of_samples(range(2), 17, SIZE // 8), num_inference_steps=STEPS,
                      guidance_scale=guidance)
    kept = pictures_of(evaluated[1], f'{guidance:g}')
    assert len(kept) == 2
    assert (pixels_of(kept).int() - pixels_of(drawn.images).int()).abs().max() <= 1


def test_the_unet_runs_in_each_step_and_twice_where_it_is_guided():
    assert evaluate.passes_of_unet(5, [1.0]) == 5
    assert evaluate.passes_of_unet(5, [1.0, 4.0]) == 7.5


def test_the_noise_of_a_sample_follows_from_its_number_and_the_seed_alone():
    noise = noise_of_samples(range(4), 17, 4)
    assert torch.equal(noise_of_samples([2, 0], 17, 4), noise[[2, 0]])
    assert not torch.isclose(noise_of_samples(range(4), 18, 4).flatten(1), noise.roll(-1, 0).flatten(1)).all(1).any()


def test_fid_is_that_of_torchmetrics_features_and_an_independent_root(evaluated, judges, samples):
    record, out = evaluated
    network = NoTrainInceptionV3(NETWORK, [LAYER], judges['--inception'], **WITHOUT_ANTIALIAS)
    squares = [pillow_square(sample['jpg']) for sample in samples[:2]]
    real = network(pixels_of([square.resize((SIZE, SIZE), Image.BILINEAR) for square in squares]))
    kept = read_features(open_output(str(out), ''), 4)[FEATURES]  # the parts after those of two scales
    torch.testing.assert_close(kept, real[:1], rtol=0.02, atol=0.02 * real.std().item())  # another decoder and resize
    kept = torch.cat([read_features(open_output(str(out), ''), number)[FEATURES] for number in (4, 5)])
    for guidance, score in zip(('1', '4'), record['scores'], strict=True):
        drawn = network(pixels_of(pictures_of(out, guidance)))
        assert score['fid'] == pytest.approx(of_few(drawn, kept), rel=1e-4)


@pytest.mark.long
def test_fid_is_that_of_torchmetrics_own_class_end_to_end(evaluated, judges, shards):
    record, out = evaluated
    metric = FrechetInceptionDistance(feature=2048, feature_extractor_weights_path=judges['--inception'],
                                      **WITHOUT_ANTIALIAS)
    metric.update(pixels_of(pictures_of(out, '1')), real=False)
    kept = torch.cat([read_features(open_output(str(out), ''), number)[FEATURES] for number in (4, 5)])
    metric.inception = torch.nn.Identity()
    metric.update(kept, real=True)
    assert record['scores'][0]['fid'] == pytest.approx(metric.compute().item(), rel=1e-4)


def test_the_clip_score_is_that_of_torchmetrics_own_class_and_of_transformers_by_hand(evaluated, judges):
    record, out = evaluated
    model = ClipForTorchmetrics.from_pretrained(judges['--clip'])
    processor = CLIPProcessor.from_pretrained(judges['--clip'])
    for guidance, score in zip(('1', '4'), record['scores'], strict=True):
        pictures = pictures_of(out, guidance)
        metric = CLIPScore(lambda: (model, processor))
        metric.update(list(pixels_of(pictures)), captions(2))
        assert score['clip_score'] == pytest.approx(metric.compute().item(), rel=1e-4)
        inputs = processor(text=captions(2), images=pictures, return_tensors='pt', padding=True)
        image = model.visual_projection(model.vision_model(inputs['pixel_values']).pooler_output)
        text = model.text_projection(model.text_model(inputs['input_ids']).pooler_output)
        by_hand = clip_score(torch.nn.functional.cosine_similarity(image, text))
        assert score['clip_score'] == pytest.approx(by_hand, rel=1e-4)


def test_the_record_says_what_was_judged_and_by_what(evaluated, judges, pipeline, capfd):
    record, out = evaluated
    assert json.loads(out.with_name('results.jsonl').read_text()) == json.loads(json.dumps(record))
    assert (record['stage'], record['samples'], record['samples_drawn'], record['real_images']) == ('evaluate', 2, 4, 2)
    assert record['fid_is_biased'] and not record['fid_of_published_weights'] and record['clip'] == 'clip'
    assert '299 pixels, bilinear as in TensorFlow 1' in record['resize'] and record['network'] == f'{NETWORK} {LAYER}'
    model = Model(pipeline, pipeline)
    text_config = CLIPTextConfig(**model.config('text_encoder'))
    flops = flops_of_a_picture(model.config('unet'), text_config, model.config('vae'), SIZE)
    of_a_picture = 1.5 * STEPS * flops['unet'] + flops['text_encoder'] + flops['vae']  # half of them are guided
    assert record['tflops_per_image'] == pytest.approx(of_a_picture / 1e12)
    text = evaluate.summary(record)
    assert 'too high: below 10,000 it is biased' in text and 'not those of published FIDs' in text


def settings_of(pipeline: str, **more) -> QualitySettings:
    """Of a worker that draws alone."""
    values = {'batch_size': 2, 'data': None, 'index_hash': None, 'inception': None, 'inception_sha256': None,
              'clip': None, 'clip_sha256': None, 'image_size': SIZE, 'copies': None, 'on_gpu': False,
              'steps': STEPS, 'seed': 17, 'precision': 'fp32', 'save_pictures': False}
    if 'clip' in more:
        values['clip_sha256'] = hash_of_files(Path(more['clip']))
    if 'inception' in more:
        values['inception_sha256'] = sha256_of(Path(more['inception']))
    return QualitySettings(pipeline=pipeline, pipeline_sha256=hash_of_pipeline(pipeline), **values | more)


def claimed(folder: Path):
    """An OUT that a worker takes."""
    output = open_output(str(folder), '--out')
    claim(output, {'program': 'evaluate.py'})
    return output


def test_batches_of_any_size_give_the_same(tmp_path, pipeline, judges):
    found = []
    output = claimed(tmp_path / 'out')
    evaluator = Evaluator(output, settings_of(pipeline, inception=judges['--inception'], clip=judges['--clip']), 0)
    for batch_size in (1, 2):
        evaluator.settings = dataclasses.replace(evaluator.settings, batch_size=batch_size)
        evaluator([Part(batch_size, [Piece(5, 2, 4.0, ('a', 'a much longer caption than the other'))])])
        found.append(read_features(output, batch_size))
    assert found[0].keys() == {FEATURES, COSINES}
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], rtol=2e-3, atol=2e-3)


@pytest.mark.long
def test_two_processes_make_the_same_files_as_one(tmp_path, pipeline, judges):
    for number in (1, 2):
        make = partial(make_evaluator, claimed(tmp_path / str(number)), settings_of(pipeline, clip=judges['--clip']))
        parts = [Part(index, [Piece(index, 1, 4.0, (f'picture {index}',))]) for index in range(4)]
        with LocalWorkers(make, number, 'parts.evaluation') as workers:
            made = list(make_parts(workers, parts))
        assert len({part['worker']['name'] for part in made}) == number
    assert files_of(tmp_path / '1') == files_of(tmp_path / '2') and len(files_of(tmp_path / '1')) == 9


@pytest.mark.long
def test_a_killed_evaluation_goes_on_and_ends_as_an_undisturbed_one(server, tmp_path, pipeline, judges):
    text = tmp_path / 'captions.txt'
    text.write_text('\n'.join(captions(16)) + '\n')
    flags = ['--samples', '16', '--steps', '8', '--clip', judges['--clip'], '--results', str(tmp_path / 'results')]
    out, log = tmp_path / 'out', tmp_path / 'log'
    argv = [pipeline, str(text), '--out', str(out), *flags]
    command = start_logged(server, evaluate.main, log, argv)
    wait_until(lambda: list(out.glob('parts/*.json')))
    os.kill(command.pid, signal.SIGKILL)
    command.join(300)
    assert command.exitcode == -signal.SIGKILL
    wait_until(lambda: not psutil.pid_exists(command.pid))
    done = {path: path.stat().st_mtime_ns for path in out.glob('parts/*.json')}
    record = evaluate.main(argv)
    assert 0 < record['samples_drawn'] < 16 and done
    assert all(path.stat().st_mtime_ns == time for path, time in done.items())
    undisturbed = evaluate.main([pipeline, str(text), '--out', str(tmp_path / 'other'), *flags])
    assert undisturbed['scores'] == record['scores'] and undisturbed['samples_drawn'] == 16
    assert files_of(out) == files_of(tmp_path / 'other')


def test_the_same_command_again_draws_nothing_and_a_damaged_part_is_named(evaluated, pipeline, shards, judges, capfd):
    record, out = evaluated
    flags = flags_of_evaluated(out, judges)
    again = run(pipeline, shards, out, *flags)
    assert (again['samples_drawn'], again['images_per_sec']) == (0, None) and again['scores'] == record['scores']
    damaged = out / '000003' / 'features.safetensors'
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1])
    assert 'remove parts/000003.json' in refusal(capfd, pipeline, shards, out, *flags, status=1)
    damaged.write_bytes(content)


def test_features_of_real_images_are_made_once_and_used_for_a_text(evaluated, tmp_path, pipeline, judges, capfd):
    record, out = evaluated
    reference = tmp_path / 'reference.safetensors'
    shutil.copy(reference_of(out), reference)
    made = reference.read_bytes()
    inception = ['--inception', judges['--inception'], '--reference', reference, '--samples', 2]
    text = tmp_path / 'captions.txt'
    text.write_text('\n'.join(captions(2)))
    of_text = run(pipeline, text, tmp_path / 'out', *inception, '--guidance', 1)
    assert of_text['scores'][0]['fid'] == record['scores'][0]['fid'] and of_text['real_images'] == 2
    assert len(list((tmp_path / 'out').glob('parts/*'))) == 2 < len(list(out.glob('parts/*')))
    line = refusal(capfd, pipeline, text, tmp_path / 'third', *inception, '--image_size', 40)
    assert 'reference.safetensors was made with resize centre square, to 32 pixels' in line
    others = write_shards(tmp_path / 'others', [{'jpg': encoded(picture(9)), 'caption': 'x'}] * 2)
    assert 'was made with index_sha256' in refusal(capfd, pipeline, others, tmp_path / 'third', *inception)
    about = json.loads(safe_open(reference, 'pt').metadata()['made_of'])
    of_others = tmp_path / 'of_others.safetensors'
    of_others.write_bytes(reference_file(about | {'inception_sha256': 'x'}, torch.ones(2, 3)))
    line = refusal(capfd, pipeline, text, tmp_path / 'third', *inception, '--reference', of_others)
    assert 'was made with inception_sha256 x' in line
    assert reference.read_bytes() == made and not (tmp_path / 'third').exists()
    reference.write_text('mine')
    assert 'holds no features of evaluate.py' in refusal(capfd, pipeline, text, tmp_path / 'third', *inception)
    assert reference.read_text() == 'mine'


def test_weights_of_another_network_and_files_that_run_code_are_refused(tmp_path, pipeline, shards, judges, capfd):
    trace = tmp_path / 'ran'
    for name, content, words in (('hostile', Hostile(trace), 'holds no weights of InceptionV3'),
                                 ('other', {'conv.weight': torch.ones(3)}, 'holds no weights of InceptionV3')):
        torch.save(content, tmp_path / name)
        line = refusal(capfd, pipeline, shards, tmp_path / 'out', '--samples', 2, '--inception', tmp_path / name)
        assert words in line and 'weights-inception-2015-12-05-6726825d.pth' in line
    assert not trace.exists()
    clip = tmp_path / 'clip'
    shutil.copytree(judges['--clip'], clip)
    weights = load_file(clip / 'model.safetensors')
    del weights['visual_projection.weight']
    save_file(weights, clip / 'model.safetensors', {'format': 'pt'})
    line = refusal(capfd, pipeline, shards, tmp_path / 'out', '--samples', 2, '--clip', clip)
    assert '1 weights are missing, first visual_projection.weight' in line and 'hf download' in line
    assert not (tmp_path / 'out').exists()


def test_captions_without_words_and_images_that_do_not_decode_are_one_line(tmp_path, pipeline, judges, capfd):
    good = {'jpg': encoded(picture(1)), 'caption': 'a cat'}
    wordless = write_shards(tmp_path / 'wordless', [good, good | {'caption': ' -- !'}])
    flags = ['--samples', 2, '--clip', judges['--clip']]
    assert 'sample 1 of DATA' in refusal(capfd, pipeline, wordless, tmp_path / 'out', *flags)
    broken = write_shards(tmp_path / 'broken', [good, good | {'jpg': b'no'}])
    line = refusal(capfd, pipeline, broken, tmp_path / 'out', *flags, '--inception', judges['--inception'], status=1)
    assert 'sample 1 of DATA' in line and 'does not decode' in line and 'goes on from there' in line


def write_checkpoint(path: Path, model: str, with_vae: bool = True) -> None:
    """What Composer keeps of a run of the tiny model after 7 batches of 4, with an average that differs."""
    weights = {}
    parts = StableDiffusionPipeline.from_pretrained(model)
    for part in ('unet', 'vae', 'text_encoder'):
        if part == 'vae' and not with_vae:
            continue
        weights |= {f'{part}.{name}': tensor for name, tensor in getattr(parts, part).state_dict().items()}
    averages = {f'unet.{name}': parameter.detach() + 0.1 for name, parameter in parts.unet.named_parameters()}
    ema = {'ema_started': True, 'ema_weights_active': False, 'ema_model': {'named_parameters_dict': averages}}
    flags = {'model_name': 'tiny', 'image_size': SIZE, 'batch_size': 4, 'seed': 17, 'tokenizer': model}
    state = {'model': weights, 'algorithms': [('EMA', ema)], 'callbacks': [('Safeguard', {'flags': flags})],
             'timestamp': {'Timestamp': {'batch': 7, 'sample': 28}}}
    torch.save({'state': state, 'rng': []}, path)


def test_a_checkpoint_draws_with_its_average_and_says_how_far_it_was_trained(tmp_path, pipeline, shards, judges, capfd):
    kept = tmp_path / 'kept'
    kept.mkdir()
    write_checkpoint(kept / 'ep0-ba7-rank0.pt', pipeline)
    live = load_file(Path(pipeline, 'unet', 'diffusion_pytorch_model.safetensors'))
    for model, flags, difference in ((kept, [], 0.1), (kept / 'ep0-ba7-rank0.pt', ['--live'], 0)):
        argv = [str(model), str(shards), '--out', 'out', '--clip', 'clip', *flags]
        with evaluate.open_model(parse(Evaluate, '', argv)) as opened:
            weights = load_pipeline(opened.folder).unet.state_dict()
            assert opened.config('unet')['sample_size'] == SIZE // 8
        torch.testing.assert_close(weights, {name: tensor + difference for name, tensor in live.items()})
        assert (opened.batch, opened.images_seen, opened.training['batch_size']) == (7, 28, 4)
        assert opened.weights == ('live' if flags else 'averaged') and not Path(opened.folder).exists()
    write_checkpoint(kept / 'ep0-ba8-rank0.pt', pipeline, with_vae=False)
    line = refusal(capfd, kept, shards, tmp_path / 'out', '--samples', 2, '--clip', judges['--clip'])
    assert 'has no VAE to decode with' in line


def test_a_caption_longer_than_the_model_is_cut_and_keeps_its_end(judges):
    clip = load_clip(judges['--clip'])
    long = ['a ' * 200, 'a ' * 75]  # with start and end 77 tokens
    assert len(clip.tokenizer(long[1]).input_ids) == 77
    cosines = clip.cosines([picture(1)] * 2, long)
    torch.testing.assert_close(cosines[0], cosines[1])


@pytest.mark.parametrize('steps, better', [(1000, 500), (600, 500), (201, 200), (126, 125)])
def test_steps_that_would_begin_within_the_noise_are_refused(steps, better):
    with pytest.raises(ValueError, match=f'--steps {steps}: .* use {better}$'):
        evaluate.require_whole_noise(steps, 1000)


@pytest.mark.parametrize('steps', [1, 2, 25, 50, 99, 250, 500])
def test_steps_that_begin_at_noise_are_taken(steps):
    evaluate.require_whole_noise(steps, 1000)


def test_a_worker_that_finds_no_gpu_where_there_is_to_be_one_does_not_draw_on_the_processor(monkeypatch):
    assert device_of_worker(0, on_gpu=False) == torch.device('cpu') == device_of_worker(0, on_gpu=None)
    with pytest.raises(DataError, match='torch finds no GPU in a worker on'):
        device_of_worker(1, on_gpu=True)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '3')  # as Ray sets it
    with pytest.raises(DataError, match='torch finds no GPU in a worker on'):
        device_of_worker(0, on_gpu=None)


def test_the_text_encoder_works_in_float32_and_the_unet_in_half_precision(pipeline, tmp_path):
    worker = Evaluator(claimed(tmp_path / 'out'), settings_of(pipeline, precision='amp_bf16'), 0)
    types = {}
    for name in ('text_encoder', 'unet'):
        layers = getattr(worker.pipeline, name).modules()
        [*_, layer] = (layer for layer in layers if isinstance(layer, torch.nn.Linear))
        layer.register_forward_hook(lambda module, inputs, output, name=name: types.update({name: output.dtype}))
    worker.draw(0, ['a cat'], 2.0)
    assert types == {'text_encoder': torch.float32, 'unet': torch.bfloat16}


def test_weights_of_judges_that_are_others_on_this_machine_are_not_judged_by(judges, pipeline, tmp_path):
    settings = settings_of(pipeline, clip=judges['--clip'], clip_sha256='of another', inception=judges['--inception'],
                           inception_sha256='of another')
    worker = Evaluator(claimed(tmp_path / 'out'), settings, 0)
    for judge in ('clip', 'inception'):
        with pytest.raises(DataError, match='is not that of the machine that gives it work'):
            getattr(worker, judge)


def test_another_processor_of_clip_is_another_clip(judges, tmp_path):
    folder = Path(shutil.copytree(judges['--clip'], tmp_path / 'clip'))
    before = hash_of_files(folder)
    config = processor_of(folder)
    config.write_text(config.read_text().replace('true', 'false', 1))
    assert hash_of_files(folder) != before == hash_of_files(Path(judges['--clip']))


def test_a_picture_that_is_not_finite_is_not_judged(pipeline, tmp_path):
    worker = Evaluator(claimed(tmp_path / 'out'), settings_of(pipeline), 0)
    torch.nn.init.constant_(worker.pipeline.vae.decoder.conv_out.bias, torch.nan)
    with pytest.raises(ValueError, match='a picture that is not finite'):
        worker.draw(0, ['a cat'], 2.0)


def test_a_reference_that_has_changed_is_not_compared_with(tmp_path):
    path = tmp_path / 'reference.safetensors'
    path.write_bytes(reference_file({'images': 2}, torch.ones(2, 3)))
    about, features = read_reference(str(path))
    assert about == {'images': 2} and torch.equal(features, torch.ones(2, 3))
    content = bytearray(path.read_bytes())
    content[-2] ^= 1  # a bit of the last number
    path.write_bytes(content)
    with pytest.raises(ValueError, match='holds no features of evaluate.py .they have changed'):
        read_reference(str(path))
    path.write_bytes(save({FEATURES: torch.ones(2, 3)}, {'made_of': '[1]'}))
    with pytest.raises(ValueError, match='holds no features of evaluate.py'):
        read_reference(str(path))


def test_a_mark_of_byte_order_is_no_part_of_a_caption(tmp_path):
    path = tmp_path / 'captions.txt'
    path.write_bytes('\ufeffa cat\r\na dog\r\n'.encode())
    assert read_captions(str(path), 2) == ['a cat', 'a dog']

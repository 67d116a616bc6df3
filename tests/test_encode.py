"""Encoding once: every sample, once, and the same training afterwards."""
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL

import benchmark
import encode
from benchmark import StableDiffusion
from data import StreamingLAIONDataset, collate, normalize
from inputs.captions import build_tokenizer
from tests.forked_runs import run_ranks
from tests.local_s3 import local_s3
from tests.parts.commands import start, workers_of
from tests.runs import TINY, error_line, files_of, wait_until
from tests.samples import encoded, picture, write_shards

SMALL = ['--image_size', '64', '--batch_size', '4', '--num_workers', '0']


def encode_shards(remote, out, model_folder, *flags) -> dict:
    return encode.main([*SMALL, '--remote', str(remote), '--out', str(out), '--model_name', str(model_folder),
                        '--pretrained', '--results', str(Path(out).with_name('results.jsonl')), *map(str, flags)])


def refusal(capfd, function, *arguments) -> str:
    capfd.readouterr()
    with pytest.raises(SystemExit):
        function(*arguments)
    return error_line(capfd)


def captions(folder) -> list[str]:
    dataset = StreamingLAIONDataset(str(folder), image_size=64, batch_size=1)
    return [dataset.sample(index)['caption'] for index in range(dataset.num_samples)]


@pytest.fixture(scope='module')
def latents(tmp_path_factory, shards, model_folder) -> str:
    out = tmp_path_factory.mktemp('encoded') / 'latents'
    encode_shards(shards, out, model_folder)
    return str(out)


def test_every_sample_is_encoded_once_in_the_order_of_the_images(latents, shards):
    assert captions(latents) == captions(shards) and len(captions(latents)) == 24


@pytest.mark.parametrize('prediction', ['epsilon', 'v_prediction'])
def test_a_step_from_latents_has_the_loss_and_gradients_of_one_from_pixels(latents, shards, model_folder, prediction):
    losses, gradients = [], []
    for remote, from_latents in ((shards, False), (latents, True)):
        torch.manual_seed(3)
        unet = StableDiffusion('tiny', 64).unet.state_dict()
        model = StableDiffusion(model_folder, 64, pretrained=True, latents=from_latents).train()
        model.unet.load_state_dict(unet)
        model.prediction_type = prediction
        dataset = StreamingLAIONDataset(remote, image_size=64, batch_size=1)
        batch = normalize(collate([dataset.sample(index) for index in (3, 0, 17, 8)], build_tokenizer(), 64), 64)
        torch.manual_seed(4)
        loss = model.loss(model(batch), batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.unet.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (gradients[0] - gradients[1]).norm() < 5e-3 * gradients[0].norm()


def test_the_stored_moments_are_the_vaes_own(latents, shards, model_folder):
    vae = AutoencoderKL.from_pretrained(f'{model_folder}/vae')
    images = StreamingLAIONDataset(shards, image_size=64, batch_size=1)
    stored = StreamingLAIONDataset(latents, image_size=64, batch_size=1)
    for index in (0, 23):
        posterior = vae.encode(images[index]['image'][None] / 127.5 - 1).latent_dist
        torch.testing.assert_close(stored[index]['moments'][None].float(), posterior.parameters, atol=2e-3, rtol=2e-3)


@pytest.mark.long
@pytest.mark.parametrize('victim', ['command', 'worker'])
def test_a_killed_encoding_goes_on_and_ends_as_an_undisturbed_one(tmp_path, monkeypatch, shards, latents, model_folder,
                                                                  victim):
    out, log = tmp_path / 'latents', tmp_path / 'log'
    with local_s3(monkeypatch) as store:
        for path in Path(shards).iterdir():
            store.put(f'images/{path.name}', path.read_bytes())
        argv = [*SMALL, '--remote', 's3://bucket/images', '--out', str(out), '--model_name', model_folder,
                '--pretrained', '--results', str(tmp_path / 'results.jsonl')]
        store.delay = 0.3
        command = start(log, 'encode.py', *argv)
        wait_until(lambda: list(out.glob('*/index.json')))
        done = {path: path.stat().st_mtime_ns for part in out.glob('*/index.json') for path in part.parent.iterdir()}
        os.kill(command.pid if victim == 'command' else workers_of(command)[0], signal.SIGKILL)
        command.wait(300)
        store.delay = 0
        if victim == 'command':
            assert command.returncode == -signal.SIGKILL and not (out / 'index.json').exists()
            assert encode.main(argv)['samples'] < 24
    record = json.loads((tmp_path / 'results.jsonl').read_text())
    assert record['stored_samples'] == 24 and record['num_devices'] == 1, log.read_text()
    assert done and all(path.stat().st_mtime_ns == time for path, time in done.items())
    of_latents, of_out = ({name: content for name, content in files_of(Path(folder)).items() if '#' not in name}
                          for folder in (latents, out))
    assert of_out.pop('claim.json') != of_latents.pop('claim.json')  # which names --remote
    assert of_out == of_latents


def test_images_that_were_added_to_a_dataset_are_encoded_and_no_others(tmp_path, model_folder):
    samples = [{'jpg': encoded(picture(index)), 'caption': str(index)} for index in range(12)]
    images, out = tmp_path / 'images', tmp_path / 'latents'
    write_shards(images, samples[:9], size_limit=6000)
    assert encode_shards(images, out, model_folder)['samples'] == 9
    shutil.rmtree(images)
    write_shards(images, samples, size_limit=6000)
    record = encode_shards(images, out, model_folder)
    assert record['samples'] < 9 and record['stored_samples'] == 12
    assert captions(out) == [str(index) for index in range(12)]


def test_bad_samples_are_left_out_counted_and_listed(tmp_path, model_folder, capfd):
    samples = [{'jpg': encoded(picture(index)), 'caption': str(index)} for index in range(10)]
    samples[2]['jpg'], samples[9]['caption'] = b'no', ''
    shards = write_shards(tmp_path / 'shards', samples, size_limit=6000)
    record = encode_shards(shards, tmp_path / 'latents', model_folder)
    assert (record['samples'], record['stored_samples'], record['bad_samples']) == (8, 8, 2)
    assert captions(tmp_path / 'latents') == [str(index) for index in range(9) if index != 2]
    out = capfd.readouterr().out
    assert 'encoded         8 images, ' in out and 'stored          8 images, 1,0' in out
    assert 'too few to rely on its images/s' in out
    assert f'2 bad samples; listed in {tmp_path}/latents/skipped.jsonl' in out
    lines = map(json.loads, (tmp_path / 'latents/skipped.jsonl').read_text().splitlines())
    assert [(line['key'], line['reason']) for line in lines] == [
        (2, 'image does not decode: not a known format'), (9, 'no caption')]


def test_where_nothing_can_be_encoded_there_is_no_dataset(tmp_path, model_folder, capfd):
    shards = write_shards(tmp_path / 'shards', [{'jpg': b'no', 'caption': 'x'}] * 3)
    out = tmp_path / 'out'
    assert f'not one image could be encoded; {out}/skipped.jsonl' in refusal(
        capfd, encode_shards, shards, out, model_folder)
    assert not (out / 'index.json').exists()


def test_moments_that_float16_cannot_hold_are_an_error_that_names_the_sample(tmp_path, shards, model_folder, capfd):
    folder = tmp_path / 'model'
    shutil.copytree(model_folder, folder)
    vae = AutoencoderKL.from_pretrained(folder / 'vae')
    vae.quant_conv.weight.data *= 1e7
    vae.save_pretrained(folder / 'vae')
    line = refusal(capfd, encode_shards, shards, tmp_path / 'latents', folder)
    assert 'sample 0 has moments that are not finite in float16' in line


def test_the_same_command_on_a_finished_out_has_done_all_and_other_flags_are_refused(
        latents, shards, model_folder, capfd):
    before = {path: path.stat().st_mtime_ns for path in Path(latents).rglob('*') if path.suffix != '.lock'}
    capfd.readouterr()
    assert encode_shards(shards, latents, model_folder) is None  # and so status 0
    said, command = capfd.readouterr().out.splitlines()
    assert said == f'done already: --out {latents} holds 24 samples, all of this --remote'
    assert command.startswith(f'next            composer benchmark.py --remote {latents} --use_ema')
    assert 'was begun with image_size 64, and this command has 32; give' in refusal(
        capfd, encode_shards, shards, latents, model_folder, '--image_size', '32')
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_latents_of_random_weights_are_not_gone_on_with_by_other_weights(shards, tmp_path, capfd):
    argv = [*SMALL, '--remote', shards, '--out', str(tmp_path / 'out'), '--model_name', 'tiny', '--results',
            str(tmp_path / 'results.jsonl')]
    assert encode.main([*argv, '--seed', '1'])['samples'] == 24
    assert 'was begun with vae_seed 1, and this command has 2' in refusal(capfd, encode.main, [*argv, '--seed', '2'])


def changed(model_folder, folder: Path, part: str) -> Path:
    """A copy of the model with another scaling factor or other weights of the VAE."""
    shutil.copytree(model_folder, folder)
    if part == 'factor':
        config = folder / 'vae' / 'config.json'
        config.write_text(json.dumps(json.loads(config.read_text()) | {'scaling_factor': 0.3}))
    else:
        vae = AutoencoderKL.from_pretrained(folder / 'vae')
        vae.encoder.conv_in.bias.data += 1
        vae.save_pretrained(folder / 'vae')
    return folder


def test_latents_of_another_size_or_another_vae_are_refused(tmp_path, latents, shards, model_folder, capfd):
    train = ['--remote', latents, *TINY, '--model_name', str(model_folder), '--pretrained']
    assert 'latents with image_size 64, and this run has 32' in refusal(
        capfd, benchmark.main, [*train, '--image_size', '32'])
    for part, key in (('factor', 'scaling_factor'), ('weights', 'vae_sha256')):
        other = changed(model_folder, tmp_path / part, part)
        assert f'latents with {key}' in refusal(capfd, benchmark.main, [*train, '--model_name', str(other)])
    assert 'vae_sha256' in refusal(capfd, benchmark.main, train[:-1])  # random weights are no VAE's
    (begun := tmp_path / 'begun').mkdir()
    shutil.copy(Path(latents, 'claim.json'), begun)
    assert 'was begun with vae_sha256' in refusal(capfd, encode_shards, shards, begun, tmp_path / 'weights')
    others = write_shards(tmp_path / 'others', [{'jpg': encoded(picture(index)), 'caption': 'x'} for index in range(9)])
    assert 'was begun with remote' in refusal(capfd, encode_shards, others, begun, model_folder)
    assert 'holds latents; give the images' in refusal(capfd, encode_shards, latents, tmp_path / 'twice', model_folder)


def test_a_training_on_latents_says_so_and_counts_what_it_ran(latents, model_folder, results):
    record = benchmark.main(['--remote', latents, *TINY, '--model_name', model_folder, '--pretrained', '--results',
                             str(results)])
    assert (record['status'], record['encoders']) == ('complete', 'text_in_loop')
    assert StableDiffusion('tiny', 64, latents=True).vae is None
    flops = StableDiffusion('tiny', 64).flops_per_image
    assert record['tflops_per_image'] == pytest.approx((flops['unet'] + flops['text_encoder']) / 1e12)


@pytest.mark.long
def test_under_a_launcher_one_rank_encodes_and_all_train_on_it(tmp_path, shards, model_folder, server):
    model = ['--model_name', model_folder, '--pretrained', '--results', str(tmp_path / 'results.jsonl')]
    encoding = [*SMALL, *model, '--remote', shards, '--out', str(tmp_path / 'latents')]
    training = [*TINY, *model, '--remote', str(tmp_path / 'latents')]
    log = tmp_path / 'log'
    for program, argv in ((encode.main, encoding), (benchmark.main, training)):
        assert run_ranks(server, [log, log], program, [(argv,)] * 2) == [0, 0], log.read_text()
    records = [json.loads(line) for line in (tmp_path / 'results.jsonl').read_text().splitlines()]
    assert [(record['stage'], record.get('encoders'), record['num_devices']) for record in records] == [
        ('encode', None, 1), ('train', 'text_in_loop', 2)]  # the first rank encodes
    assert records[0]['samples'] == 24 and captions(tmp_path / 'latents') == captions(shards)


@pytest.mark.long
def test_latents_go_to_s3_and_are_trained_on_from_there(s3, shards, model_folder, tmp_path, results):
    model = ['--model_name', model_folder, '--pretrained', '--image_size', '64', '--results', str(results)]
    record = encode.main(['--remote', shards, '--out', 's3://bucket/latents', '--batch_size', '5', '--num_workers', '0',
                          *model])
    assert record['samples'] == record['stored_samples'] == 24
    record = benchmark.main(['--remote', 's3://bucket/latents', '--local', str(tmp_path / 'cache'), *TINY, *model])
    assert (record['status'], record['encoders']) == ('complete', 'text_in_loop')

"""encode.py encodes every sample exactly once, and training on the latents equals training on the images."""
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

import benchmark
import encode
import report
from benchmark import StableDiffusion
from data import StreamingLAIONDataset, collate, normalize
from sdbench.complete import complete_encoding
from sdbench.datasets.encoder import Encoder, ImageShard
from sdbench.flags.commands import Encode
from sdbench.flags.parser import parse
from sdbench.inputs.shards import hash_of_images, index_hash, read_index
from tests.runs import TINY, check_keys, refusal, times_of
from tests.samples import captions_of, encoded, good, picture, skipped_kinds, write_files, write_shards
from tests.shortcuts import clip_tokenizer

SMALL = ['--image_size', '16', '--batch_size', '4', '--num_workers', '0']


def encode_shards(remote, out, model_folder, *flags) -> dict:
    return encode.main([*SMALL, '--remote', str(remote), '--out', str(out), '--model_name', str(model_folder),
                        '--pretrained', '--results', str(Path(out).with_name('results.jsonl')), *map(str, flags)])


def with_changed_vae(model_folder: str, folder: Path, change: Callable[[AutoencoderKL], object]) -> Path:
    """Copy the model into a folder, and change its VAE."""
    shutil.copytree(model_folder, folder)
    vae = AutoencoderKL.from_pretrained(folder / 'vae')
    with torch.no_grad():
        change(vae)
    vae.save_pretrained(folder / 'vae')
    return folder


@pytest.fixture(scope='module')
def latents(tmp_path_factory, shards, model_folder) -> str:
    out = tmp_path_factory.mktemp('encoded') / 'latents'
    encode_shards(shards, out, model_folder)
    return str(out)


@pytest.mark.parametrize('prediction', ['epsilon', 'v_prediction'])
def test_a_step_from_latents_has_the_loss_and_gradient_of_a_step_from_pixels(latents, shards, model_folder, prediction):
    losses, gradients = [], []
    for remote, from_latents in ((shards, False), (latents, True)):
        torch.manual_seed(3)
        unet = StableDiffusion(model_folder, 16).unet.state_dict()
        model = StableDiffusion(model_folder, 16, pretrained=True, latents=from_latents).train()
        model.unet.load_state_dict(unet)
        model.prediction_type = prediction
        dataset = StreamingLAIONDataset(remote, image_size=16, batch_size=1)
        batch = normalize(collate([dataset.sample(index) for index in (3, 0, 17, 8)], clip_tokenizer()))
        torch.manual_seed(4)
        loss = model.loss(model(batch), batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.unet.parameters()]))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (gradients[0] - gradients[1]).norm() < 5e-3 * gradients[0].norm()


def test_only_added_images_are_encoded_even_if_a_shard_is_empty(model_folder):
    """Streaming's writer makes an empty shard before a sample that is larger than a shard."""
    samples = [{'jpg': encoded(picture(index)), 'caption': str(index)} for index in range(12)]
    samples[0]['jpg'] = encoded(picture(0, 512, 512), quality=100)
    write_shards('images', samples[:9], size_limit=6000)
    assert encode_shards('images', 'latents', model_folder)['samples'] == 9
    shutil.rmtree('images')
    write_shards('images', samples, size_limit=6000)
    assert read_index('images')['shards'][0]['samples'] == 0
    record = encode_shards('images', 'latents', model_folder)
    assert record['samples'] < 9
    check_keys(record, 'encode.py')
    assert record['stored_samples'] == 12
    assert captions_of('latents') == [{'caption': [str(index)]} for index in range(12)]


def test_latents_of_held_out_images_are_held_out_and_for_an_evaluation(model_folder, capfd):
    draw = {'draw': {'share': 0.1, 'seed': 17, 'side': 'held out'}}
    write_shards('images', [good(0)])
    write_files('images', {'index.json': json.dumps(read_index('images') | draw)})
    encode_shards('images', 'latents', model_folder)
    assert '--eval_remote latents' in capfd.readouterr().out
    assert read_index('latents')['draw'] == draw['draw']


def test_all_captions_of_an_image_are_stored_next_to_a_single_copy_of_its_latents(
        shards, several_captions, model_folder):
    one, several = (encode_shards(remote, name, model_folder)['bytes_per_image']
                    for name, remote in (('one', shards), ('several', several_captions)))
    assert captions_of('several') == captions_of(several_captions)
    assert one < several < one + 200  # bytes of text


def test_a_captions_column_of_another_program_is_neither_trained_nor_encoded(model_folder):
    samples = [good(index) | {'captions': {'en': 'x'}} for index in range(4)]
    expected = [{'caption': [sample['caption']]} for sample in samples]
    write_shards('shards', samples, {'jpg': 'bytes', 'caption': 'str', 'captions': 'json'})
    encode_shards('shards', 'latents', model_folder)
    for remote in ('shards', 'latents'):
        dataset = StreamingLAIONDataset(remote, batch_size=1)
        assert [dataset.sample(index)['captions'] for index in range(4)] == expected
    write_files('latents', {'index.json': json.dumps(read_index('latents') | {'captions': {'caption': 4}})})
    assert captions_of('latents') == expected  # not stored either


def test_bad_samples_are_skipped_counted_and_logged(model_folder, capfd):
    samples = [{'jpg': encoded(picture(index)), 'caption': str(index)} for index in range(10)]
    samples[2]['jpg'], samples[9]['caption'] = b'no', ''
    write_shards('shards', samples, size_limit=6000)
    record = encode_shards('shards', 'latents', model_folder)
    assert (record['samples'], record['stored_samples'], record['bad_samples']) == (8, 8, 2)
    assert captions_of('latents') == [{'caption': [str(index)]} for index in range(9) if index != 2]
    assert '1 image does not decode, 1 no caption; listed in latents/skipped.jsonl' in capfd.readouterr().out
    last = read_index('shards')['shards'][-1]
    assert skipped_kinds('latents') == [('shard.00000.mds', 2, 'image does not decode'),
                                        (last['raw_data']['basename'], last['samples'] - 1, 'no caption')]


def test_a_run_that_skips_all_its_images_has_no_speed_and_says_why(model_folder, capfd):
    for samples in ([good(0)], [good(0), {'jpg': b'no', 'caption': 'x'}]):  # a shard for each sample
        shutil.rmtree('images', ignore_errors=True)
        write_shards('images', samples, size_limit=1)
        capfd.readouterr()
        record = encode_shards('images', 'latents', model_folder)
    assert (record['status'], record['images_per_sec'], record['samples']) == ('unmeasured', None, 0)
    assert 'all images of this run were skipped' in capfd.readouterr().out
    report.main(['results.jsonl'])
    assert 'unmeasured' in capfd.readouterr().out


def test_moments_that_overflow_float16_are_an_error_that_names_the_sample(tmp_path, shards, model_folder, capfd):
    too_large = with_changed_vae(model_folder, tmp_path / 'model', lambda vae: vae.quant_conv.weight.mul_(1e7))
    line = refusal(capfd, encode_shards, shards, 'latents', too_large)
    assert 'sample 0 of shard.00000.mds has moments that are not finite in float16' in line


def test_samples_are_encoded_once_in_order_and_a_complete_out_refuses_other_flags(latents, shards, model_folder, capfd):
    assert captions_of(latents) == captions_of(shards)
    assert len(captions_of(latents)) == 24
    assert hash_of_images(read_index(latents)) == index_hash(read_index(shards))
    before = times_of(Path(latents))
    capfd.readouterr()
    assert encode_shards(shards, latents, model_folder) is None  # main() returns None, so the exit status is 0
    said, command = capfd.readouterr().out.splitlines()
    assert said.startswith('done already')
    assert f'python benchmark.py --remote {latents} --model_name {model_folder} ' in command
    assert 'was begun with image_size 16, and this command has 32' in refusal(
        capfd, encode_shards, shards, latents, model_folder, '--image_size', '32')
    assert times_of(Path(latents)) == before


def test_random_weights_give_a_warning_and_other_random_weights_are_refused(shards, model_folder, capfd):
    encode_shards(shards, 'out', model_folder, '--no-pretrained', '--seed', 1)
    assert 'warning: without --pretrained the VAE has random weights' in capfd.readouterr().err
    assert 'out was begun with seed 1, and this command has 2' in refusal(
        capfd, encode_shards, shards, 'out', model_folder, '--no-pretrained', '--seed', 2)


def test_latents_of_another_size_or_another_vae_are_refused(tmp_path, latents, shards, model_folder, capfd):
    train = ['--remote', latents, *TINY, '--model_name', str(model_folder), '--pretrained']
    assert 'latents with image_size 16, and this run has 32' in refusal(
        capfd, benchmark.main, [*train, '--image_size', '32'])
    for change, key in ((lambda vae: vae.register_to_config(scaling_factor=0.3), 'scaling_factor'),
                        (lambda vae: vae.encoder.conv_in.bias.add_(1), 'vae_sha256')):
        other = with_changed_vae(model_folder, tmp_path / key, change)
        assert f'latents with {key}' in refusal(capfd, benchmark.main, [*train, '--model_name', str(other)])
    assert 'vae_sha256' in refusal(capfd, benchmark.main, train[:-1])  # without --pretrained, the weights are random
    assert 'was begun with vae_sha256' in refusal(capfd, encode_shards, shards, latents, tmp_path / 'vae_sha256')
    assert 'holds latents; give the images' in refusal(capfd, encode_shards, latents, tmp_path / 'twice', model_folder)


def test_a_training_on_latents_is_recorded_as_such_and_counts_no_vae_flops(latents, model_folder):
    record = benchmark.main(['--remote', latents, *TINY, '--model_name', model_folder, '--pretrained'])
    assert (record['status'], record['encoders']) == ('complete', 'text_in_loop')
    assert StableDiffusion(model_folder, 16, latents=True).vae is None
    flops = StableDiffusion(model_folder, 16).flops_per_image
    assert record['tflops_per_image'] == pytest.approx((flops['unet'] + flops['text_encoder']) / 1e12)


@pytest.mark.long
def test_compiled_batches_with_any_number_of_good_images_share_one_graph(graphs, shards, model_folder):
    argv = [*SMALL, '--remote', shards, '--out', 'out', '--model_name', model_folder, '--pretrained']
    plain, compiled = (Encoder(complete_encoding(parse(Encode, '', [*argv, *flags])), on_gpu=False)
                       for flags in ([], ['--compile']))
    shard = ImageShard(read_index(shards)['shards'][0], False)
    for number in (4, 3, 1, 0, 2):
        batch = {'image': torch.randint(256, (number, 3, 16, 16), dtype=torch.uint8), 'indices': range(number)}
        for one, other in zip(plain.encode_batch(batch, shard), compiled.encode_batch(batch, shard), strict=True):
            np.testing.assert_allclose(one, other, atol=2e-3, rtol=2e-3)
    assert len(graphs) == 1

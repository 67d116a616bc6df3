"""The scored images equal diffusers' own, for any batch size and number of processes, and after interruptions."""
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from diffusers import StableDiffusionPipeline
from PIL import Image
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from torchmetrics.image.fid import FrechetInceptionDistance
from torchvision.transforms.functional import pil_to_tensor
from transformers import CLIPModel, CLIPProcessor

import evaluate
from benchmark import main as train
from export import main as export
from sdbench.flags.commands import Evaluate
from sdbench.flags.parser import parse
from sdbench.inputs.images import decode_image
from sdbench.inputs.shards import DRAW, IMAGES_HASH, hash_of_images, read_index, was_trained_on
from sdbench.models.feature_extractors import load_clip, load_fid
from sdbench.records.summary import evaluation_summary
from sdbench.training.resuming import data_of
from tests.forked_runs import run_ranks
from tests.runs import TINY, change_weights, check_keys, files_of, refusal
from tests.samples import Hostile, encoded, picture, pillow_square, write_shards
from tests.scoring_models import save_clip, save_inception

SIZE = 32  # pixels
STEPS = 2
TWO_SCALES = ['--guidance', '1', '4']
INCEPTION = ['--inception', __file__]


class SmallNetwork(torch.nn.Module):
    """Returns 12 features per image. The matrix root of InceptionV3's 2048 features would take seconds."""
    num_features = 12

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().mean(dim=1).flatten(1)[:, ::SIZE ** 2 // 12][:, :12]


def fid_of_small_network(path: str) -> FrechetInceptionDistance:
    return FrechetInceptionDistance(SmallNetwork(), reset_real_features=False)


def by_small_network(argv: list[str]) -> None:
    """Run evaluate.py with the small network. Ranks above 0 are on machines that prefer another precision."""
    evaluate.load_fid = fid_of_small_network
    evaluate.best_precision = lambda on_gpu: 'fp32' if os.environ['RANK'] == '0' else 'amp_bf16'
    evaluate.main(argv)


@pytest.fixture(scope='module', autouse=True)
def small_network():
    """Use the small network instead of InceptionV3 for any file."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, 'load_fid', fid_of_small_network)
        yield


@pytest.fixture(scope='module')
def clip(tmp_path_factory) -> list:
    return ['--clip', save_clip(tmp_path_factory.mktemp('clip') / 'clip')]


@pytest.fixture(scope='module')
def evaluated(tmp_path_factory, pipeline, shards, clip) -> SimpleNamespace:
    """Return `out` and `record` of an evaluation of five samples at two guidance scales with both networks."""
    out = tmp_path_factory.mktemp('evaluated') / 'out'
    return SimpleNamespace(out=out, record=run(pipeline, shards, out, *clip, *INCEPTION, *TWO_SCALES))


def run(model, data, out: Path, *flags) -> dict:
    return evaluate.main(arguments(model, data, out, *flags))


def arguments(model, data, out: Path, *flags) -> list[str]:
    return list(map(str, [model, data, '--out', out, '--results', out.with_name('results.jsonl'), '--steps', STEPS,
                          '--batch_size', 2, '--samples', 5, *flags]))


def images_in(out: Path, guidance: float) -> torch.Tensor:
    """Return the generated images, uint8 (B, 3, H, W)."""
    return torch.stack([pil_to_tensor(Image.open(path)) for path in sorted((out / f'guidance-{guidance}').iterdir())])


def assert_same_images(one: torch.Tensor, other: torch.Tensor) -> None:
    """Check that images differ by rounding only, which depends on the batch size."""
    assert (one.int() - other.int()).abs().max() <= 1


def test_the_images_equal_those_of_diffusers_own_pipeline_with_noise_by_sample_number(evaluated, pipeline, samples):
    diffusers = StableDiffusionPipeline.from_pretrained(pipeline)
    captions = [sample['caption'] for sample in samples[:5]]
    for guidance in (1.0, 4.0):
        noise = [torch.Generator().manual_seed(17_000_000 + number) for number in range(5)]
        expected = diffusers(captions, generator=noise, num_inference_steps=STEPS, guidance_scale=guidance).images
        assert_same_images(images_in(evaluated.out, guidance), torch.stack([*map(pil_to_tensor, expected)]))


def test_the_first_caption_of_an_image_is_used_or_the_one_that_caption_names(several_captions, samples):
    for flags, ending in ([], ''), (['--caption', 'long'], ', which is long'):
        settings = parse(Evaluate, '', arguments('model', several_captions, Path('out'), *flags))
        captions = evaluate.read_references(settings, read_index(several_captions), SIZE, None)
        assert captions == [f'{sample["caption"]}{ending}' for sample in samples[:5]]


def test_two_processes_with_another_batch_size_generate_and_score_the_same_images(
        server, tmp_path, evaluated, pipeline, shards, clip):
    argv = arguments(pipeline, shards, tmp_path / 'out', *clip, *INCEPTION, *TWO_SCALES, '--batch_size', 3)
    log = tmp_path / 'log'
    assert run_ranks(server, [log, log], by_small_network, [(argv,)] * 2) == [0, 0], log.read_text()
    by_two = json.loads((tmp_path / 'results.jsonl').read_text())
    assert (by_two['num_devices'], by_two['images_generated']) == (2, 10)
    for by_two_ranks, by_one in zip(by_two['scores'], evaluated.record['scores'], strict=True):
        assert by_two_ranks == pytest.approx(by_one, rel=1e-3)
        assert_same_images(*(images_in(out, by_one['guidance']) for out in (tmp_path / 'out', evaluated.out)))


def test_an_interrupted_evaluation_generates_only_missing_images_and_ends_like_an_uninterrupted_one(
        tmp_path, evaluated, pipeline, shards, clip, monkeypatch):
    out = tmp_path / 'out'
    save = Image.Image.save

    def stop_at_the_third(image, file, *options, **more):
        if len(list(out.glob('*/*.png'))) == 2:
            file.write(b'half an image')
            raise KeyboardInterrupt
        save(image, file, *options, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, 'save', stop_at_the_third)
        with pytest.raises(SystemExit):
            run(pipeline, shards, out, *clip, *TWO_SCALES)
    times = {path: path.stat().st_mtime_ns for path in out.glob('*/*.png')}
    assert len(times) == 2
    again = run(pipeline, shards, out, *clip, *INCEPTION, *TWO_SCALES)
    assert again['images_generated'] == evaluated.record['images_generated'] - 2
    assert again['scores'] == evaluated.record['scores']
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    assert files_of(out) == files_of(evaluated.out)

    # With more samples and one network, only the additional images are generated.
    more = run(pipeline, shards, out, *INCEPTION, *TWO_SCALES, '--samples', 6)
    assert more['images_generated'] == 2
    assert more['scores'][0]['clip_score'] is None


def test_an_out_with_another_seed_other_data_or_another_model_is_refused(
        tmp_path, evaluated, pipeline, shards, clip, capfd):
    def changed(file: str, old: str, new: str) -> Path:
        """Return a copy of the pipeline with a change in one of its files."""
        folder = shutil.copytree(pipeline, tmp_path / file.partition('/')[0])
        (folder / file).write_text((folder / file).read_text().replace(old, new))
        return folder

    before = files_of(evaluated.out)
    others = write_shards(tmp_path / 'others', [{'jpg': encoded(picture(9)), 'caption': 'x'}] * 5)
    by_scheduler = changed('scheduler/scheduler_config.json', 'v_prediction', 'epsilon')
    by_tokenizer = changed('tokenizer/tokenizer.json', '"a": ', '"another a": ')
    for model, data, seed, key in ((pipeline, shards, 18, 'seed 17, and this command has 18'),
                                   (pipeline, others, 17, 'data_sha256'), (by_scheduler, shards, 17, 'scheduler'),
                                   (by_tokenizer, shards, 17, 'tokenizer_sha256')):
        line = refusal(capfd, run, model, data, evaluated.out, *clip, *TWO_SCALES, '--seed', seed)
        assert f'out was begun with {key}' in line
    assert files_of(evaluated.out) == before


def test_the_fid_equals_that_of_torchmetrics_for_generated_and_real_images(evaluated, samples):
    squares = [pillow_square(sample['jpg']).resize((SIZE, SIZE), Image.BILINEAR) for sample in samples[:5]]
    for score in evaluated.record['scores']:
        metric = FrechetInceptionDistance(SmallNetwork())
        metric.update(torch.stack([*map(pil_to_tensor, squares)]), real=True)
        metric.update(images_in(evaluated.out, score['guidance']), real=False)
        assert score['fid'] == pytest.approx(metric.compute().item(), rel=0.02)  # Pillow resizes differently


@pytest.mark.long
def test_the_features_for_the_fid_equal_those_of_torch_fidelity(tmp_path, samples):
    weights = str(tmp_path / 'inception.pth')
    save_inception(weights)
    reference = FeatureExtractorInceptionV3('inception-v3-compat', ['2048'], feature_extractor_weights_path=weights)
    pictures = torch.stack([decode_image(sample['jpg'], SIZE) for sample in samples[:2]])
    with torch.no_grad():
        torch.testing.assert_close(load_fid(weights).inception(pictures), reference(pictures)[0])


def test_the_clip_score_equals_the_cosine_similarity_from_transformers(evaluated, samples, clip):
    model, processor = (kind.from_pretrained(clip[1]) for kind in (CLIPModel, CLIPProcessor))
    captions = [sample['caption'] for sample in samples[:5]]
    inputs = processor(text=captions, images=list(images_in(evaluated.out, 1.0)), return_tensors='pt', padding=True)
    with torch.no_grad():
        output = model(**inputs)  # embeddings of length 1
    expected = 100 * (output.image_embeds * output.text_embeds).sum(dim=1).mean().item()
    assert expected > 1
    assert evaluated.record['scores'][0]['clip_score'] == pytest.approx(expected, rel=1e-4)


def test_a_caption_that_is_too_long_for_clip_is_truncated_and_keeps_its_end_token(clip):
    processor = load_clip(clip[1]).processor
    cut, whole = (processor(text=caption, images=pil_to_tensor(picture(2)), return_tensors='pt')['input_ids']
                  for caption in ('b ' * 200, 'b ' * 75))  # the second is 77 tokens, with its start and its end
    assert torch.equal(cut, whole)


def test_an_error_about_an_image_that_does_not_decode_has_its_number(tmp_path, pipeline, capfd):
    good = {'jpg': encoded(picture(1)), 'caption': 'a cat'}
    broken = write_shards(tmp_path / 'broken', [good, good | {'jpg': b'no'}, good, good, good])
    assert f'sample 1 of DATA {broken}' in refusal(capfd, run, pipeline, broken, tmp_path / 'out', *INCEPTION)


def test_the_record_names_the_model_the_data_and_the_networks(evaluated, pipeline, shards, clip):
    record = evaluated.record
    kept = json.loads(evaluated.out.with_name('results.jsonl').read_text().splitlines()[0])
    assert kept == json.loads(json.dumps(record))
    expected = {'stage': 'evaluate', 'samples': 5, 'images_generated': 10, 'batch_size': 2, 'clip': 'clip',
                'fid_is_biased': True, 'fid_of_published_weights': False}
    assert {key: record[key] for key in expected} == expected
    assert record['images_per_sec'] == record['images_per_sec_per_device'] > 0
    check_keys(record, 'evaluate.py')
    again = run(pipeline, shards, evaluated.out, *clip, *TWO_SCALES)
    assert (again['images_generated'], again['images_per_sec']) == (0, None)
    summary = evaluation_summary(record)
    assert 'biased below 10,000 images' in summary and 'other weights than published FIDs' in summary


def test_without_networks_images_are_generated_and_not_scored(tmp_path, pipeline, shards, clip, capfd):
    record = run(pipeline, shards, tmp_path / 'out', '--guidance', 1)
    assert record['images_generated'] == 5
    assert record['scores'] == [{'guidance': 1.0, 'fid': None, 'clip_score': None}]
    output = capfd.readouterr().out
    assert '--inception' in output and 'not known to be held out' in output
    scored = run(pipeline, shards, tmp_path / 'out', '--guidance', 1, *clip)
    assert scored['images_generated'] == 0
    assert scored['scores'][0]['clip_score'] is not None


def test_it_is_known_only_in_some_cases_whether_a_model_was_trained_on_the_data():
    def side(name: str, conversion: str) -> dict:
        return {'share': 0.1, 'seed': 17, 'conversion': conversion, 'side': name}

    index = {'shards': [], DRAW: side('held out', 'a')}
    here = {IMAGES_HASH: hash_of_images(index), DRAW: index[DRAW]}
    other_side = {IMAGES_HASH: 'b', DRAW: side('training', 'a')}
    other_conversion = {IMAGES_HASH: 'c', DRAW: side('training', 'b')}  # perhaps the same images at another size
    older = {IMAGES_HASH: 'd', DRAW: {'share': 0.1, 'seed': 17, 'side': 'training'}}
    without = {IMAGES_HASH: 'e', DRAW: None}
    for phases, expected in (([here, other_side], True), ([other_side, other_side], False), ([], False),
                             ([other_conversion, other_side], None), ([other_side, other_conversion], None),
                             ([without, other_side], None), ([older], None), ([{}, other_side], None),
                             (data_of({}), None)):  # the last: an older checkpoint, or another program
        assert was_trained_on(phases, index) is expected, phases


def test_a_checkpoint_generates_the_same_images_as_its_export_and_the_record_has_its_training(
        tmp_path, smallest_model, model_folder, shards, clip, capfd):
    train(['--remote', shards, *TINY, '--model_name', smallest_model, '--pretrained', '--tokenizer', model_folder,
           '--image_size', str(SIZE), '--use_ema', '--ema_half_life', '1ba', '--max_duration', '2ba', '--num_workers',
           '0', '--save_folder', 'kept', '--results', '-'])
    record = run('kept', shards, tmp_path / 'out', *clip)
    assert record['trained_on_data']
    assert 'trained on DATA' in capfd.readouterr().out
    assert (record['trained_batches'], record['images_seen'], record['weights']) == (2, 8, 'EMA')
    assert (record['training']['batch_size'], record['model_name']) == (4, smallest_model)
    assert record['training']['gpu_hours'] > 0
    export(['kept', 'pipeline'])
    exported = run(tmp_path / 'pipeline', shards, tmp_path / 'exported', *clip)
    about = ('model_sha256', 'trained_on_data', 'weights', 'trained_batches', 'images_seen')
    assert [exported[key] for key in about] == [record[key] for key in about]
    assert files_of(tmp_path / 'exported') == files_of(tmp_path / 'out')


@pytest.mark.parametrize('broken, file, weight, words', [
    ('pipeline', 'vae/diffusion_pytorch_model.safetensors', 'decoder.conv_out.bias', 'inf or NaN'),
    ('clip', 'model.safetensors', 'visual_projection.weight', 'clip_score at guidance 7.5 is nan')])
def test_no_record_is_written_if_an_image_or_a_score_is_not_finite(
        pipeline, shards, clip, tmp_path, capfd, broken, file, weight, words):
    folders = {'pipeline': pipeline, 'clip': clip[1]}
    folders[broken] = shutil.copytree(folders[broken], tmp_path / 'broken')
    change_weights(folders[broken] / file, lambda weights: weights[weight].fill_(torch.nan))
    assert words in refusal(capfd, run, folders['pipeline'], shards, tmp_path / 'out', '--clip', folders['clip'])
    assert not (tmp_path / 'results.jsonl').exists()


@pytest.mark.parametrize('content', [{'conv.weight': torch.ones(3)}, Hostile])
def test_a_wrong_file_for_inception_is_refused_with_the_address_of_the_right_one(tmp_path, content):
    path = tmp_path / 'inception.pth'
    torch.save(Hostile(tmp_path / 'ran') if content is Hostile else content, path)
    with pytest.raises(ValueError, match=f'^--inception {path} .* download .*-2015-12-05-6726825d.pth$'):
        load_fid(str(path))
    assert not (tmp_path / 'ran').exists()


@pytest.mark.parametrize('lost, words', [
    ('visual_projection.weight', 'first visual_projection.weight'), ('*processor_config.json', '')])
def test_a_clip_model_without_all_its_weights_or_its_processor_is_refused(tmp_path, clip, lost, words):
    folder = shutil.copytree(clip[1], tmp_path / 'incomplete')
    if lost.endswith('.weight'):
        change_weights(folder / 'model.safetensors', lambda weights: weights.pop(lost))
    for file in folder.glob(lost):
        file.unlink()
    with pytest.raises(ValueError, match=f'--clip {folder} is not a folder .*{words}.*; download one: '):
        load_clip(str(folder))

"""The model, the run and its record, through the real Trainer."""
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer import Trainer
from composer.core import Timestamp
from conftest import TINY, write_shards
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextModel

import benchmark
from benchmark import StableDiffusion, main
from data import SyntheticImageCaptionDataset, build_loader
from harness import measurement as measuring
from harness.measurement import Measurement
from harness.options import benchmark_parser
from harness.preflight import fill_in_training_defaults, refuse_bad_training
from harness.record import training_settings
from models.flops import peak_tflops
from models.loading import SD2_BASE, find_model

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope='module')
def sd2_base() -> StableDiffusion:
    with torch.device('meta'):
        return StableDiffusion(SD2_BASE, image_size=512)


def parameters(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def batch_of(size: int = 64, num: int = 2, vocab: int = 49408) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {'image': torch.rand(num, 3, size, size, generator=generator) * 2 - 1,
            'caption': torch.randint(vocab, (num, 77), generator=generator)}


def test_stable_diffusion_2_base_has_its_published_sizes(sd2_base):
    assert parameters(sd2_base.unet) == 865_910_724
    assert parameters(sd2_base.vae) == 83_653_863
    assert parameters(sd2_base.text_encoder) == 340_387_840
    attention = [block.attentions[0].transformer_blocks[0].attn1 for block in sd2_base.unet.down_blocks[:3]]
    assert [layer.heads for layer in attention] == [5, 10, 20]
    assert sd2_base.unet.mid_block.attentions[0].transformer_blocks[0].attn1.heads == 20
    assert sd2_base.vae.config.scaling_factor == 0.18215
    assert len(sd2_base.scheduler) == 1000
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000) ** 2
    alphas = StableDiffusion('tiny', 64).scheduler.alphas_cumprod
    torch.testing.assert_close(alphas, torch.cumprod(1 - betas, dim=0), atol=1e-6, rtol=0)


@pytest.mark.parametrize('image_size, unet, vae, total', [(512, 2408.7, 1116.7, 3570.5), (256, 539.3, 272.7, 857.2)])
def test_flops_of_an_image_are_the_published_ones(image_size, unet, vae, total):
    with torch.device('meta'):
        model = StableDiffusion(SD2_BASE, image_size)
    flops = model.flops_per_image
    assert flops['unet'] / 1e9 == pytest.approx(unet, abs=0.1)
    assert flops['vae'] / 1e9 == pytest.approx(vae, abs=0.1)
    assert flops['text_encoder'] / 1e9 == pytest.approx(45.1, abs=0.1)
    stored = {'image': torch.empty(3, 3, 256, 256, device='meta'), 'caption': torch.empty(3, 77, device='meta')}
    assert model.flops_per_batch(stored) / 1e9 == pytest.approx(3 * total, abs=0.3)


def test_the_encoders_are_frozen_in_eval_mode_and_get_no_gradient():
    model = StableDiffusion('tiny', image_size=64).train()
    assert model.unet.training and not model.vae.training and not model.text_encoder.training
    assert not any(module.training for module in model.vae.modules())
    outputs = model(batch_of())
    model.loss(outputs, batch_of()).backward()
    assert all(p.grad is None and not p.requires_grad for part in (model.vae, model.text_encoder)
               for p in part.parameters())
    assert all(p.grad is not None for p in model.unet.parameters())


@pytest.mark.parametrize('prediction_type', ['epsilon', 'v_prediction'])
def test_the_loss_is_that_of_the_ddpm_papers_formula(prediction_type):
    model, batch = StableDiffusion('tiny', image_size=64), batch_of()
    model.prediction_type = prediction_type
    torch.manual_seed(7)
    prediction, target = model(batch)
    torch.manual_seed(7)  # the same draws, in the same order
    latents = model.vae.encode(batch['image']).latent_dist.sample() * 0.18215
    noise, timesteps = torch.randn_like(latents), torch.randint(1000, (2,))
    betas = torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000, dtype=torch.float64) ** 2
    alpha = torch.cumprod(1 - betas, 0)[timesteps].view(-1, 1, 1, 1)
    noised = (alpha.sqrt() * latents + (1 - alpha).sqrt() * noise).float()
    expected = noise if prediction_type == 'epsilon' else (alpha.sqrt() * noise - (1 - alpha).sqrt() * latents).float()
    text = model.text_encoder(batch['caption']).last_hidden_state
    torch.testing.assert_close(target, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(prediction, model.unet(noised, timesteps, text).sample, atol=1e-5, rtol=0)
    loss = float(model.loss((prediction, target), batch))
    assert loss == pytest.approx(float((prediction - target).pow(2).mean()))


def test_every_timestep_is_drawn_the_first_and_the_last_too():
    model, seen = StableDiffusion('tiny', image_size=64), set()
    model.encode = lambda batch: (torch.zeros(4000, 4, 1, 1), torch.zeros(4000, 77, 64))
    model.unet.forward = lambda noised, timesteps, text: (
        seen.update(timesteps.tolist()), type('Output', (), {'sample': noised}))[1]
    for _ in range(5):
        model({})
    assert min(seen) == 0 and max(seen) == 999


def test_the_loss_falls_when_one_batch_is_learned():
    torch.manual_seed(0)
    model = StableDiffusion('tiny', image_size=64)
    losses = []

    class Fixed(StableDiffusion):
        def forward(self, batch):
            torch.manual_seed(1)  # the same noise and timesteps at every step
            return super().forward(batch)

        def loss(self, outputs, batch):
            losses.append(super().loss(outputs, batch))
            return losses[-1]

    model.__class__ = Fixed
    Trainer(model=model, train_dataloader=build_loader(SyntheticImageCaptionDataset(64, 4), 4, 0), device='cpu',
            optimizers=torch.optim.AdamW(model.unet.parameters(), lr=3e-3), max_duration='40ba',
            progress_bar=False, seed=1).fit()
    assert losses[-1] < 0.5 * losses[0]


def test_evaluation_reports_the_mean_squared_error():
    model = StableDiffusion('tiny', image_size=64)
    trainer = Trainer(model=model, device='cpu', progress_bar=False,
                      eval_dataloader=build_loader(SyntheticImageCaptionDataset(64, 8), 4, 0))
    trainer.eval()
    assert 0.5 < float(trainer.state.eval_metrics['eval']['MeanSquaredError'].compute()) < 2


RECORD_KEYS = {
    'date', 'command', 'git_commit', 'device', 'num_devices', 'num_nodes', 'versions', 'model_name', 'image_size',
    'batch_size', 'device_train_microbatch_size', 'precision', 'encoder_precision', 'use_ema', 'channels_last',
    'attention', 'compile', 'gradient_checkpointing', 'fused_optimizer', 'dataset', 'encoders', 'num_workers', 'seed',
    'images_per_sec', 'images_per_sec_per_device', 'batch_seconds_median', 'batch_seconds_p10', 'batch_seconds_p90',
    'drift', 'data_wait_fraction', 'peak_memory_gib', 'tflops_per_image', 'tflops_per_sec_per_device', 'mfu',
    'warmup_batches', 'measured_batches', 'loss',
}


def check_record(record: dict) -> None:
    """What must hold between the figures of any record."""
    assert RECORD_KEYS <= set(record)
    assert record['measured_batches'] == 3 and record['warmup_batches'] == 1
    assert record['batch_seconds_p10'] <= record['batch_seconds_median'] <= record['batch_seconds_p90']
    slowest, fastest = (record['batch_size'] / record[f'batch_seconds_{p}'] for p in ('p90', 'p10'))
    assert slowest * 0.7 < record['images_per_sec'] < fastest * 1.3
    assert record['images_per_sec_per_device'] == pytest.approx(record['images_per_sec'] / record['num_devices'])
    assert 0 <= record['data_wait_fraction'] < 1 and record['drift'] > -1
    assert record['tflops_per_sec_per_device'] == pytest.approx(
        record['images_per_sec_per_device'] * record['tflops_per_image'])
    assert 0.1 < record['peak_memory_gib'] < 24 and 0 < record['loss'] < 5
    assert record['versions']['torch'] == torch.__version__.split('+')[0]


def test_a_synthetic_run_appends_its_record_and_prints_it_last(results, capfd):
    for runs in (1, 2):
        main(['--use_synth_data', '--use_ema', *TINY, '--results', str(results)])
        lines = capfd.readouterr().out.strip().splitlines()
        assert results.read_text().splitlines()[-1] == lines[-1] and len(results.read_text().splitlines()) == runs
    record = json.loads(lines[-1])
    check_record(record)
    assert (record['dataset'], record['use_ema'], record['num_devices'], record['mfu']) == ('synthetic', True, 1, None)
    assert lines[-2].startswith('full training') and '2,867,200,000 images' in lines[-2]


def test_a_run_on_real_shards_reads_jpegs_with_workers(results, shards):
    record = main(['--remote', shards, *TINY, '--num_workers', '2', '--results', str(results)])
    check_record(record)
    assert (record['dataset'], record['num_workers']) == ('streaming', 2)


def test_a_model_folder_gives_its_architecture_weights_and_tokenizer(results, shards, model_folder):
    record = main(['--remote', shards, *TINY, '--model_name', model_folder, '--pretrained', '--tokenizer',
                   model_folder, '--results', str(results)])
    check_record(record)
    model = StableDiffusion(model_folder, 64, pretrained=True)
    assert model.prediction_type == 'v_prediction'
    saved = AutoencoderKL.from_pretrained(model_folder, subfolder='vae').state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.vae.state_dict().items())
    saved = CLIPTextModel.from_pretrained(model_folder, subfolder='text_encoder').state_dict()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.text_encoder.state_dict().items())
    saved = UNet2DConditionModel.from_pretrained(model_folder, subfolder='unet')
    assert not torch.equal(saved.conv_in.weight, model.unet.conv_in.weight)  # the UNet starts from scratch


def test_two_processes_make_one_record_of_both(results, shards):
    run = subprocess.run([sys.executable, '-m', 'composer.cli.launcher', '-n', '2', 'benchmark.py', '--remote', shards,
                          '--use_ema', *TINY, '--results', str(results)], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    [line] = results.read_text().splitlines()
    check_record(json.loads(line))
    assert json.loads(line)['num_devices'] == 2 and line in run.stdout


def test_the_optimizer_holds_the_unet_alone(results):
    args = benchmark_parser('').parse_args(['--use_synth_data', *TINY, '--results', str(results)])
    fill_in_training_defaults(args)
    refuse_bad_training(args)
    model = StableDiffusion('tiny', 64)
    data = benchmark.build_data(args, find_model('tiny'))
    trainer = benchmark.build_trainer(args, model, data, Measurement(1, 3), benchmark.Safeguard(args.seed))
    [group] = trainer.state.optimizers[0].param_groups
    assert {id(p) for p in group['params']} == {id(p) for p in model.unet.parameters()}
    assert (group['lr'], group['weight_decay'], group['fused']) == (1e-4, 0.001, True)


def test_the_clock_leaves_out_the_warm_up_and_counts_the_wait(monkeypatch):
    clock = iter([0, 1, 9, 10, 11, 13, 15, 16, 17, 20])  # fit; then asked, got and batch end, for each batch
    monkeypatch.setattr(measuring.time, 'perf_counter', lambda: next(clock))
    measurement = Measurement(warmup_batches=1, measure_batches=2)
    measurement.fit_start(None, None)
    for batch in (1, 2, 3):
        measurement.before_dataloader(None, None)
        measurement.after_dataloader(None, None)
        measurement.batch_end(SimpleNamespace(
            timestamp=Timestamp(batch=batch, sample=4 * batch), total_loss_dict={'loss/train/total': 0.5},
            previous_timestamp=Timestamp(batch=batch - 1, sample=4 * batch - 4)), None)
    assert measurement.batch_seconds == [5, 5] and measurement.wait_seconds == [2, 1] and measurement.samples == 8
    figures = measuring.figures(measurement)
    assert figures['images_per_sec'] == 0.8 and figures['data_wait_fraction'] == pytest.approx(0.3)


def test_drift_and_percentiles_are_of_the_slowest_rank(monkeypatch):
    measurement = Measurement(1, 6)
    measurement.batch_seconds, measurement.wait_seconds, measurement.samples = [1, 1, 1, 2, 1, 3], [0.0] * 6, 60
    other = ([1, 2, 2, 2, 2, 2], [1.0] * 6, 40.0, {7})
    monkeypatch.setattr(benchmark.dist, 'all_gather_object', lambda mine: [mine, other])
    monkeypatch.setattr(benchmark.dist, 'get_world_size', lambda: 2)
    figures = measuring.figures(measurement, bad_samples={5, 7})  # slowest: 1 2 2 2 2 3
    assert figures['images_per_sec'] == 60 / 11 and figures['images_per_sec_per_device'] == 30 / 11
    assert figures['drift'] == pytest.approx(3 / 5 - 1)  # the last two batches take 5 s, the first two 3 s
    assert [figures[f'batch_seconds_{name}'] for name in ('p10', 'median', 'p90')] == [1.5, 2, 2.5]
    assert figures['data_wait_fraction'] == pytest.approx(6 / 11) and figures['peak_memory_gib'] == 40
    assert figures['bad_samples'] == 2


def test_the_readmes_lines_export_the_average_of_a_saved_run(results, tmp_path, monkeypatch):
    main(['--use_synth_data', '--use_ema', *TINY, '--save_folder', str(tmp_path / 'checkpoints'),
          '--save_interval', '2ba', '--results', str(results)])
    [lines] = [block for block in (ROOT / 'README.md').read_text().split('```python') if 'save_pretrained' in block]
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(lines.split('```')[0].replace('StableDiffusion()', "StableDiffusion('tiny', 64)"), namespace)
    exported = UNet2DConditionModel.from_pretrained('averaged/unet')
    averages = dict(namespace['state']['algorithms'])['EMA']['ema_model']
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, averages[f'unet.{name}'])
    live = namespace['state']['model']
    assert any(not torch.equal(average, live[name]) for name, average in averages.items())


@pytest.mark.parametrize('num_workers', [0, 2])
def test_the_loader_alone_is_measured_through_the_same_loader(results, shards, num_workers, capfd):
    record = main(['--remote', shards, *TINY, '--loader_only', '--measure_batches', '20', '--num_workers',
                   str(num_workers), '--results', str(results)])
    assert json.loads(results.read_text()) == record and record['stage'] == 'loader'
    assert record['measured_batches'] == 20 and record['loader_images_per_sec'] > 0  # more than an epoch of 6 batches
    assert record['loader_images_per_sec_per_worker'] == record['loader_images_per_sec'] / max(1, num_workers)
    assert 'images_per_sec' not in record and 'loader' in capfd.readouterr().out


@pytest.mark.parametrize('name, peak', [
    ('NVIDIA A100-SXM4-40GB', 312), ('NVIDIA H100 80GB HBM3', 989), ('NVIDIA H200', 989), ('NVIDIA B200', 2250),
    ('NVIDIA H100 PCIe', 756), ('NVIDIA H200 NVL', 835), ('Tesla T4', None), ('NVIDIA A10G', None),
])
def test_only_known_devices_have_a_peak(monkeypatch, name, peak):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda: name)
    assert peak_tflops('amp_bf16') == peak
    assert peak_tflops('fp32') is None


def test_wandb_is_not_touched_without_one_of_its_flags(results, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(['--use_synth_data', *TINY, '--results', str(results)])
    assert not (tmp_path / 'wandb').exists()


SYNTHETIC = ['--use_synth_data', *TINY]


@pytest.mark.parametrize('argv, words', [
    (TINY, ['--remote', '--use_synth_data']),
    ([*SYNTHETIC, '--remote', 'x'], ['--remote', '--use_synth_data', 'not both']),
    ([*SYNTHETIC, '--batch_size', '6', '--device_train_microbatch_size', '4'], ['--device_train_microbatch_size 4']),
    ([*SYNTHETIC, '--device_train_microbatch_size', '8'], ['--device_train_microbatch_size 8', '4 images']),
    ([*SYNTHETIC, '--device_train_microbatch_size', 'auto'], ['--device_train_microbatch_size auto', 'GPU']),
    ([*SYNTHETIC, '--device_train_microbatch_size', 'two'], ['--device_train_microbatch_size two']),
    ([*SYNTHETIC, '--image_size', '100'], ['--image_size 100', 'multiple of 8', '96']),
    ([*SYNTHETIC, '--batch_size', '0'], ['--batch_size', '0']),
    ([*SYNTHETIC, '--num_workers', '-1'], ['--num_workers', '-1']),
    ([*SYNTHETIC, '--dollars_per_gpu_hour', 'nan'], ['--dollars_per_gpu_hour', 'nan']),
    ([*SYNTHETIC, '--precision', 'fp31'], ['--precision', 'fp31', 'fp32']),
    ([*SYNTHETIC, '--precision', 'amp_fp16'], ['--precision amp_fp16', 'GPU']),
    ([*SYNTHETIC, '--attention', 'xformers'], ['--attention xformers', 'sdpa']),
    ([*SYNTHETIC, '--max_duration', 'long'], ['--max_duration long', '5000ba']),
    ([*SYNTHETIC, '--max_duration', '1ba'], ['--max_duration 1ba', '--warmup_batches 1']),
    ([*SYNTHETIC, '--save_folder', 'tests'], ['--save_folder tests', 'new']),
    ([*SYNTHETIC, '--save_interval', 'often'], ['--save_interval often', '5000ba']),
    ([*SYNTHETIC, '--results', '/nowhere/results.jsonl'], ['--results /nowhere/results.jsonl', 'No such file']),
    ([*SYNTHETIC, '--model_name', 'nobody/nothing'], ['--model_name nobody/nothing', 'hub', 'folder']),
    ([*SYNTHETIC, '--model_name', 'tests'], ['--model_name tests', 'unet']),
    ([*SYNTHETIC, '--pretrained'], ['--model_name tiny', 'folder']),
    ([*SYNTHETIC, '--bach_size', '4'], ['--bach_size']),
    (['--remote', 'nowhere', *TINY], ['--remote nowhere', 'convert.py']),
    (['--remote', 's3://nowhere/x', *TINY], ['--remote s3://nowhere/x', 'could not be read']),
    (['--remote', 'SHARDS', *TINY, '--tokenizer', 'nobody/nothing'], ['--tokenizer nobody/nothing', 'folder']),
    (['--remote', 'SHARDS', *TINY, '--tokenizer', 'SHARDS'], ['--tokenizer', 'tokenizer.json']),
    (['--remote', 'SHARDS', *TINY, '--batch_size', '25'], ['--remote', '24 samples', '--batch_size 25']),
    (['--remote', 'OTHER', *TINY], ['--remote', 'jpg of bytes', 'png of bytes']),
])
def test_bad_input_is_one_line_that_names_the_flag_and_its_value(argv, words, capfd, shards, tmp_path, results,
                                                                 monkeypatch):
    monkeypatch.setenv('AWS_EC2_METADATA_DISABLED', 'true')
    if 'OTHER' in argv:
        write_shards(tmp_path / 'other', [{'png': b'', 'text': ''}] * 9, {'png': 'bytes', 'text': 'str'})
    places = {'SHARDS': shards, 'OTHER': str(tmp_path / 'other')}
    argv = [places.get(argument, argument) for argument in argv]
    with pytest.raises(SystemExit) as exit:
        main(argv if '--results' in argv else [*argv, '--results', str(results)])
    out, err = capfd.readouterr()
    assert exit.value.code == 2 and out == '' and err.count('\n') == 1 and err.startswith('benchmark.py: error: '), err
    assert all(word in err for word in words), err


def test_a_scheduler_that_predicts_something_else_is_refused(model_folder, tmp_path, capfd):
    shutil.copytree(model_folder, tmp_path / 'model')
    config = tmp_path / 'model' / 'scheduler' / 'scheduler_config.json'
    config.write_text(config.read_text().replace('v_prediction', 'sample'))
    with pytest.raises(SystemExit):
        main([*SYNTHETIC, '--model_name', str(tmp_path / 'model')])
    assert 'prediction_type sample' in capfd.readouterr().err


def test_a_batch_that_does_not_divide_over_the_devices_is_refused_with_a_better_one(monkeypatch, capfd):
    monkeypatch.setattr(benchmark.dist, 'get_world_size', lambda: 3)
    with pytest.raises(SystemExit):
        main([*SYNTHETIC, '--batch_size', '8'])
    assert '--batch_size 8 does not divide over 3 devices; use 6' in capfd.readouterr().err


def test_every_flag_has_a_help_line():
    assert all(action.help for action in benchmark_parser('')._actions)


def test_a_run_leaves_the_signals_as_they_were(results):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    main(['--use_synth_data', *TINY, '--results', str(results)])
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_passwords_and_signatures_in_urls_stay_out_of_records(monkeypatch):
    monkeypatch.setattr(sys, 'argv', ['benchmark.py', '--remote', 's3://key:secret@bucket/a?X-Sig=abc&b=c', 'a@b', '?'])
    args = benchmark_parser('').parse_args([])
    assert training_settings(args, latents=False)['command'] == "benchmark.py --remote 's3://***@bucket/a?***' a@b '?'"

"""A command refuses what it cannot do in one line, with the flag, its value and the fix.

A row is a command (behind variables of its environment, if any), its flags and the words that its line must hold. It is
run in a folder that has `shards` (24 samples), `pipeline` (of the tiny model), `prompts.txt` (one caption),
`no-prompt.txt`, `utf-16.txt`, `quote.txt` and `itself.txt` (flags), `records.csv` (a record with a comma too many),
`notes` (a folder with a file of the user's), `empty` (a folder), `photo.jpg`, `whole.safetensors`, and a LoRA in
`lora.safetensors` and `lora`; nothing listens at S3_ENDPOINT_URL. Refusals that need other files are tested next to the
code that makes them.
"""
import importlib
import shlex
import shutil

import pytest
import torch
from safetensors.torch import save_file

from sdbench.stores.s3 import make_client
from tests.runs import ROOT, one_error_line
from tests.samples import shaded

TINY = '--model_name tiny --image_size 64 --batch_size 4'
SYNTHETIC = f'--use_synth_data {TINY}'

ROWS = [
    # The command line itself
    ('benchmark.py', '--use_synth_data --batch-size 4', '--batch-size is not a flag; did you mean --batch_size?'),
    ('benchmark.py', '--use_synth_data --lora 8', '--lora is not a flag; this program trains the whole UNet'),
    ('benchmark.py', '@nothing.txt', '@nothing.txt cannot be read (No such file or directory)'),
    ('benchmark.py', '@utf-16.txt', '@utf-16.txt is not UTF-8 text; save it as UTF-8'),
    ('benchmark.py', '@itself.txt', '@itself.txt names itself (@itself.txt @itself.txt)'),
    ('benchmark.py', '@quote.txt', '@quote.txt, line 2: no closing quotation'),
    ('LOCAL_WORLD_SIZE=4(x2) benchmark.py', '--use_synth_data', 'LOCAL_WORLD_SIZE is 4(x2)'),
    ('WORLD_SIZE= RANK= LOCAL_RANK= benchmark.py', f'{SYNTHETIC} --lr_final 0.1', '--lr_schedule constant'),
    ('WORLD_SIZE= LOCAL_RANK= convert.py', 'missing out', 'missing does not exist; give a file, a folder, or a glob'),
    ('convert.py', 'notes out --caption_column .tags', '.tags: caption files end in .txt, .caption, .json (in any'),
    ('convert.py', "'' out", 'SOURCE: the value is empty; is a shell variable unset?'),

    # A training
    ('benchmark.py', '', 'give one of --remote, --use_synth_data and --use_synth_latents'),
    ('benchmark.py', '--use_synth_data --remote x', '--use_synth_latents, and only one'),
    ('benchmark.py', f'{SYNTHETIC} --batch_size 6 --device_train_microbatch_size 4', '(--batch_size 6); use 3'),
    ('benchmark.py', '--dry_run 8 --gpu RTX4091', '--gpu RTX4091 is not a known GPU; did you mean RTX 4090 or'),
    ('benchmark.py', '--dry_run 8 7', '--batch_size 2048 is not divisible by 7 devices; use 2016'),
    ('benchmark.py', f'{SYNTHETIC} --image_size 100', '--image_size: 100 is not a multiple of 8; use 96'),
    ('benchmark.py', f'{SYNTHETIC} --caption_drop 10', '--caption_drop: 10 is not a fraction between 0 and 1'),
    ('benchmark.py', f'--remote shards {TINY} --caption_weights lnog=3', '--caption_weights lnog: shards has no'),
    ('benchmark.py', f'--remote shards {TINY} --caption_weights caption=0', '--caption_weights are all 0, which'),
    ('benchmark.py', "--dry_run 8 --gpu ''", '--gpu: the value is empty; is a shell variable unset?'),
    ('benchmark.py', f'{SYNTHETIC} --budget 9 --dollars_per_gpu_hour H100=2', '--budget 9 needs a price for CPU'),
    ('benchmark.py', f'{SYNTHETIC} --max_duration 50', '--max_duration: 50 is not a time such as 5000ba or 2ep'),
    ('benchmark.py', f'{SYNTHETIC} --ema_half_life 5ba', '--ema_half_life needs --use_ema'),
    ('benchmark.py', f'--use_synth_latents {TINY} --random_flip', '--random_flip mirrors images'),
    ('benchmark.py', f'{SYNTHETIC} --pretrained --load_weights notes --sample_prompts nowhere', '(No such file'),
    ('benchmark.py', f'{SYNTHETIC} --sample_prompts prompts.txt', '--sample_prompts needs --pretrained; give both'),
    ('benchmark.py', f'{SYNTHETIC} --results notes', '--results notes is not a file to which lines of JSON can'),
    ('benchmark.py', f'{SYNTHETIC} --results nowhere/r.jsonl', '--results nowhere/r.jsonl: there is no folder'),
    ('benchmark.py', f'{SYNTHETIC} --precision amp_fp16', 'give --precision fp32'),
    ('benchmark.py', f'{SYNTHETIC} --compile reduce-overhead --device_train_microbatch_size 2', 'microbatch_size 4'),
    ('benchmark.py', f'{SYNTHETIC} --model_name nobody/nothing', '--model_name nobody/nothing is not a folder here'),
    ('benchmark.py', f'{SYNTHETIC} --use_ema --max_duration 9ba --ema_start 9ba', '--ema_start 9ba is not before'),

    # Data
    ('benchmark.py', f'--remote nowhere {TINY}', '--remote nowhere holds no index.json, so it is not a complete MDS'),
    ('benchmark.py', f'--remote shards {TINY} --batch_size 25', 'holds 24 samples, fewer than --batch_size 25'),
    ('convert.py', 'notes oci://bucket/a', 'OUT oci://bucket/a: only the stores s3://, gs:// and azure:// can be used'),
    ('convert.py', "notes 's3://<my-bucket>/a'", 'OUT s3://<my-bucket>/a: "<my-bucket>" cannot be the name'),
    ('S3_ENDPOINT_URL=http://<host>:9 benchmark.py', f'--remote s3://b/a {TINY}', '(ValueError: Invalid endpoint:)'),
    ('convert.py', 'notes nowhere://me:PASSWORD@bucket/out', 'OUT nowhere://***@bucket/out: only the stores s3://, gs://'),
    ('convert.py', 'photo.jpg notes', 'OUT notes already holds other files; give a new folder'),
    ('convert.py', 'photo.jpg prompts.txt', 'OUT prompts.txt cannot be written to (File exists)'),
    ('convert.py', 'photo.jpg s3://bucket/out', 'OUT s3://bucket/out cannot be read or written (Endpoint'),
    ('convert.py', 'empty out', 'nothing to convert in SOURCE empty: it holds no tars, Parquet or images'),
    ('convert.py', 'notes out --captions nothing.csv', 'nothing.csv: No such file or directory'),
    ('convert.py', 'notes out --size_limit 4gb', '--size_limit: 4gb'),
    ('AWS_PROFILE=nobody convert.py', 'photo.jpg s3://b/a', 'profile (nobody) could not be found'),
    ('LOCAL_RANK=0 convert.py', 'photo.jpg out', 'start it with python instead of a launcher'),
    ('encode.py', '--remote shards --out out --ray auto', '--ray auto needs --encoder_precision'),

    ('encode.py', '--remote shards', 'required: --out'),

    # Evaluations
    ('evaluate.py', 'notes shards --out s3://b/out', '--out s3://b/out is not a folder on this machine'),
    ('evaluate.py', 'notes shards --out out --steps 30', 'would not start from pure noise'),
    ('evaluate.py', 'notes shards --out out --clip nowhere', '--clip nowhere is not a folder with a CLIP model'),

    # Reports
    ('report.py', 'records.csv', 'records.csv:2: not a record: more cells than columns'),
    ('report.py', 'published.csv --csv /missing/table.csv', '/missing'),
    ('report.py', 'published.csv --csv published.csv', 'would overwrite a file with records'),
    ('report.py', 'published.csv --csv results.jsonl', '--csv: results.jsonl does not end in .csv'),
    ('report.py', 'published.csv --extrapolate 4096', 'a batch_size (if stated) of at least as many images as GPUs'),
    ('plan.py', '--gpu 8 H100', "8 is not a GPU count and a GPU name in quotes, such as '16 L40S'"),
    ('plan.py', '--images 1 2 3', '--images has 3 numbers and --schedule 2 phases'),
    ('plan.py', '--prices published.csv', '--prices published.csv has no column gpu'),
    ('plan.py', '--dollars_per_gpu_hour H10=3', '--dollars_per_gpu_hour H10=3: H10 is not a known GPU'),
    ('plan.py', "--training_flags '--max_duration 5ba'", '--max_duration has no effect on a plan; leave it out'),
    ('plan.py', "--training_flags '--image_size 256'", '--image_size has no effect on a plan; give image sizes in'),
    ('plan.py', '''--training_flags "'--compile"''', 'is not one or several flags'),
    ('plan.py', "--gpu '8 H200' records.csv", 'records.csv is a file; give records before the first flag'),
    ('plan.py', '--schedule 1000@512 2000@512', '--schedule has two phases at 512 pixels'),

    # Folders, weights, images and held-out samples in a training, an evaluation and an export
    ('benchmark.py', f'{SYNTHETIC} --save_folder dbfs:/run1', '--save_folder dbfs:/run1: only the stores s3://'),
    ('SLURM_STEP_NUM_TASKS=8 benchmark.py', SYNTHETIC, 'SLURM has started 8 tasks, but no launcher has set RANK'),
    ('benchmark.py', f'{SYNTHETIC} --save_folder notes', '--save_folder notes already holds files'),
    ('benchmark.py', f'{SYNTHETIC} --save_folder records.csv/kept', '--save_folder records.csv/kept cannot be'),
    ('benchmark.py', f'{SYNTHETIC} --load_weights notes', 'notes does not exist, or holds no complete checkpoint'),
    ('benchmark.py', f'{SYNTHETIC} --pretrained --sample_prompts no-prompt.txt', 'no-prompt.txt holds no prompt'),
    ('benchmark.py', f'--use_synth_latents {TINY} --eval_remote shards', 'holds images, but the training'),
    ('benchmark.py', f'{SYNTHETIC} --load_weights whole.safetensors', 'convert it: python -c'),
    ('benchmark.py', f'{SYNTHETIC} --pretrained --model_name whole.safetensors', '--model_name whole.safetensors is a'),
    ('benchmark.py', f'{SYNTHETIC} --load_weights lora.safetensors', '--load_weights lora.safetensors is a LoRA'),
    ('benchmark.py', f'{SYNTHETIC} --load_weights lora', 'merge it into its model FOLDER: python -c'),
    ('evaluate.py', 'whole.safetensors shards --out out', 'MODEL whole.safetensors is a single file'),
    ('evaluate.py', 'pipeline shards --out out --samples 25', 'fewer than --samples 25'),
    ('WORLD_SIZE=5 evaluate.py', 'pipeline shards --out out --samples 4', '4 is fewer than the 5'),
    ('evaluate.py', 'pipeline shards --out out --samples 4 --caption long', '--caption long: DATA shards has no'),
    ('evaluate.py', 'pipeline shards --out notes --samples 4', 'notes already holds other files'),
    ('evaluate.py', 'notes shards --out out --inception nowhere', '--inception nowhere is not torch-fidelity\'s file'),
    ('export.py', 'notes out', 'holds no complete checkpoint'),
    ('export.py', 'shards notes', 'notes already exists'),
]


@pytest.fixture
def folder(tmp_path, monkeypatch, shards, pipeline):
    """The folder described above; the test runs there."""
    (tmp_path / 'shards').symlink_to(shards)
    (tmp_path / 'pipeline').symlink_to(pipeline)
    (tmp_path / 'prompts.txt').write_text('a cat\n')
    (tmp_path / 'no-prompt.txt').write_text(' \n\n')
    (tmp_path / 'utf-16.txt').write_text('--use_synth_data', encoding='utf-16')
    (tmp_path / 'itself.txt').write_text('@itself.txt')
    (tmp_path / 'quote.txt').write_text("--use_synth_data\n--model_name 'tiny\n")
    (tmp_path / 'records.csv').write_text('device,num_devices\nx,1,618\n')
    (tmp_path / 'notes').mkdir()
    (tmp_path / 'empty').mkdir()
    (tmp_path / 'notes/mine.txt').write_text('mine')
    (tmp_path / 'photo.jpg').write_bytes(shaded(1))
    save_file({'model.diffusion_model.out.2.bias': torch.zeros(4)}, tmp_path / 'whole.safetensors')
    save_file({'lora_unet_mid_block.lora_up.weight': torch.zeros(4)}, tmp_path / 'lora.safetensors')
    (tmp_path / 'lora').mkdir()
    shutil.copy(tmp_path / 'lora.safetensors', tmp_path / 'lora/pytorch_lora_weights.safetensors')
    monkeypatch.setenv('S3_ENDPOINT_URL', 'http://127.0.0.1:1')
    make_client.cache_clear()
    shutil.copy(ROOT / 'published.csv', tmp_path)
    return tmp_path


@pytest.mark.parametrize('command, flags, words', ROWS)
def test_a_refusal_is_one_line_with_the_flag_its_value_and_the_fix(command, flags, words, folder, capfd, monkeypatch):
    *variables, command = command.split()
    for variable in variables:
        monkeypatch.setenv(*variable.split('='))
    program = importlib.import_module(command.removesuffix('.py'))
    before = sorted(folder.rglob('*'))
    line = one_error_line(shlex.split(flags), capfd, program.main)
    assert line.startswith(f'{command}: error: ')
    assert words in line
    assert sorted(folder.rglob('*')) == before  # nothing was begun

"""mcloud.yaml as today's mcli reads and sends it, and its commands as our parsers read them."""
import re
import shlex
import warnings
from pathlib import Path

from mcli import RunConfig
from mcli.models.run_config import FinalRunConfig

from settings import flags
from settings.train import Train

ROOT = Path(__file__).parents[1]
FILE = ROOT / 'mcloud.yaml'


def parse(path: Path, caplog) -> tuple[FinalRunConfig, list[str]]:
    """What `mcli run` sends, and all its complaints: Python warnings from parsing, log lines from finishing it."""
    with warnings.catch_warnings(record=True) as caught, caplog.at_level('WARNING', 'mcli'):
        warnings.simplefilter('always')
        config = FinalRunConfig.finalize_config(RunConfig.from_file(path))
    return config, [str(warning.message) for warning in caught] + [record.message for record in caplog.records]


def commands(config: FinalRunConfig) -> list[list[str]]:
    """The words of each line of the command block, as the shell splits them."""
    return [words for line in config.command.splitlines() if (words := shlex.split(line, comments=True))]


def test_mcli_sends_the_run_that_the_file_describes_without_a_warning(caplog):
    config, complaints = parse(FILE, caplog)
    assert complaints == []
    sent = config.to_create_run_api_input()['runInput']
    assert sent['runName'] == 'stable-diffusion-benchmark'
    assert sent['image'] == 'mosaicml/pytorch:2.7.0_cu126-python3.12-ubuntu22.04'
    assert sent['compute'] == {'gpus': 8, 'gpuType': 'a100_40gb'}
    assert sent['integrations'] == [{'type': 'git_repo', 'params': {'gitRepo': 'my-org/diffusion-benchmark'}}]
    assert sent['envVariables'] == [{'envKey': 'WANDB_PROJECT', 'envValue': 'stable-diffusion-benchmark'}]


def test_the_command_block_installs_and_runs_the_synthetic_example_on_what_the_compute_section_says(caplog):
    config, _ = parse(FILE, caplog)
    enter, install, run = commands(config)
    repository = config.integrations[0]['git_repo']
    assert enter == ['cd', Path(repository).name]
    assert install == ['pip', 'install', '-r', 'requirements.txt'] and (ROOT / install[-1]).is_file()
    program, file, *argv = run  # without flags of the launcher, which takes processes and nodes from the platform
    assert (program, file) == ('composer', 'benchmark.py')
    args = flags.parse(Train, '', argv)
    assert args.use_ema and args.use_synth_data and args.device_train_microbatch_size and not args.wandb_name


def test_the_second_example_and_the_rest_of_the_comments_hold_once_uncommented(tmp_path, caplog):
    copy = tmp_path / 'mcloud.yaml'
    copy.write_text(re.sub(r'# (?=composer |--wandb|S3_ENDPOINT_URL|cluster:)', '', FILE.read_text()))
    config, complaints = parse(copy, caplog)
    assert complaints == []
    assert config.compute['cluster'] == 'my-cluster'
    assert config.env_variables['S3_ENDPOINT_URL'] == 'https://s3.example.com'
    synthetic, streaming = [words for words in commands(config) if words[0] == 'composer']
    assert synthetic[:2] == streaming[:2] == ['composer', 'benchmark.py']
    args = flags.parse(Train, '', synthetic[2:])
    assert args.use_synth_data and args.wandb_name == 'synthetic'
    args = flags.parse(Train, '', streaming[2:])
    assert args.remote == 's3://my-bucket/laion/mds' and args.use_ema and args.device_train_microbatch_size
    assert not args.use_synth_data

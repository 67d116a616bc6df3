"""mcloud.yaml as today's mcli reads and sends it, and its commands as our parsers read them."""
import re
import shlex
import warnings
from pathlib import Path

from mcli import RunConfig
from mcli.models.run_config import FinalRunConfig

from sdbench.flags import parser as flags
from sdbench.flags.train import Train
from tests.runs import ROOT


def parse(path: Path, caplog) -> FinalRunConfig:
    """What `mcli run` sends, without a warning of Python's or a complaint in the log."""
    with warnings.catch_warnings(), caplog.at_level('WARNING', 'mcli'):
        warnings.simplefilter('error')
        config = FinalRunConfig.finalize_config(RunConfig.from_file(path))
    assert caplog.messages == []
    return config


def commands(config: FinalRunConfig) -> list[list[str]]:
    """The words of each line of the command block, as the shell splits them."""
    return [words for line in config.command.splitlines() if (words := shlex.split(line, comments=True))]


def test_the_file_installs_and_runs_the_synthetic_example_on_eight_gpus(caplog):
    config = parse(ROOT / 'mcloud.yaml', caplog)
    sent = config.to_create_run_api_input()['runInput']
    assert sent['compute'] == {'gpus': 8, 'gpuType': 'a100_40gb'}
    enter, install, run = commands(config)
    assert enter == ['cd', Path(config.integrations[0]['git_repo']).name]
    assert install == ['pip', 'install', '-r', 'requirements.txt']
    assert run[:2] == ['composer', 'benchmark.py']  # which takes processes and nodes from the platform
    settings = flags.parse(Train, '', run[2:])
    assert settings.use_ema
    assert settings.use_synth_data
    assert settings.device_train_microbatch_size


def test_the_second_example_and_the_rest_of_the_comments_hold_once_uncommented(tmp_path, caplog):
    copy = tmp_path / 'mcloud.yaml'
    text = (ROOT / 'mcloud.yaml').read_text()
    copy.write_text(re.sub(r'# (?=composer |--wandb|S3_ENDPOINT_URL|cluster:)', '', text))
    config = parse(copy, caplog)
    assert config.compute['cluster'] == 'my-cluster'
    assert config.env_variables['S3_ENDPOINT_URL'] == 'https://s3.example.com'
    synthetic, streaming = [flags.parse(Train, '', words[2:]) for words in commands(config) if words[0] == 'composer']
    assert synthetic.use_synth_data
    assert synthetic.wandb_name == 'synthetic'
    assert streaming.remote == 's3://my-bucket/laion/mds'
    assert streaming.use_ema
    assert not streaming.use_synth_data

"""mcloud.yaml as today's mcli reads and sends it, and its commands as our parsers read them."""
import re
import shlex
import warnings

from mcli import RunConfig
from mcli.models.run_config import FinalRunConfig

from sdbench.flags import parser as flags
from sdbench.flags.train import Train
from tests.runs import ROOT


def test_the_file_runs_both_examples_on_eight_gpus_once_its_comments_are_uncommented(tmp_path, caplog):
    path = tmp_path / 'mcloud.yaml'
    path.write_text(re.sub(r'# (?=composer |S3_ENDPOINT_URL|cluster:)', '', (ROOT / 'mcloud.yaml').read_text()))
    with warnings.catch_warnings(), caplog.at_level('WARNING', 'mcli'):  # as mcli complains of a field it does not know
        warnings.simplefilter('error')
        sent = FinalRunConfig.finalize_config(RunConfig.from_file(path)).to_create_run_api_input()['runInput']
    assert caplog.messages == []
    assert sent['compute'] == {'gpus': 8, 'gpuType': 'a100_40gb', 'cluster': 'my-cluster'}
    lines = [shlex.split(line, comments=True) for line in sent['command'].splitlines()]
    enter, install, *runs = [words for words in lines if words]
    assert enter == ['cd', 'diffusion-benchmark']
    assert install == ['pip', 'install', '-r', 'requirements.txt']
    assert [words[:2] for words in runs] == [['composer', 'benchmark.py']] * 2
    synthetic, streaming = [flags.parse(Train, '', words[2:]) for words in runs]
    assert (synthetic.use_ema, synthetic.use_synth_data, synthetic.device_train_microbatch_size) == (True, True, 4)
    assert (streaming.use_ema, streaming.remote) == (True, 's3://my-bucket/laion/mds')

"""Parts on a Ray cluster with two machines: a part that a lost machine was making is made elsewhere, byte for byte."""
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from functools import partial

import psutil
import pytest

import convert
import encode
from sdbench.datasets.workers import PACKAGE, Part, RayWorkers, make_parts
from sdbench.flags.commands import Convert
from sdbench.flags.parser import parse
from tests.local_s3 import local_s3
from tests.runs import files_of, one_error_line, wait_until
from tests.samples import sample_files, write_tar


@pytest.fixture(scope='module')
def cluster():
    """A Ray cluster that simulates two machines with one core each, and an object store in their environment."""
    if ' ' in sys.executable:
        pytest.skip('Ray 2.60 gives the path of Python to a shell unquoted')
    os.environ['RAY_USAGE_STATS_ENABLED'] = '0'
    from ray.cluster_utils import Cluster
    with pytest.MonkeyPatch.context() as monkeypatch, local_s3(monkeypatch) as store:
        cluster = Cluster(initialize_head=True, head_node_args={
            'num_cpus': 1, 'object_store_memory': 1 << 27, 'include_dashboard': False,
            # A machine counts as lost after twenty failed health checks. They fail immediately if the machine is gone,
            # but not if it is slow. By default workers have a niceness of 15, and hardly run on a busy machine.
            '_system_config': {'health_check_period_ms': 500, 'health_check_failure_threshold': 20,
                               'worker_register_timeout_seconds': 600, 'worker_niceness': 0}})
        cluster.second_node = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
        cluster.store = store
        yield cluster
        cluster.shutdown()


def in_thread(function, *arguments) -> tuple[threading.Thread, list]:
    """Call a function in a thread. Return the thread, and a list to which the result is appended."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(function(*arguments)), daemon=True)
    thread.start()
    return thread, returned


@pytest.mark.long
def test_a_conversion_that_loses_a_machine_writes_the_same_bytes_with_the_store_settings_of_the_command(
        cluster, tmp_path, monkeypatch):
    store = cluster.store
    for number in range(12):
        store.put(f'tars/{number:02}.tar', write_tar('x.tar', sample_files('x', number)).read_bytes())
    assert convert.main(['s3://bucket/tars', 'undisturbed', '--size_limit', '1kb']) == 0
    for name, value in (('S3_CANNED_ACL', 'bucket-owner-full-control'),
                        ('AWS_REQUEST_CHECKSUM_CALCULATION', 'when_supported'),
                        ('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', 'bucket')):
        monkeypatch.setenv(name, value)
    store.requests = []
    store.delay = 0.5
    argv = ['s3://bucket/tars', 's3://bucket/mds', '--size_limit', '1kb', '--ray', cluster.address]
    conversion, status = in_thread(convert.convert, parse(Convert, '', argv))
    wait_until(lambda: sum(name.endswith('/index.json') for name in store.objects) >= 2 or status)
    [raylet] = cluster.second_node.all_processes['raylet']
    with store.lock:  # the store answers no request, so both machines stay in the middle of a part
        wait_until(lambda: len(store.waiting) == 2)
        lost = psutil.Process(raylet.process.pid).children(recursive=True)
        cluster.remove_node(cluster.second_node, allow_graceful=False)
        for process in lost:  # Ray kills only their parent, and they end when they notice that
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(lost)
        store.delay = 0
    conversion.join(300)  # on the remaining machine
    cluster.second_node = cluster.add_node(num_cpus=1, object_store_memory=1 << 27)
    assert status == [0]
    made = {name.removeprefix('mds/'): content for name, content in store.objects.items() if name.startswith('mds/')}
    assert made == files_of(tmp_path / 'undisturbed')
    shards = [headers for path, headers in store.requests if path.endswith('.mds')]
    tars = [headers for path, headers in store.requests if 'tars' in path]
    assert {headers['x-amz-acl'] for headers in shards} == {'bucket-owner-full-control'}
    assert all('x-amz-checksum-crc32' in headers for headers in shards)
    assert {headers['x-amz-request-payer'] for headers in tars} == {'requester'}


@pytest.mark.long
def test_an_encoding_on_a_cluster_equals_one_on_this_machine(cluster, shards, model_folder, tmp_path):
    argv = ['--remote', os.path.relpath(shards), '--image_size', '64', '--batch_size', '4', '--num_workers', '0',
            '--model_name', model_folder, '--pretrained', '--encoder_precision', 'fp32']
    assert encode.main([*argv, '--out', 'undisturbed'])['num_devices'] == 1
    out = tmp_path / 'out'
    record = encode.main([*argv, '--out', 'out', '--ray', cluster.address, '--cpu'])
    assert (record['status'], record['samples']) == ('complete', 24)
    assert record['num_devices'] <= 2
    assert files_of(out) == files_of(tmp_path / 'undisturbed')


def process_of(name: str, parts: list[Part]) -> tuple[int, str | None]:
    """Return the process of a task and the GPUs that it sees."""
    return os.getpid(), os.environ.get('CUDA_VISIBLE_DEVICES')


@pytest.mark.long
def test_gpu_tasks_wait_for_a_gpu_with_a_message_and_each_task_is_a_new_process(cluster, capfd, monkeypatch):
    import ray
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the cluster cannot import tests
    parts = [Part(str(number), []) for number in range(2)]
    with RayWorkers(partial(process_of, 'x'), cluster.address, on_gpus=True) as workers:
        assert 'no machine of the cluster has a GPU yet; waiting for one (--cpu' in capfd.readouterr().err
        made, answers = in_thread(make_parts, workers, parts, parts, 'B')
        assert workers.slots() == 1
        monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')  # Ray reads it, and the tests hide all GPUs
        node = cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=1 << 27)
        made.join(300)
    cluster.remove_node(node)
    [answers] = answers
    assert [gpu for _, gpu in answers] == ['0', '0']
    assert len({process for process, _ in answers}) == 2


@pytest.mark.long
def test_machines_of_a_cluster_need_only_the_code_that_they_are_sent(tmp_path):
    (tmp_path / 'work').write_bytes(pickle.dumps([convert.convert_parts, encode.encode_parts]))
    (tmp_path / PACKAGE.name).symlink_to(PACKAGE)
    load = "import pickle; pickle.load(open('work', 'rb'))"
    subprocess.run([sys.executable, '-c', load], cwd=tmp_path, env={**os.environ, 'PYTHONPATH': ''}, check=True)


def test_a_cluster_that_does_not_answer_is_reported_in_one_line(capsys):
    write_tar('x.tar', sample_files('x', 1))
    line = one_error_line(['x.tar', 'out', '--ray', '127.0.0.1:1'], capsys, convert.main)
    assert '--ray 127.0.0.1:1' in line and 'ray start --head' in line

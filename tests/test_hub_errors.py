"""A failure at the hub, or in its cache on this machine, is reported with its own reason."""
import errno
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from sdbench.errors import UserError
from sdbench.hub import find_or_download

ANSWER = SimpleNamespace(headers={}, request=None, status_code=401, url='', text='')  # of the hub


def not_in_the_cache(cause: Exception) -> Exception:
    """Return what huggingface_hub raises for most causes."""
    error = LocalEntryNotFoundError('we cannot find the snapshot folder')
    error.__cause__ = cause
    return error


@pytest.mark.parametrize('error, kind, words', [
    (GatedRepoError('Access to model me/x is restricted', response=ANSWER), UserError,
     ['is gated on the hub (Access to model me/x is restricted)', 'accept its terms', 'hf auth login']),
    (RepositoryNotFoundError('Repository Not Found', response=ANSWER), UserError,
     ['the hub has no such repository (Repository Not Found)', 'check the name']),
    (not_in_the_cache(ConnectionError('Connection refused')), UserError, ['(Connection refused)', 'the network']),
    (OSError(errno.ENOSPC, 'No space left on device', '/cache/blob'), OSError,
     ['/cache/blob: No space left on device', 'HF_HOME']),
    (not_in_the_cache(PermissionError(errno.EACCES, 'Permission denied', '/cache')), OSError,
     ['/cache: Permission denied', 'HF_HOME'])])
def test_a_failure_at_the_hub_is_reported_with_its_reason_and_the_fix(error, kind, words, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
    with pytest.raises(kind) as refused:
        find_or_download('--model_name', 'me/x', [])
    line = str(refused.value)
    assert line.startswith('--model_name me/x ')
    assert all(word in line for word in words), line
    assert ('hf auth login' in line) == isinstance(error, GatedRepoError)

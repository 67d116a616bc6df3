"""A failure at the hub, or in its cache on this machine, is reported with its own reason."""
import errno
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

from sdbench.errors import UserError
from sdbench.models.folders import find_or_download

ANSWER = SimpleNamespace(headers={}, request=None, status_code=401, url='', text='')  # of the hub
NOT_IN_THE_CACHE = LocalEntryNotFoundError('we cannot find the snapshot folder')  # raised for most causes
NOT_IN_THE_CACHE.__cause__ = ConnectionError('Connection refused')


@pytest.mark.parametrize('error, reason, fix', [
    (GatedRepoError('Access to model me/x is restricted', response=ANSWER), 'Access to model me/x is restricted',
     'accept its terms on its page there, and log in: hf auth login'),
    (NOT_IN_THE_CACHE, 'Connection refused', 'check the name and the network'),
    (OSError(errno.ENOSPC, 'No space left on device', '/cache/blob'), '/cache/blob: No space left on device',
     'free some of the disk, or set HF_HOME')])
def test_a_failure_at_the_hub_is_reported_with_its_reason_and_the_fix(error, reason, fix, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', fail)
    with pytest.raises(UserError, match='^--model_name me/x is not a folder here, and') as refused:
        find_or_download('--model_name', 'me/x', [])
    assert f'({reason}); {fix}' in str(refused.value)

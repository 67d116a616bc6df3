"""The server that forks processes for all tests outlives what tests kill."""
import os
import socket

from tests import process_server


def test_a_client_that_is_killed_before_it_has_asked_for_a_process_does_not_end_the_server(server):
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(process_server.address())
    process = server.Process(target=os.getpid)
    process.start()
    process.join(60)
    assert process.exitcode == 0

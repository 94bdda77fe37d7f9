"""A server that is a fork ends with its client, whatever ends the test's own processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from .processes import is_gone, processes_of

KEEPS_A_SERVER = """
import os, socket, sys, time
sys.path.insert(0, sys.argv[1])
import preloaded

def run():
    print(os.getpid(), flush=True)
    time.sleep(60)

preloaded.run = run
client, keeper = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
if os.fork() == 0:
    client.close()
    preloaded.keep(keeper)
keeper.close()
socket.send_fds(client, [b"{}"], [1, 2])
time.sleep(60)
"""


def test_a_time_limit_that_ends_a_tests_process_group_ends_its_server() -> None:
    command = [sys.executable, "-c", KEEPS_A_SERVER, str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        server = int(process.stdout.readline())
        assert processes_of(server)
        os.killpg(process.pid, signal.SIGTERM)
    assert is_gone(server, within_s=10)

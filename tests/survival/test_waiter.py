import subprocess
import sys

# A thread that does not block signals takes the one that is sent before the process is replaced.
REPLACED = """
import os, signal, subprocess, threading, time
from gateway.serve.upgrade.waiter import _taken, become_waiter, block_signals, remember_signals

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen(["sleep", "60"], preexec_fn=lambda: signal.pthread_sigmask(
    signal.SIG_UNBLOCK, [signal.SIGTERM]))
block_signals()
remember_signals()
os.kill(os.getpid(), signal.SIGTERM)
while not _taken:
    time.sleep(0.001)
become_waiter()
"""


def test_a_signal_that_comes_before_the_waiter_runs_reaches_the_successor() -> None:
    process = subprocess.run([sys.executable, "-c", REPLACED], timeout=60, check=False)
    assert process.returncode == 128 + 15

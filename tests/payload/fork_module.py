"""A worker module without torch, for the tests of the fork server: does what its environment's DO says."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PRELOADED = []


def preload(config):
    PRELOADED.append(config.run_id)
    sys.preloaded_by_test = config.run_id
    if config.run_id == "threads":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def main():
    do = os.environ["DO"]
    if do == "report":
        warm = os.environ.get("NVRX_EKS_WARM", "0")
        print(warm, getattr(sys, "preloaded_by_test", "nothing"), Path.cwd(), __name__, os.getpid(), flush=True)
        print("to stderr", file=sys.stderr)
        sys.exit(7)
    if do == "raise":
        raise RuntimeError("from the worker")
    if do == "die":
        os.kill(os.getpid(), signal.SIGSEGV)
    if do == "term":
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    print(os.getpid(), child.pid, flush=True)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()

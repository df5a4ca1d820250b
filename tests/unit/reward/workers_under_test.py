"""A worker program whose behaviour the request chooses: `python workers_under_test.py TIMEOUT_S [MARKER]`."""

import os
import signal
import subprocess
import sys
import time

from posttrain.reward.worker_main import serve


def score(request):
    if request == "hang":
        while True:
            pass
    if request == "hang with a child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        with open(sys.argv[2], "w") as marker:
            marker.write(str(child.pid))
        time.sleep(600)
    if request == "exit":
        os._exit(7)
    if request == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if request == "raise":
        raise ValueError("cannot be scored")
    if request == "modules":
        return float("torch" in sys.modules)
    return float(len(request))


if __name__ == "__main__":
    if os.environ.get("WORKER_START") == "broken":
        sys.exit("library is missing")
    time.sleep(float(os.environ.get("WORKER_START_S", "0")))
    serve(score, requests=sys.stdin.buffer, answers=sys.stdout.buffer, timeout_s=float(sys.argv[1]))

"""Beginnings of the scripts that tests of several engines run as tasks, after `PRELUDE`."""

BEAT = """
from tfdist.runtime.launch_protocol import Launched, Phase, Progress, note
progress = Progress(Launched.from_environ().progress_file)
attempt = os.environ["TFDIST_ATTEMPT"]
note(os.environ["TFDIST_LOG_DIR"], "met", task=me, attempt=int(attempt))
def train(seconds):
    for step in range(int(seconds * 20)):
        progress.beat(Phase.RUNNING, 0, step + 1, step + 1)
        time.sleep(0.05)
"""
SAVE = """
def save(*_):
    print("saved", me, flush=True)
    sys.exit(42)
signal.signal(signal.SIGTERM, save)
"""

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
# Two workers, whose chief names worker:1 as a straggler in each attempt. The first one trains until
# it is ended.
SLOW = (
    BEAT
    + SAVE
    + """
log_dir = os.environ["TFDIST_LOG_DIR"]
addresses = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
print("attempt", attempt, "at", addresses[int(me[-1])].rpartition(":")[0], flush=True)
open(f"{me}.{attempt}", "w").close()
while not all(os.path.exists(f"worker:{i}.{attempt}") for i in (0, 1)): train(0.1)
train(2)
if me == "worker:0":
    host = addresses[1].rpartition(":")[0]
    note(log_dir, "saved", total=3, path="s", task=me)
    note(log_dir, "straggler", task="worker:1", attempt=int(attempt), host=host, slower=1.5)
train(60 if attempt == "0" else 10)
"""
)

"""Facts about TensorFlow and Keras, collected by a subprocess that imports them.

This process never imports them itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.runtime import subprocesses
from tfdist.tools.doctor.file_systems import WriteTest
from tfdist.tools.doctor.trial import Trial

# Seconds for TensorFlow's import, which takes some 5 s, or a minute from a cold network disk.
IMPORT_S = 120.0
# Seconds for a batch of each split, the model, and two steps, the first of which compiles.
TRIAL_S = 480.0


@dataclasses.dataclass(frozen=True)
class Frameworks:
    """Report of a process with TensorFlow.

    Attributes:
        error: Reason why there is no report, as the rest of a sentence; "" if there is one.
        seconds: Seconds of the import.
        tensorflow: Version of TensorFlow.
        keras: Version of Keras.
        backend: Backend of Keras.
        cuda: Boolean, whether TensorFlow is built for CUDA.
        cuda_version: CUDA version of the build.
        cudnn_version: cuDNN version of the build.
        gpus: Names of the GPUs that TensorFlow sees.
    """

    error: str = ""
    seconds: float = 0.0
    tensorflow: str = ""
    keras: str = ""
    backend: str = "tensorflow"
    cuda: bool = False
    cuda_version: str = ""
    cudnn_version: str = ""
    gpus: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Findings:
    """Results of a process with TensorFlow.

    Attributes:
        frameworks: Report about TensorFlow and Keras.
        directories: Write tests of directories that only TensorFlow can write to.
        trial: Result of the trial of a config; None if there was no config.
    """

    frameworks: Frameworks
    directories: tuple[WriteTest, ...] = ()
    trial: Trial | None = None


def look(
    remote: Sequence[str] = (),
    words: Sequence[str] = (),
    workers: int = 1,
    timeout: float | None = None,
    module: str = "tfdist.tools.doctor.probe",
) -> Findings:
    """Import TensorFlow and Keras in a subprocess, which also tests directories and a config.

    Args:
        remote: Directories such as "gs://bucket/runs".
        words: Arguments of the config, as `tfdist train` takes them; empty if there is none.
        workers: Number of processes that train the config together.
        timeout: Seconds for all of it. Default: `IMPORT_S`, plus `TRIAL_S` with a config.
        module: Name of the module to run in the subprocess.

    Returns:
        The results; facts that the subprocess did not report have an `error`.
    """
    bound = timeout or IMPORT_S + (TRIAL_S if words else 0)
    answer, problem = subprocesses.ask(
        module, {"directories": list(remote), "words": list(words), "workers": workers}, bound
    )
    facts = answer.get("frameworks")
    frameworks = (
        Frameworks(**{**facts, "gpus": tuple(facts["gpus"])})
        if facts
        else Frameworks(error=problem or "wrote no output")
    )
    write_tests = {result["path"]: WriteTest(**result) for result in answer.get("directories", ())}
    for path in remote:
        write_tests.setdefault(
            path,
            WriteTest(
                path,
                error=f"TensorFlow could not test it: its process {problem or 'wrote no output'}",
            ),
        )
    trial = None
    if words:
        trial = (
            Trial(**answer["trial"])
            if "trial" in answer
            else Trial(
                stage="import", error='TensorFlow cannot be imported; see the check "import"'
            )
        )
        if problem and trial.stage != "done" and not trial.error:
            trial = dataclasses.replace(trial, error=f"its process {problem}")
    return Findings(frameworks, tuple(write_tests.values()), trial)

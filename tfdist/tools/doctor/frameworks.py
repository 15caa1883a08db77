"""TensorFlow and Keras as a process of their own finds them become facts; they are never imported in this one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfdist.tools.doctor import child
from tfdist.tools.doctor.file_systems import Place
from tfdist.tools.doctor.trial import Trial

IMPORT_S = 120.0  # for TensorFlow's import, which takes some 5 s, a minute from a cold network disk
TRIAL_S = 480.0  # for a batch of each split, the model, and two steps, the first of which compiles


@dataclasses.dataclass(frozen=True)
class Frameworks:
    """What a process with TensorFlow said.

    Attributes:
        error: Why it said nothing, the rest of a sentence; "": it did.
        seconds: For the import.
        tensorflow: Version.
        keras: Version.
        backend: Of Keras.
        cuda: Whether TensorFlow is built for CUDA.
        cuda_version: Of its build.
        cudnn_version: Of its build.
        gpus: Names of the GPUs that it sees.
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
    """What a process with TensorFlow found.

    Attributes:
        frameworks: TensorFlow and Keras.
        places: What became of places that only TensorFlow can write to.
        trial: What became of a config, see `trial.Trial`; None: there was none.
    """

    frameworks: Frameworks
    places: tuple[Place, ...] = ()
    trial: Trial | None = None


def look(
    remote: Sequence[str] = (),
    words: Sequence[str] = (),
    workers: int = 1,
    timeout: float | None = None,
    module: str = "tfdist.tools.doctor.probe",
) -> Findings:
    """Imports TensorFlow and Keras in a process of its own, which also tries places and a config.

    Args:
        remote: Places such as "gs://bucket/runs".
        words: The config, as `tfdist train` takes it; none: there is none.
        workers: Processes that train it together.
        timeout: Seconds for all of it; default: `IMPORT_S`, and `TRIAL_S` with a config.
        module: What to run there.
    """
    bound = timeout or IMPORT_S + (TRIAL_S if words else 0)
    said, ending = child.run(
        module, {"places": list(remote), "words": list(words), "workers": workers}, bound
    )
    facts = said.get("frameworks")
    frameworks = (
        Frameworks(**{**facts, "gpus": tuple(facts["gpus"])})
        if facts
        else Frameworks(error=ending or "said nothing")
    )
    places = {place["path"]: Place(**place) for place in said.get("places", ())}
    for path in remote:
        places.setdefault(
            path,
            Place(path, error=f"TensorFlow, which is to write there, {ending or 'said nothing'}"),
        )
    trial = None
    if words:
        trial = (
            Trial(**said["trial"])
            if "trial" in said
            else Trial(
                stage="import", error='TensorFlow cannot be imported; see the check "import"'
            )
        )
        if ending and trial.stage != "done" and not trial.error:
            trial = dataclasses.replace(trial, error=f"its process {ending}")
    return Findings(frameworks, tuple(places.values()), trial)

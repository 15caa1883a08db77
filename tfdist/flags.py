"""Command-line flags for `make_strategy`, defined with absl.

Importing this module defines no flag of tfdist; `tfdist.app.run` defines the flags. `--log_dir` is
a flag of absl itself: read `absl.flags.FLAGS.log_dir`.
"""

from __future__ import annotations

from absl import flags
from absl import logging as _absl_logging  # noqa: F401  defines --log_dir

__all__ = ["define", "parsed_options"]


def define(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Define tfdist's flags, before the command line is parsed; a second call is harmless.

    Args:
        flag_values: Flags object in which they are defined; default: absl's `FLAGS`.

    Raises:
        absl.flags.DuplicateFlagError: If the script has a flag of the same name.

    Example:
        >>> values = flags.FlagValues()
        >>> define(values)
        >>> values(["train.py", "--devices=2"])
        ['train.py']
        >>> parsed_options(values)
        {'devices': '2'}
    """

    def text(name: str, meaning: str) -> None:
        flags.DEFINE_string(name, None, meaning, flag_values=flag_values)

    text("strategy", "Strategy, see tfdist.make_strategy; 'auto' picks one by cluster and devices.")
    text(
        "cluster",
        "YAML or JSON file with the addresses of all tasks; default: from the environment.",
    )
    text("task_type", "Job of this process in the cluster: chief, worker, ps or evaluator.")
    flags.DEFINE_integer(
        "task_index",
        None,
        "Index of this process in its job, from 0.",
        lower_bound=0,
        flag_values=flag_values,
    )
    text("devices", "Devices to use: a number, or names such as gpu:0,gpu:1; default: all.")
    text("communication", "How workers exchange gradients: auto, ring, nccl or native.")
    text("backup_dir", "Directory from which to resume training, for tfdist.BackupAndRestore.")
    flags.DEFINE_integer(
        "seed",
        0,
        "Seed of initial weights and of the order of examples.",
        lower_bound=0,
        flag_values=flag_values,
    )


def parsed_options(flag_values: flags.FlagValues = flags.FLAGS) -> dict[str, str]:
    """Return the options of `make_strategy` that the command line sets.

    Args:
        flag_values: Flags object that has them; default: absl's `FLAGS`.

    Returns:
        A dict of those of "strategy", "cluster", "task", "devices", "communication" that the user
        gave. It is empty if the flags are not defined by `define`, or not parsed yet.

    Raises:
        ValueError: If only one of --task_type and --task_index is given.
    """
    if flag_values.find_module_defining_flag("strategy") != __name__ or not flag_values.is_parsed():
        return {}
    present = {name: flag_values[name].value for name in flag_values if flag_values[name].present}
    options = {
        name: present[name]
        for name in ("strategy", "cluster", "devices", "communication")
        if name in present
    }
    if ("task_type" in present) != ("task_index" in present):
        missing = "task_index" if "task_type" in present else "task_type"
        raise ValueError(
            f"--{missing} is missing; expected both --task_type and --task_index, such as "
            "--task_type=worker --task_index=0."
        )
    if "task_type" in present:
        options["task"] = f"{present['task_type']}:{present['task_index']}"
    return options

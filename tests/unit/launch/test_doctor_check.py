"""Test that `tfdist launch --check` waits for doctor within a bound."""

from __future__ import annotations

import argparse
import json

from tfdist.cluster.addresses import free_ports
from tfdist.launch import doctor_check


def test_a_doctor_that_does_not_end_is_ended_and_named(tmp_path, capfd):
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"worker": [f"127.0.0.1:{free_ports(1)[0]}"]}))
    flags = argparse.Namespace(cluster=str(file), rendezvous=None)
    words = [
        "--cluster",
        str(file),
        "--serve",
        "--timeout",
        "100",
        "--quick",
        "--directory",
        str(tmp_path),
    ]
    assert doctor_check.run(flags, words, timeout=0.5) == 1
    said = capfd.readouterr().err
    assert (
        "--check: doctor did not end within 0.5 s; no task was started. To see where it waits, "
        "run: tfdist doctor --cluster"
    ) in said

"""Test that SECURITY.md names everything in the package that listens for connections."""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Module that listens -> beginning of its row on the page.
ROWS = {
    "cluster/meeting.py": "the preflight of a task",
    "cluster/preflight.py": "the preflight of a task",
    "data/service.py": "a data worker",
    "launch/rendezvous.py": "the rendezvous",
    "parallel/collectives/native/connections.py": '`communication="native"`, workers on',
    "launch/snapshot_process.py": "the snapshots of a host",
    "launch/snapshot_server.py": "the snapshots of several hosts",
    "strategies/server.py": "TensorFlow's gRPC server",
    "tools/doctor/check_server.py": "`tfdist doctor",
    "tools/doctor/peers.py": "`tfdist doctor",
}
# It connects to itself, to find out whether a network is usable, and closes at once.
PROBES = {"launch/isolation.py"}
LISTENS = {
    *("listen", "create_server", "start_server", "create_unix_server", "start_unix_server"),
    *("Server", "DispatchServer", "WorkerServer", "TaskServer", "Listener"),
    *("TCPServer", "ThreadingTCPServer", "HTTPServer", "ThreadingHTTPServer", "UnixStreamServer"),
}


def last_name(node: ast.AST) -> str:
    return getattr(node, "attr", None) or getattr(node, "id", "")


def listens(path: pathlib.Path) -> bool:
    """Return whether a file calls something that listens, or makes a class of servers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and last_name(node.func) in LISTENS:
            return True
        if isinstance(node, ast.ClassDef) and {last_name(base) for base in node.bases} & LISTENS:
            return True
    return False


def test_page_names_what_listens():
    package = ROOT / "tfdist"
    found = {
        path.relative_to(package).as_posix() for path in package.rglob("*.py") if listens(path)
    }
    assert found - PROBES == set(ROWS), "SECURITY.md: the table of what listens"
    page = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = page.partition("\n## What listens\n")[2].partition("\n## ")[0]
    for module, row in ROWS.items():
        assert f"\n| {row}" in section, f"{module} listens"


def test_native_library_listens_on_nothing():
    """Its connections come from connections.py, which authenticates them."""
    for path in (ROOT / "tfdist").rglob("*.cc"):
        text = path.read_text(encoding="utf-8")
        assert " listen(" not in text, path
        assert " bind(" not in text, path

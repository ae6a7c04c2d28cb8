"""What a crash in compiled code leaves on stderr is kept beside the logs; what Ray writes there by itself is not."""

from __future__ import annotations

from pathlib import Path

from serving import app


def test_what_a_process_wrote_by_itself_is_kept_by_its_number(tmp_path: Path) -> None:
    session, logs = tmp_path / "session", tmp_path / "logs"
    session.mkdir()
    logs.mkdir()
    (session / "worker-abc-01000000-123.err").write_text(":job_id:01000000\n:actor_name:Replica\nFatal Python error: Bus error\n")
    (session / "worker-def-01000000-124.err").write_text(":job_id:01000000\n:actor_name:Proxy\n")
    (session / "worker-ghi-01000000-125.err").write_text("x" * (2 * app._CRASH_BYTES))
    (session / "raylet.err").write_text("no replica's\n")
    app._keep_what_crashed(session, logs)
    assert {log.name: len(log.read_text()) for log in logs.iterdir()} == {
        "stderr_123.log": len("Fatal Python error: Bus error\n"),
        "stderr_125.log": app._CRASH_BYTES,
    }
    assert (logs / "stderr_123.log").read_text() == "Fatal Python error: Bus error\n"


def test_a_session_that_did_not_come_up_leaves_nothing(tmp_path: Path) -> None:
    app._keep_what_crashed(tmp_path / "missing", tmp_path)
    assert list(tmp_path.iterdir()) == []

"""A training as a Ray job, with everything in it killed on the way, beside one that is left alone: the weights must be equal.

``python -m experiments.kill_and_resume`` (or ``scripts/kill_and_resume_demo.sh``) starts a Ray head on free ports of this
machine, submits the job, kills a rollout actor, the training's own process and at last the driver, submits the same command
again, and compares what comes out with an undisturbed training in this process. It ends everything that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.console import Console

from agents.artifact import WEIGHTS
from experiments.packaging import check
from experiments.train import train
from experiments.train_settings import Run, load_train_settings, runs
from serving.ports import free_port

CONFIG = Path(__file__).parent / "configs" / "tiny.yaml"
DEADLINE = 600.0
"""Seconds that each step may take; a job in a new package first compiles, which takes a processor most of a minute."""

WIDTH = 200
"""Most characters of a line of the job's log that are passed on: Ray's own can be very long."""

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Head:
    """A running Ray head.

    Attributes:
        process: ``ray start --block``.
        address: Of its dashboard, which takes jobs.
        environment: That whoever talks to it needs: the token.
    """

    process: psutil.Process
    address: str
    environment: Mapping[str, str]

    def processes(self, title: str) -> list[psutil.Process]:
        """Return its worker processes whose title begins so, oldest first."""
        found = []
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(process.cmdline()).startswith(title):
                    found.append((process.create_time(), process.pid, process))
        return [process for _, _, process in sorted(found)]


@contextlib.contextmanager
def ray_head(cpus: int = 2) -> Iterator[Head]:
    """Start a Ray head with its dashboard on free ports, under a token of its own; end it on leaving."""
    ray = Path(sys.executable).parent / "ray"
    scratch = Path(tempfile.mkdtemp(prefix="cp-", dir="/tmp" if Path("/tmp").is_dir() else None))  # sockets need short paths
    token = scratch / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",  # else whatever else runs on the machine goes before
    }
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_API_SERVER_ADDRESS"):
        environment.pop(name, None)
    port, dashboard, agent, client = (free_port() for _ in range(4))
    command = [
        str(ray), "start", "--head", "--block", f"--port={port}", f"--num-cpus={cpus}",
        "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
        f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", "--min-worker-port=0",
        "--max-worker-port=0", f"--object-store-memory={80 << 20}", f"--temp-dir={scratch / 'ray'}", "--disable-usage-stats",
    ]  # fmt: skip
    log = (scratch / "head.log").open("wb")
    started = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    head = Head(psutil.Process(started.pid), f"http://127.0.0.1:{dashboard}", environment)
    try:
        _wait(lambda: _listening(dashboard) or started.poll() is not None, "Ray's dashboard to listen")
        if started.poll() is not None:
            raise RuntimeError(f"ray start ended: {(scratch / 'head.log').read_text(errors='replace')[-2000:]}")
        yield head
    finally:
        family = [head.process, *head.process.children(recursive=True)] if started.poll() is None else []
        started.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            started.wait(20.0)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        started.wait()
        log.close()
        shutil.rmtree(scratch, ignore_errors=True)


class Job:
    """``ray job submit`` of a training, its log passed on line by line.

    Args:
        head: Where to.
        config: The training's settings.
        output: Folder of the artifacts.
        working_dir: What Ray packs and sends to the job.
        log: File that gets what the command prints.
    """

    def __init__(self, head: Head, config: Path, output: Path, working_dir: Path, log: Path) -> None:
        self._head, self._output = head, output
        command = [
            str(Path(sys.executable).parent / "ray"), "job", "submit", f"--address={head.address}",
            f"--working-dir={working_dir}", "--", "python", "-m", "experiments.train", "--config", str(config),
            "--output", str(output),
        ]  # fmt: skip
        with log.open("ab") as file:
            self._process = subprocess.Popen(command, env=head.environment, stdout=file, stderr=subprocess.STDOUT)

    def driver(self) -> psutil.Process | None:
        """Return the process that runs the command on the head, if it does."""
        found = [
            process for process in self._head.processes("python -m experiments.train") if str(self._output) in process.cmdline()
        ]
        return found[0] if found else None

    def wait(self) -> int:
        """Wait for the end of the job and return the command's exit code: 0 if it succeeded."""
        return self._process.wait(DEADLINE)

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self._process.poll() is not None

    def close(self) -> None:
        """End the command if it still runs."""
        if not self.over:
            self._process.kill()
            self._process.wait()


def kill_and_resume(config: Path, folder: Path, *, working_dir: Path, say: Say) -> dict[str, tuple[str, str]]:
    """Run the training as a job that is killed and resumed, and once undisturbed.

    Args:
        config: Settings of a training of some seconds with several segments.
        folder: Where the artifacts of both and the jobs' log go.
        working_dir: What Ray packs and sends to the job, as it is now: both submissions send the same.
        say: Prints a line about what goes on.

    Returns:
        By the artifact's name, the SHA-256 of both weights: disturbed and undisturbed.

    Raises:
        RuntimeError: If the job does not do what is expected of it; the text has the end of its log.
    """
    settings = load_train_settings(config)
    wanted = runs(settings.model_copy(update={"output": folder / "disturbed"}))
    log = folder / "job.log"
    folder.mkdir(parents=True, exist_ok=True)
    sent = _copied(working_dir, folder / "sent")
    with ray_head() as head, _passed_on(log, say):
        say("$ ray job submit --working-dir . -- python -m experiments.train --config " + config.name)
        job = Job(head, config, folder / "disturbed", sent, log)
        with contextlib.closing(job):
            first = wanted[0]
            _until_checkpoint(first, 1, job, log)
            _kill(lambda: head.processes("ray::RolloutActor"), "a rollout actor", say)
            _until_checkpoint(first, 2, job, log)
            _kill(lambda: head.processes(f"ray::{first.name}"), f"the process that trains {first.name}", say)
            _until_checkpoint(first, 4, job, log)
            _kill(lambda: [driver] if (driver := job.driver()) is not None else [], "the driver", say)
            if job.wait() == 0:
                raise RuntimeError(f"the job succeeded although its driver was killed: {_end(log)}")
        trained = [run.name for run in wanted if run.directory.exists()]
        say(f"the job has failed, {len(trained)} of {len(wanted)} artifacts are there; the same command again:")
        again = Job(head, config, folder / "disturbed", sent, log)
        with contextlib.closing(again):
            if again.wait() != 0:
                raise RuntimeError(f"the job failed: {_end(log)}")
    say("the same training, undisturbed, in one process:")
    quiet = Console(stderr=True, quiet=True)
    undisturbed = train(settings.model_copy(update={"output": folder / "undisturbed"}), console=quiet, ray=False)
    return {
        run.name: (_sha256(run.directory / WEIGHTS), _sha256(other / WEIGHTS))
        for run, other in zip(wanted, undisturbed, strict=True)
    }


def _copied(directory: Path, target: Path) -> Path:
    """Copy what Ray would pack of a directory."""
    for path in check(directory).files:
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(directory / path, target / path)
    return target


def _until_checkpoint(run: Run, segments: int, job: Job, log: Path) -> None:
    """Wait until so many segments of a run are behind it."""

    def reached() -> bool:
        if job.over or run.directory.exists():
            raise RuntimeError(f"{run.name} was over before segment {segments + 1}: {_end(log)}")
        return any(int(path.name) >= segments for path in run.checkpoints.glob("[0-9]*"))

    _wait(reached, f"checkpoint {segments} of {run.name}")


def _kill(find: Callable[[], Sequence[psutil.Process]], what: str, say: Say) -> None:
    _wait(lambda: bool(find()), what)
    process = find()[0]
    process.send_signal(signal.SIGKILL)
    say(f"kill -9 {process.pid}: {what}")


@contextlib.contextmanager
def _passed_on(log: Path, say: Say) -> Iterator[None]:
    """Pass on what is appended to a file."""
    log.touch()
    over = threading.Event()

    def follow() -> None:
        with log.open(encoding="utf-8", errors="replace") as file:
            while True:
                last = over.wait(0.2)
                for line in file.read().splitlines():
                    say(f"  | {_COLOURS.sub('', line)[:WIDTH]}")
                if last:
                    return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _wait(condition: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > ends:
            raise RuntimeError(f"waited {DEADLINE:g} s for {what}")
        time.sleep(0.02)


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _end(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-3000:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 if the weights are equal."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.kill_and_resume", description="Kill and resume a training as a Ray job; compare the weights."
    )
    parser.add_argument("--config", type=Path, default=CONFIG, help="settings of a short training with several segments")
    parser.add_argument("--output", type=Path, default=Path("runs/kill-and-resume"), help="folder for artifacts and log")
    parser.add_argument("--working-dir", type=Path, default=Path(), help="what Ray packs for the job; default: here")
    options = parser.parse_args(arguments)
    console = Console()
    began = time.monotonic()

    def say(line: str) -> None:
        console.print(f"{time.monotonic() - began:7.1f} s  {line}", markup=False, highlight=False, soft_wrap=True)

    folder = options.output.resolve()
    if folder.exists() and any(folder.iterdir()):
        console.print(f"error: {options.output}: expected a folder that is empty or absent", style="red", markup=False)
        return 2
    found = kill_and_resume(options.config.resolve(), folder, working_dir=options.working_dir.resolve(), say=say)
    for name, (disturbed, undisturbed) in found.items():
        same = "equal" if disturbed == undisturbed else "DIFFERENT"
        say(f"{name}: sha256 of the weights {disturbed[:16]} killed and resumed, {undisturbed[:16]} undisturbed: {same}")
    return 0 if all(disturbed == undisturbed for disturbed, undisturbed in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

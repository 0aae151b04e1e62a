"""Run workers on hosts that come and go, in Horovod's elastic mode.

A lost worker costs the steps since the last commit. Horovod's own driver is not used: it reads pickles from whoever
reaches its port, and switches host key checks off. Workers poll the rendezvous server instead.
"""

from __future__ import annotations

import json
import math
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from gaudi_distributed.cluster.hosts import RankAssignment, parse_hosts, write_file
from gaudi_distributed.cluster.rendezvous import (
    HOROVOD_SCOPE,
    SCOPE,
    SIZES,
    Rendezvous,
    RendezvousServer,
    list_sizes,
)
from gaudi_distributed.devices.machine import LOOPBACK, allow_files, find_address, is_this_machine, name_limits
from gaudi_distributed.errors import ConfigurationError, FlagError, Output, RunEndedError, say
from gaudi_distributed.failure.messages import CONTINUE, JOIN, LOST, read_timeouts
from gaudi_distributed.launch.flags import Options
from gaudi_distributed.launch.planning import plan_launch
from gaudi_distributed.launch.processes import LaunchPlan, find_working_folder, plan_worker
from gaudi_distributed.launch.running import (
    CUT_SECONDS,
    END_SECONDS,
    Running,
    catch_signals,
    count_files,
    finish_processes,
    is_asked_to_hurry,
    start_processes,
    tell,
)
from gaudi_distributed.launch.status import open_logs, open_rendezvous

# After these another worker would fail alike: flags, data, input, numbers, safety, configuration.
_FINAL = frozenset({64, 65, 66, 70, 77, 78})
_SCRIPT_SECONDS, _WAIT_SECONDS, _TICK = 20.0, 600.0, 0.05
# A host whose new worker failed is tried again after so long, twice as long each time, and at most after an hour.
_BACK_OFF_SECONDS, _MAX_BACK_OFF_SECONDS = 60.0, 3600.0

# A worker that is asked to end leaves alone where no others are, nor this process, within so long.
_ALONE_SECONDS = 3.0

_ASK, _BEAT, _LEAVE = f"{SCOPE}/ask_", f"{SCOPE}/beat_", f"{SCOPE}/leave_"
_FROM_WORKERS = (_ASK, _BEAT, _LEAVE)
_STOPPING = f"{SCOPE}/stopping"


class HostList:
    """The hosts that a program prints, which is run once a second in a thread.

    Raises:
        ConfigurationError: it cannot be run at first, or what it prints are no hosts.
    """

    def __init__(self, script: Path) -> None:
        self._script = script.absolute()
        self._is_over = threading.Event()
        self.hosts = self._ask()
        threading.Thread(target=self._watch, name="hosts", daemon=True).start()

    def close(self) -> None:
        """Ask no more, and tell nothing of a program that is ended with the launcher."""
        self._is_over.set()

    def _ask(self) -> dict[str, int]:
        try:
            done = subprocess.run(
                [self._script], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SCRIPT_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"--host_discovery_script {self._script}: {error}", flag="--host_discovery_script", remedy="correct it"
            ) from error
        if done.returncode:
            raise ConfigurationError(
                f"--host_discovery_script {self._script}: ended with status {done.returncode}",
                flag="--host_discovery_script",
                remedy="correct it",
            )
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        entries = parse_hosts(",".join(lines), f"{self._script}") if lines else ()
        return {name: slots or 1 for name, slots in entries}

    def _watch(self) -> None:
        fault = ""
        while not self._is_over.wait(1):
            try:
                self.hosts, fault = self._ask(), ""
            except ConfigurationError as error:  # the hosts stay as they were
                if fault != str(error) and not self._is_over.is_set():
                    tell(str(error))
                fault = str(error)


def start_elastic(options: Options, environ: Mapping[str, str]) -> None:
    """Plan an elastic run and run it.

    Raises:
        FlagError: flags are missing, or contradict each other.
        RunEndedError: it did not end well.
    """
    if options.host_discovery_script is None or options.max_np is None:
        raise FlagError(
            "--max_np and --host_discovery_script: give both, for ranks that come and go, or none", flag="--max_np"
        )
    if options.np or options.hosts or options.hostfile or options.preset or options.backend not in (None, "gloo"):
        raise FlagError(
            "--host_discovery_script: names the hosts, and ranks communicate through Gloo",
            flag="--host_discovery_script",
            remedy="leave out --np, --hosts, --hostfile, --preset and --backend",
        )
    unused = {
        "--max_restarts": (options.max_restarts, "workers are started again as hosts allow"),
        "--cores_per_rank": (options.cores_per_rank, "which cores are free changes with the hosts"),
        "--num_workers_per_hls": (options.num_workers_per_hls, "the hosts that are listed have numbers of their own"),
        "--submission": (options.submission, "its experiments have a number of ranks"),
        "--container": (options.container == "docker", "workers run where they are started, or in Singularity"),
    }
    for name, (is_given, why) in unused.items():
        if is_given:
            raise FlagError(f"{name}: is not for an elastic run: {why}", flag=name, remedy="leave it out")
    if options.min_np > options.max_np:
        raise FlagError(
            f"--min_np {options.min_np}: is more than --max_np {options.max_np}", flag="--min_np", remedy="give fewer"
        )
    find_working_folder()
    hosts = HostList(options.host_discovery_script)
    first = ",".join(f"{name}:{slots}" for name, slots in hosts.hosts.items())
    if not first:
        raise ConfigurationError(
            f"--host_discovery_script {options.host_discovery_script}: names no host",
            flag="--host_discovery_script",
            remedy="correct it",
        )
    # Which cores are free changes with the hosts, so workers are bound to none.
    planned = plan_launch(replace(options, hosts=first, backend="gloo", cores_per_rank=0), environ)
    if options.dry_run:
        say(*planned.describe().splitlines())
        return
    for note in planned.notes:
        tell(note)
    for path, text in planned.files.items():
        write_file(path, text)
    sizes = ",".join(map(str, list_sizes(options.min_np, options.max_np)))
    plan = replace(planned.plan, environment={**planned.plan.environment, SIZES: sizes})
    # Each worker may be alone on its host, and has two connections at a time to what it meets at.
    logs = 0 if options.log_dir is None else options.max_np + 1
    allow_files(count_files(2 * options.max_np, 0, options.max_np, logs=logs, is_piped=options.tag_output))
    # Hosts that come later reach this machine by the interface, also where there is none of them yet.
    interface = plan.interface
    address = (None if interface is None else find_address(interface)) or planned.address
    with name_limits("launcher"), open_rendezvous(address, plan.control_port) as server:
        rendezvous = Rendezvous(options.min_np, options.max_np)
        ElasticRun(plan, hosts, rendezvous, server, environ, options.max_np).run()


class ElasticRun:
    """Start, watch and end the workers of an elastic run.

    Args:
        plan: what they run, and how hosts are reached.
        hosts: where they may.
        rendezvous: assigns ranks to workers.
        server: the store of names and values that workers poll.
        environ: variables, of which some are forwarded.
        most: workers at a time.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        hosts: HostList,
        rendezvous: Rendezvous,
        server: RendezvousServer,
        environ: Mapping[str, str],
        most: int,
    ) -> None:
        self._plan, self._hosts, self._rendezvous, self._server = plan, hosts, rendezvous, server
        self._environ, self._most = environ, most
        self._logs = None if plan.log_dir is None else open_logs(plan.log_dir, ())
        self._output = Output(is_tagged=plan.tag_output, logs=self._logs)
        self._timeouts = read_timeouts(environ, most)
        self._patience = self._timeouts.stall_seconds
        self._running: dict[int, Running] = {}
        self._started = 0
        # When hosts get workers again. One that lost a worker of a round gets none until it was not named for a while.
        self._refused: dict[str, float] = {}
        self._failures: Counter[str] = Counter()
        self._awaited: dict[int, float] = {}  # when a worker was started that did not ask for a rank yet
        self._cut_off: set[str] = set()  # hosts that cannot reach where the run meets
        self._heard: dict[int, tuple[bytes, float]] = {}  # the last heartbeat of a worker, and when it was heard
        self._looked = time.monotonic()
        self._leaving: dict[int, float] = {}  # when a worker said that it is asked to end
        self._ended: set[int] = set()
        self._failed: Running | None = None  # the last worker of this round that was lost
        self._gave_up: ConfigurationError | None = None  # on other hosts, after which those that wait save
        self._grace = self._cut_at = math.inf
        self._who_left = ""  # what is said of a worker without which too few stay
        self._has_succeeded = False

    def run(self) -> None:
        """Run until the workers of a round are done; raise RunEndedError if the run cannot go on."""
        with catch_signals() as asked:
            try:
                self._go_on(asked)
                if self._failed is not None and not asked:  # others of this round were done
                    raise self._make_end()
            finally:
                self._hosts.close()
                finish_processes(self._running.values())
                if self._logs is not None:
                    self._logs.close()

    def _go_on(self, asked: Sequence[int]) -> None:
        idle_since = time.monotonic()
        while True:
            now = time.monotonic()
            is_ending = bool(asked) or self._gave_up is not None
            self._reap(is_ending=is_ending)
            if self._has_succeeded and not self._rendezvous.members:
                break
            if is_ending:
                self._end_all(now, is_hurried=is_asked_to_hurry(asked))
                if not self._running or now > self._cut_at:
                    if self._gave_up is not None:
                        raise self._gave_up
                    return
            # Without a worker of this round nobody has its state.
            elif self._failed is not None and self._rendezvous.number > 0 and not self._rendezvous.members:
                raise self._make_end()
            elif not self._has_succeeded:
                self._start_workers()
            self._answer(now, is_stopping=is_ending)
            if self._rendezvous.in_progress:
                idle_since = now
            elif is_ending:
                if not self._rendezvous.members:  # there will be no other round
                    self._dismiss_waiting()
            elif now - idle_since > _WAIT_SECONDS:
                self._gave_up = self._make_end()
            time.sleep(_TICK)
        self._dismiss_waiting()
        self._wait_for_end()

    def _wait_for_end(self) -> None:
        limit = time.monotonic() + END_SECONDS
        while any(each.status is None for each in self._running.values()) and time.monotonic() < limit:
            time.sleep(_TICK)

    def _end_all(self, now: float, *, is_hurried: bool) -> None:
        """Ask all workers to save and end, once, and once more where a person hurries."""
        seconds = 0.0 if is_hurried else self._plan.grace
        if seconds >= self._grace:
            return
        self._grace, self._cut_at = seconds, now + seconds + CUT_SECONDS
        self._rendezvous.is_last = True
        with self._server.lock:  # before they are asked, lest one believes that it is alone
            self._server.values[_STOPPING] = b"1"
        for running in self._running.values():
            running.end(seconds)

    def _dismiss_waiting(self) -> None:
        """Tell workers that wait for a round that they are not needed, and may leave."""
        nothing = self._write_assignment(None)
        with self._server.lock:
            self._server.values.update({f"{SCOPE}/assignment_{worker}": nothing for worker in self._running})

    def _make_end(self) -> ConfigurationError:
        """Return why the run cannot go on; 75 where the same command may find other hosts."""
        if self._who_left:
            return RunEndedError(f"{self._who_left}; {CONTINUE}", LOST)
        if self._failed is not None:
            return self._failed.make_error()
        if cut_off := sorted(self._cut_off & self._hosts.hosts.keys()):
            return ConfigurationError(
                f"hosts {', '.join(cut_off)}: cannot reach {LOOPBACK}, where this run meets; others are too few",
                flag="--interface",
                remedy="start it with --interface",
            )
        return RunEndedError(f"too few hosts for {_WAIT_SECONDS:g} s; {CONTINUE}", LOST)

    def _reap(self, *, is_ending: bool) -> None:
        """Remove workers that have ended; raise RunEndedError if the others would fail in the same way."""
        for worker, running in list(self._running.items()):
            status = running.status
            if status is None:
                continue
            was_member = worker in self._rendezvous.members
            host = self._rendezvous.host_of(worker)
            self._rendezvous.remove(worker)
            has_asked = self._awaited.pop(worker, None) is None
            self._leaving.pop(worker, None)
            running.finish()
            del self._running[worker]
            if self._logs is not None:
                self._logs.close_one(worker)
            if status == 0 and (has_asked or self._has_succeeded or is_ending):
                self._has_succeeded |= was_member
                continue
            left = len(self._rendezvous.members)
            if not was_member and self._has_succeeded:
                continue  # the work is done without it
            error: ConfigurationError = running.make_error()
            if status == 0:
                remedy = "name a program whose ranks may come and go, or leave out --max_np"
                error = ConfigurationError(f"{running.process.name}: ended with 0 and asked for no rank", remedy=remedy)
            if not was_member and left:
                self._exclude(host, error)
                continue
            self._failed = running
            self._refused[host] = math.inf
            if status == 0 or status in _FINAL:
                raise error
            if status == LOST and (is_ending or self._who_left):
                continue  # as it was asked
            tell(f"{running.process.name} is lost (status {status}); {left} of the round are left")

    def _exclude(self, host: str, why: ConfigurationError) -> None:
        """Leave out a host whose new worker failed before it took part: the others are healthy, and go on."""
        seconds = min(_BACK_OFF_SECONDS * 2.0 ** self._failures[host], _MAX_BACK_OFF_SECONDS)
        self._failures[host] += 1
        self._refused[host] = max(self._refused.get(host, 0.0), time.monotonic() + seconds)
        tell(f"host {host}: left out for {seconds:g} s, the run goes on without it: {why}")

    def _start_workers(self) -> None:
        listed = self._hosts.hosts
        now = time.monotonic()
        self._refused = {host: until for host, until in self._refused.items() if host in listed and until > now}
        for host, slots in listed.items():
            if host in self._refused:
                continue
            workers = []
            while self._rendezvous.count_on(host) < slots and self._rendezvous.size < self._most:
                self._started += 1
                is_here = is_this_machine(host)
                if not is_here and self._plan.interface is None and self._plan.is_local:
                    tell(f"host {host}: cannot reach {LOOPBACK}, where this run meets; start it with --interface")
                    self._refused[host] = math.inf
                    self._cut_off.add(host)
                    break
                workers.append(plan_worker(self._plan, host, self._started, is_here=is_here))
                if self._logs is not None:
                    self._logs.open(self._started)
                self._rendezvous.add(self._started, host)
                self._awaited[self._started] = now
            made = self._server.environment
            running = start_processes(
                workers, self._environ, made, self._output, grace=self._plan.grace, timeouts=self._timeouts
            )
            self._running.update({each.process.rank: each for each in running if each.process.rank is not None})

    def _answer(self, now: float, *, is_stopping: bool) -> None:
        """Read which workers wait, and start a round if it can start."""
        hosts = self._hosts.hosts
        self._read_messages(now)
        if not is_stopping:
            self._let_leave(now)
        with self._server.lock:
            stops = is_stopping or bool(self._who_left)
            changes = not stops and self._rendezvous.is_changing(hosts)
            self._server.values[_STOPPING] = b"01"[stops:][:1]
            self._server.values[f"{SCOPE}/changing"] = b"01"[changes:][:1]
            nothing = self._write_assignment(None)
            spare = self._rendezvous.find_spare(hosts)
            self._server.values.update({f"{SCOPE}/assignment_{worker}": nothing for worker in spare})
        assignments = self._rendezvous.start_round(hosts, now)
        if assignments is not None:
            self._failed, self._who_left = None, ""
            self._write(assignments)
            ranks = ", ".join(f"rank {assignment.rank} on {assignment.host}" for assignment in assignments.values())
            tell(f"round {self._rendezvous.number}: {ranks}")
        self._end_silent(now)

    def _read_messages(self, now: float) -> None:
        """Read what workers have put since the last look: asks for a rank, heartbeats, and asks to leave."""
        store = self._server
        with store.lock:
            put = {path: store.values.pop(path) for path in list(store.values) if path.startswith(_FROM_WORKERS)}
        for path, value in put.items():
            kind = next(each for each in _FROM_WORKERS if path.startswith(each))
            name = path.removeprefix(kind)
            if not name.isdecimal() or len(name) > 9 or int(name) not in self._running:
                continue
            worker = int(name)
            last, _ = self._heard.get(worker, (b"", now))
            if kind == _ASK:
                self._rendezvous.join(worker, now)
                self._awaited.pop(worker, None)
                self._heard[worker] = last, now  # it may be frozen before its first heartbeat
            elif kind == _LEAVE:
                self._leaving.setdefault(worker, now)
            elif last != value:
                self._heard[worker] = value, now

    def _end_silent(self, now: float) -> None:
        """End workers that others wait for, and those that were not heard for too long."""
        for worker in self._rendezvous.find_late(now, self._patience):
            self._end(worker, f"the others have waited for it for {self._patience:g} s")
        # Where this process was stopped for a while, nobody listened.
        deaf = max(0.0, now - self._looked - 1.0)
        self._looked = now
        self._heard = {worker: (value, at + deaf) for worker, (value, at) in self._heard.items()}
        self._awaited = {worker: at + deaf for worker, at in self._awaited.items()}
        for worker, at in self._awaited.items():
            if now - at > self._timeouts.join_seconds:
                self._end(worker, f"it has not asked for a rank for {self._timeouts.join_seconds:g} s ({JOIN})")
        for worker, (_, at) in list(self._heard.items()):
            if worker in self._running and now - at > self._patience:
                self._end(worker, f"it has not answered for {self._patience:g} s")

    def _let_leave(self, now: float) -> None:
        """Let workers go that alone were asked to end, as where a host shuts down; the others go on after a commit."""
        for worker, at in list(self._leaving.items()):
            if now - at > _ALONE_SECONDS:
                self._leaving[worker] = math.inf  # said once
                self._rendezvous.leave(worker)
                host = self._rendezvous.host_of(worker)
                self._refused[host] = math.inf
                then = "the run goes on without it"
                if self._rendezvous.must_stop(self._hosts.hosts):
                    then = "too few stay, so all save and end"
                    self._who_left = f"worker {worker} on {host} was asked to end, and too few stay"
                tell(f"worker {worker} on {host}: is asked to end; {then}")

    def _end(self, worker: int, why: str) -> None:
        """End a worker that others wait for, or would; it is said once."""
        if worker not in self._ended:
            self._ended.add(worker)
            tell(f"worker {worker}: {why}; it is ended")
            self._running[worker].end(0.0)

    def _write(self, assignments: Mapping[int, RankAssignment]) -> None:
        """Write the assignments of a round; nothing of the last round stays."""
        leaving = dict.fromkeys(self._rendezvous.find_leaving(self._hosts.hosts))
        answers: dict[int, RankAssignment | None] = {**leaving, **assignments}
        values = {f"{SCOPE}/changing": b"0"}
        for worker, assigned in answers.items():
            values[f"{SCOPE}/assignment_{worker}"] = self._write_assignment(assigned)
            if assigned is not None:
                numbers = ",".join(map(str, assigned.numbers.values()))
                values[f"{HOROVOD_SCOPE}/{assigned.host}:{assigned.local_rank}"] = numbers.encode()
        with self._server.lock:
            # A worker may have asked for the next round since this one was formed.
            kept = {path: value for path, value in self._server.values.items() if path.startswith(_FROM_WORKERS)}
            self._server.values.clear()
            self._server.values.update({**kept, **values})

    def _write_assignment(self, assigned: RankAssignment | None) -> bytes:
        """Write what a worker is told: its rank in this round, or that none to come needs it."""
        number = self._rendezvous.number + (assigned is None)
        return json.dumps({"round": number, "variables": None if assigned is None else assigned.variables}).encode()

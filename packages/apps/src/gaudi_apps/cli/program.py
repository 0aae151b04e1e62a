"""From the command line to a mode: parse flags, print the plan, start processes, or compute."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from gaudi_apps.cli.flag_rules import check_bounds, check_urls, find_rules, list_flags, naming_as_typed, parse_config
from gaudi_apps.cli.flags import USING, ParityFlags, ScalingFlags
from gaudi_apps.cli.launch import (
    FindDevice,
    LaunchReport,
    check_elastic,
    count_workers,
    fill_distribution_flags,
    find_distribution,
    list_launcher_words,
    report_launch,
    start_processes,
)
from gaudi_apps.runtime.errors import FailureReporter, RunChangedError, flag_error
from gaudi_apps.runtime.settings import Distribution
from gaudi_apps.training.plan import RANKS_PER_HOST
from gaudi_apps.training.recipe import Recipe, find_host, read_recipe
from gaudi_datasets.arguments import FormerFlag, is_switch_on, read_switch, split_word
from gaudi_datasets.fetching.stores import find_copy, is_url
from gaudi_distributed import choose_device
from gaudi_distributed.cluster.rank_info import detect_rank, is_launched
from gaudi_distributed.cluster.rendezvous import RendezvousClient, is_elastic
from gaudi_ops.program import exit_on_error, say

if TYPE_CHECKING:
    from gaudi_apps.runtime.session import ElasticState
    from gaudi_apps.training.application import Application
    from gaudi_apps.training.trainer import Trainer

_OF_PLAN = frozenset({"mode", *(entry.name for entry in fields(ScalingFlags))})  # flags with a value
TOGETHER = ("train", "eval", "dry_run")  # modes that several processes share


class Program(ABC):
    """A program on the command line; each of the four programs derives from it.

    Attributes:
        prog: its name, and that of its module in gaudi_apps.
        description: stands at the top of its help text.
        config: the dataclass of its flags; its group `run` has the mode, `device` the device, and `distribution` says
            how several processes train together.
        former_flags: of the program that it replaces.
        recipe: what the flags that were parsed last follow from, besides those that are given.
    """

    prog: ClassVar[str]
    description: ClassVar[str]
    config: ClassVar[type[Any]]
    former_flags: ClassVar[Sequence[FormerFlag]] = ()
    recipe: Recipe = Recipe()

    @abstractmethod
    def validate(self, config: Any) -> None:
        """Raise FlagError for a value that breaks a rule."""

    @abstractmethod
    def print_plan(self, config: Any, workers: int, launch: LaunchReport | None) -> None:
        """Print the plan of a training on a number of processes, and how they would be started."""

    @abstractmethod
    def open(self, config: Any, distribution: Distribution) -> Application:
        """Make the application of validated flags for this process."""

    def find_mode(self, config: Any) -> str:
        """Return the mode that flags choose; besides those of --mode, dry_run."""
        return str(config.run.mode)

    @property
    def module(self) -> tuple[str, ...]:
        """Arguments of Python that run the program."""
        return ("-m", f"gaudi_apps.{self.prog}")

    def run(self, argv: Sequence[str] | None = None) -> NoReturn:
        """Run with the given arguments, those of the command line when None, and leave the process."""
        arguments = list(sys.argv[1:] if argv is None else argv)
        debug = is_switch_on(arguments, "debug")
        with (
            exit_on_error(self.prog, debug=debug),
            FailureReporter(self.prog, debug=debug) as reporter,
            naming_as_typed(self.config, arguments, self.former_flags),
        ):
            arguments = self.keep_run(arguments)
            config = self.parse(arguments)
            mode = self.find_mode(config)
            if mode == "train":  # which reports all that it does; no other mode has a bound in time
                reporter.begin("start")
            if mode == "plan":
                self._plan(config, arguments)
            elif is_elastic(os.environ):
                self._compute_rounds(mode, config, reporter)
            else:
                app = self.open(config, self._join_ranks(mode, config, arguments))
                if mode == "parity":
                    self._compare_sides(config, arguments, app, reporter)
                else:
                    _compute(mode, app, reporter)
                    _upload_results(mode, app)
        sys.exit(0)

    def keep_run(self, arguments: Sequence[str]) -> list[str]:
        """Return the arguments, without --clean where the run is started again: it goes on from what it has saved."""
        if not any("RESTART" in name for name in os.environ):  # the import takes time, which --help does not need
            return [*arguments]
        from gaudi_distributed.launch.planning import count_restarts

        restarts = count_restarts(os.environ)
        if not restarts or not self._parse(arguments).run.clean:
            return [*arguments]
        if detect_rank(os.environ).rank == 0:
            say(f"--clean has no effect: the run goes on, this is restart {restarts} of it", error=True)
        return [*arguments, "--no_clean"]

    def _parse(self, arguments: Sequence[str], choose: Callable[[Any, frozenset[str]], list[str]] | None = None) -> Any:
        return parse_config(
            self.config,
            arguments,
            prog=self.prog,
            description=self.description,
            former_flags=self.former_flags,
            choose=choose,
        )

    def parse(self, arguments: Sequence[str]) -> Any:
        """Return the flags, complete and validated."""
        config = self._parse(arguments, self._fill)
        completed = fill_distribution_flags(config.distribution, os.environ, _device_finder(config))
        config = replace(config, distribution=completed)
        self.validate(config)
        check_scaling(config.scaling, self.find_mode(config))
        check_urls(config)
        _fetch_run(config, self.find_mode(config))
        return config

    def choose_recipe(self, config: Any, given: frozenset[str], workers: int) -> Recipe:
        """Choose the flags that follow from data and machine; a program without --data chooses none.

        Args:
            config: the flags, without a recipe.
            given: names of those that the user gives.
            workers: processes that train together.

        Raises:
            MissingInputError, DataError: as by the data.
        """
        return Recipe()

    def _fill(self, config: Any, given: frozenset[str]) -> list[str]:
        arguments, mode = self._choose(config, given), self.find_mode(config)
        if mode in ("eval", *USING):
            _refuse_other_network(config, given)
        return [*arguments, *_follow_split(config, mode, given)]

    def _choose(self, config: Any, given: frozenset[str]) -> list[str]:
        """Choose the recipe, or read that of the run in the folder; return its flags."""
        self.recipe = Recipe()
        flags, mode = getattr(config, "recipe", None), self.find_mode(config)
        check_bounds(config)
        if flags is not None:
            _check_minutes(config, mode, given)
        check_urls(config)
        is_alone = mode == "eval" and detect_rank(os.environ).size == 1  # elsewhere, ranks may see no folder
        if mode in USING or (flags is None and is_alone):
            return _follow_type(config, mode, given)
        if flags is None:
            return []
        found = None
        if mode in ("train", "plan", "eval") and not config.run.clean and (flags.recipe == "auto" or flags.minutes):
            minutes = None if mode == "eval" else flags.minutes
            _fetch_run(config, mode)
            found = read_recipe(find_copy(config.run.model_dir), given, minutes, config.run.steps, program=self.prog)
        if found is not None:
            self.recipe = found
        elif flags.data is not None and flags.recipe == "auto" and mode != "eval":  # whose run has no recipe
            filled = fill_distribution_flags(config.distribution, os.environ, _device_finder(config))
            workers = count_workers(filled.to_distribution(), os.environ, _device_finder(config))
            self.recipe = self.choose_recipe(replace(config, distribution=filled), given, workers)
        elif flags.minutes:
            self.recipe = Recipe(given=given, minutes=flags.minutes)
        elif is_alone:
            return _follow_type(config, mode, given)
        return self.recipe.to_arguments()

    def start_ranks(self, config: Any, arguments: Sequence[str]) -> None:
        """Become the launcher of several processes, if the flags ask for them; else return."""
        command = (sys.executable, *self.module, *arguments)
        start_processes(config.distribution.to_distribution(), os.environ, _device_finder(config), command)

    def _plan(self, config: Any, arguments: Sequence[str]) -> None:
        """Print the plan of training by these flags, and the command lines that it would start."""
        flags, find_device = config.distribution.to_distribution(), _device_finder(config)
        command = (sys.executable, *self.module, *drop_plan_flags(arguments))
        report = report_launch(flags, os.environ, find_device, command)
        self.print_plan(config, count_workers(flags, os.environ, find_device), report)

    def _compare_sides(
        self, config: Any, arguments: Sequence[str], app: Application, reporter: FailureReporter
    ) -> None:
        """Compare two sides; the flags of the other one are checked before either is computed."""
        # Imported here, as in `_compute`.
        from gaudi_apps.runtime.session import Session
        from gaudi_apps.training.comparisons import other_arguments, recorded_side, run_parity

        flags: ParityFlags = config.parity
        self.parse([*arguments, *other_arguments(flags, Path("other"))])
        side = recorded_side(flags, (sys.executable, *app.program, *arguments))
        with side as recording, Session(app, reporter) as session:
            run_parity(session, flags, recording, as_json=config.run.json)

    def _compute_rounds(self, mode: str, config: Any, reporter: FailureReporter) -> None:
        """Train in rounds, each of which ends when ranks come or go."""
        from gaudi_apps.runtime.session import ElasticState

        flags, find_device = config.distribution.to_distribution(), _device_finder(config)
        check_elastic(mode, flags, os.environ)
        elastic = ElasticState(flags.commit_steps, RendezvousClient(os.environ))
        is_done = False
        with reporter.noting_stops() as stop:
            while not is_done and elastic.begin_round(lambda: bool(stop)):
                with elastic.recovering():
                    if elastic.newest is not None:  # the run was cleaned before it
                        config = replace(config, run=replace(config.run, clean=False))
                    app = self.open(config, find_distribution(flags, os.environ, find_device))
                    try:
                        _compute(mode, app, reporter, elastic)
                    finally:  # the length of --minutes, which a round has fitted, is that of the next ones
                        config, self.recipe = app.config, app.recipe
                    is_done = True
            if stop and not is_done:
                say(f"stopped by {stop.name}: this process leaves the run")

    def _join_ranks(self, mode: str, config: Any, arguments: Sequence[str]) -> Distribution:
        """Return the rank of this process; does not return where the process becomes the launcher of several."""
        flags, find_device = config.distribution.to_distribution(), _device_finder(config)
        if mode in TOGETHER:
            if not is_launched(os.environ):
                self.start_ranks(config, arguments)
            return find_distribution(flags, os.environ, find_device)
        # The flags of a run serve for its other modes too, as from the configuration that it left.
        size = detect_rank(os.environ).size
        if size > 1 or (mode == "verify-resume" and flags.has_engine):
            raise flag_error(f"--mode {mode}: is for one process, and not for several that train together")
        return Distribution()


@contextlib.contextmanager
def open_trainer(program: str, **flags: Any) -> Iterator[Trainer]:
    """Open a training by the flags of a program, in this process; after the block it is evaluated, as the program does.

    ``trainer.fit()`` trains; callbacks of your own go into ``trainer.callbacks`` before. Open it before this process
    computes with TensorFlow otherwise, for precision, threads and device are chosen here.

    Args:
        program: ``"ssd_train"``, ``"resnet_train"``, ``"resnext_train"``, or another one's name.
        flags: by the names that they have on the command line, ``data_dir="records", steps=100``; True and False are
            switches, a list or a tuple has several values, and None leaves a flag out.

    Raises:
        ValueError: there is no such program.
        GaudiError: what the program would end with, such as a FlagError for a wrong flag.
    """
    from gaudi_apps.runtime.session import Session
    from gaudi_apps.training.history import require_loggers
    from gaudi_apps.training.run import open_training

    began = time.monotonic()
    found = _find_program(program)
    arguments = [*_write_flags({**flags, "mode": "train"})]
    with naming_as_typed(found.config, arguments, found.former_flags):
        config = found.parse(found.keep_run(arguments))
    with contextlib.ExitStack() as stack:
        reporter = stack.enter_context(FailureReporter(program))
        reporter.begin("start")
        given, find_device = config.distribution.to_distribution(), _device_finder(config)
        if list_launcher_words(given, os.environ, find_device, ()) is not None:
            raise flag_error("the flags ask for several processes, and this is one", "start the script by gaudi-run")
        app = found.open(config, find_distribution(given, os.environ, find_device))
        app.began = began
        require_loggers(app.settings.log_to)
        app.find_inputs("train")
        session = stack.enter_context(Session(app, reporter))
        yield stack.enter_context(open_training(session))


def _find_program(name: str) -> Program:
    """Find a program by its name; `re` keeps other modules from being imported."""
    if re.fullmatch(r"\w+_train", name, re.ASCII):
        with contextlib.suppress(ModuleNotFoundError):
            found = getattr(importlib.import_module(f"gaudi_apps.{name}"), "PROGRAM", None)
            if isinstance(found, Program):
                return found
    raise ValueError(f"program is {name!r}; use ssd_train, resnet_train or resnext_train")


def _write_flags(flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the arguments of a command line for flags by name."""
    for name, value in flags.items():
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no_{name}"
        elif isinstance(value, list | tuple):
            yield from (f"--{name}", *map(str, value))
        elif value is not None:
            yield from (f"--{name}", str(value))


def _compute(mode: str, app: Application, reporter: FailureReporter, elastic: ElasticState | None = None) -> None:
    # Imported here: help and plans need none of it.
    from gaudi_apps.runtime.session import Session
    from gaudi_apps.training.comparisons import verify_resume
    from gaudi_apps.training.history import require_loggers
    from gaudi_apps.training.run import dry_run, open_training, run_evaluation

    if mode == "train":
        require_loggers(app.settings.log_to)
    app.find_inputs(mode)
    if mode == "verify-resume":
        verify_resume(app)
        return
    if (mode == "predict" and app.predict_exported()) or (mode == "eval" and app.evaluate_exported()):
        return
    with Session(app, reporter, elastic) as session:
        if mode == "train":
            with open_training(session) as trainer:
                trainer.fit()
        elif mode == "dry_run":
            dry_run(session)
        elif mode == "eval":
            run_evaluation(session)
        elif mode == "predict":
            app.predict(session.restore_used)
        elif mode == "export":
            app.export(session.restore_used)


def _fetch_run(config: Any, mode: str) -> None:
    """Fetch what a mode needs of a run at a URL; of several ranks only the first reads it."""
    if not is_url(config.run.model_dir) or config.run.clean or detect_rank(os.environ).rank:
        return
    # Imported here: most runs have no URL.
    from gaudi_apps.training.stored_runs import fetch_run

    begins = mode not in ("eval", *USING)
    which = "" if mode in ("plan", "verify-resume") else config.run.checkpoint
    fetch_run(config.run.model_dir, which, begins=begins)


def _follow_split(config: Any, mode: str, given: frozenset[str]) -> list[str]:
    """Return --val_share and --seed of the run in the folder, which split its --data into training and validation."""
    data = getattr(getattr(config, "recipe", None), "data", None)
    if mode not in ("eval", "export") or data is None:
        return []
    # Imported here, for programs that only train or plan.
    from gaudi_apps.training.application import read_flags_of_run

    found = read_flags_of_run(find_copy(config.run.model_dir))
    if not found.get("data") or os.path.realpath(str(found["data"])) != os.path.realpath(data):  # which may be a loop
        return []
    names = [name for name in ("val_share", "seed") if name not in given]
    return [f"--{name}={found[name]}" for name in names if isinstance(found.get(name), (int, float))]


def _refuse_other_network(config: Any, given: frozenset[str]) -> None:
    """Raise RunChangedError for a flag that is given, and contradicts the network of the run in the folder."""
    from gaudi_apps.training.checkpoint import read_run_record

    folder = find_copy(config.run.model_dir)
    settings = read_run_record(folder).get("settings", {})
    rules = find_rules(type(config))
    for name, value in list_flags(config):
        rule, found = rules[name], settings.get(name, value)
        if name in given and rule.of_network and rule.same.get(found, found) != rule.same.get(value, value):
            wrong = f"the run there has {name} {found!r}, this one {value!r}"
            raise RunChangedError(wrong, path=folder, field=name, remedy="leave it out, or give another --model_dir")


def _follow_type(config: Any, mode: str, given: frozenset[str]) -> list[str]:
    """Return --dtype as the run in the folder has it, or fp32 where bf16 is slower; nothing if there is no run."""
    # Imported here, for programs that only train or plan.
    from gaudi_apps.training.application import read_flags_of_run
    from gaudi_apps.training.checkpoint import read_run_record

    _fetch_run(config, mode)
    folder, found = find_copy(config.run.model_dir), None
    if "dtype" not in given and hasattr(config.device, "dtype"):
        found = {**read_flags_of_run(folder), **read_run_record(folder).get("settings", {})}.get("dtype")
    if found == "bf16" and not find_host(config.device).has_bf16:
        found = "fp32"
    return [f"--dtype={found}"] if found in ("bf16", "fp32") else []


def _upload_results(mode: str, app: Application) -> None:
    """Bring what a mode wrote into a run or a folder at a URL to its store; a training does so by itself."""
    url, output = app.config.run.model_dir, app.config.use.output_dir
    if mode in USING and is_url(output):
        from gaudi_datasets.fetching.copies import upload_copy

        upload_copy(output)
    if mode in ("eval", *USING) and is_url(url) and not app.settings.distribution.rank_info.rank:
        from gaudi_apps.training.stored_runs import upload_results

        upload_results(url)


def _check_minutes(config: Any, mode: str, given: frozenset[str]) -> None:
    """Raise FlagError if --minutes does not fit the mode, or the flags that are given by name."""
    if not config.recipe.minutes:
        return
    if mode not in ("train", "plan"):
        raise flag_error(f"--minutes: is for --mode train and plan; mode is {mode}")
    if length := next((name for name, rule in find_rules(type(config)).items() if rule.length and name in given), ""):
        raise flag_error(f"--minutes: contradicts --{length}", "leave one of them out")


def check_scaling(flags: ScalingFlags, mode: str) -> None:
    """Raise FlagError for the first flag of a launch of many ranks that does not fit the mode, or the others."""
    ranks, given = flags.plan_ranks, [name for name, value in asdict(flags).items() if value is not None]
    if given and mode != "plan":
        raise flag_error(f"--{given[0]}: is for --mode plan; mode is {mode}")
    if ranks is None:
        if given:
            raise flag_error(f"--{given[0]}: is for --plan_ranks", "give both, or none")
        return
    if flags.bandwidth_gbps is None:
        raise flag_error("--plan_ranks: needs --bandwidth_gbps, that of the network")
    per_host = flags.ranks_per_host or min(RANKS_PER_HOST, ranks)
    if ranks % per_host:
        wrong = f"--ranks_per_host {per_host}: must divide the {ranks} ranks of --plan_ranks"
        raise flag_error(wrong, "give another number")


def drop_plan_flags(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of the training that a plan is of."""
    kept: list[str] = []
    place = 0
    while place < len(arguments):
        argument, following = arguments[place], arguments[place + 1 : place + 2]
        word, place = split_word(argument), place + 1
        if word is not None and word[0] in _OF_PLAN:
            place += word[1] is None
        elif word is not None and word[0] == "json":
            place += read_switch(argument, word[1], following)[1]
        else:
            kept.append(argument)
    return kept


def _device_finder(config: Any) -> FindDevice:
    return partial(choose_device, config.device.device, use_hpu=not config.device.no_hpu)

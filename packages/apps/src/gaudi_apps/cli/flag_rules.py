"""Rules of flags, declared beside the type of each flag, and everything that follows from them.

A flag is a field of a dataclass: ``Annotated[int, resume_safe(minimum=1)] = 32``, with its help below. Which flags a
resumed run may change, which ones ranks may differ in and which values are out of bounds is read from there. A class
that declares an inherited flag again, for another default or a short form, inherits its rules and its help.

The entries of a YAML file of flags are put in front of the command line as flags, so both are read, converted and
checked the same way.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from tyro.conf import FlagCreatePairsOff

from gaudi_apps.runtime.errors import ConfigFileError, flag_error
from gaudi_datasets.arguments import FormerFlag, list_given, list_typed, name_as_typed, replace_former_flags
from gaudi_datasets.errors import DataError, FlagError, GaudiError, MissingInputError
from gaudi_datasets.fetching.stores import check_records_url, is_url, refuse_url, require_plain_url
from gaudi_datasets.flags import parse_flags

# A flag without a value: --name, and --no_name where it is on by default.
Switch = FlagCreatePairsOff[bool]

_UNSET: Any = object()
# Flags whose files and folders may be in a store; --data_dir is another one.
_AT_URLS = frozenset({"model_dir", "weights", "train_annotations", "val_annotations", "output_dir"})


@dataclass(frozen=True, kw_only=True)
class Flag:
    """Rules of one flag.

    Attributes:
        resume_safe: a resumed run may change it: the weights do not depend on it, or only by rounding and by the
            devices and ranks that compute them.
        per_rank: the ranks of a run may have different values.
        per_side: the two sides of ``--mode parity`` may have different values.
        length: it sets the length of training; where the learning rate depends on the last step, it is not resume-safe.
        sets_batch: it sets the global batch, which a resumed run compares in place of it.
        minimum: smallest value of a number.
        above: number below all values.
        maximum: largest value of a number.
        below: number above all values.
        finite: infinity is no value.
        short_run: value in the short runs of ``--mode verify-resume``; by default that of the user.
        of_network: it decides the form of the network: what uses the network of a run takes no other value.
        same: values that mean the network of another value.
        needs: name of a flag, and those of its values without which this one has no effect.
        per_command: it is of one command: neither config.yaml of a run nor its short runs repeat it.
        presets: by value of this flag, values of other flags, which take the place of their defaults.
        gone: values that the original program took, each with the reason that it is gone, or what to give in its place.
    """

    resume_safe: bool
    per_rank: bool
    per_side: bool = False
    length: Literal["", "steps", "epochs"] = ""
    sets_batch: bool = False
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    finite: bool = True
    short_run: Any = _UNSET
    of_network: bool = False
    same: Mapping[str, str] = field(default_factory=dict, hash=False)
    needs: tuple[str, tuple[bool | str, ...]] = ("", ())
    per_command: bool = False
    presets: Mapping[str, Mapping[str, bool | float | str]] = field(default_factory=dict, hash=False)
    gone: Mapping[str, str] = field(default_factory=dict, hash=False)

    def find_fault(self, value: Any) -> str | None:
        """Return the rule that a number breaks; None for a good one, and for anything but a number."""
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        bounds = (self.minimum, self.above, self.maximum, self.below)
        if not is_number or bounds == (None, None, None, None):
            return None
        is_finite = _fits_float(value)
        is_good = (
            (self.minimum is None or value >= self.minimum)
            and (self.above is None or value > self.above)
            and (self.maximum is None or value <= self.maximum)
            and (self.below is None or value < self.below)
            and (is_finite or not self.finite)
        )
        return None if is_good else self._describe_bounds() + ", and finite" * (self.finite and not is_finite)

    def _describe_bounds(self) -> str:
        if self.minimum is not None and self.maximum is not None:
            return f"must be in {self.minimum:g}..{self.maximum:g}"
        named = {"at least": self.minimum, "above": self.above, "at most": self.maximum, "below": self.below}
        return "must be " + " and ".join(f"{word} {bound:g}" for word, bound in named.items() if bound is not None)


# The weights depend on it.
fixed = partial(Flag, resume_safe=False, per_rank=False)
# A resumed run may change it, and all ranks do the same.
resume_safe = partial(Flag, resume_safe=True, per_rank=False)
# It belongs to the machine: where its data is, and how many of its processors are used.
per_rank = partial(Flag, resume_safe=True, per_rank=True)


def _fits_float(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # of an integer beyond all floats
        return False


def find_rules(config_class: type[Any]) -> Mapping[str, Flag]:
    """Return the rules of all flags of a dataclass by name, in the order of declaration; groups are followed.

    Raises:
        TypeError: a flag has no rules.
    """
    return dict(_walk(config_class))


def _walk(config_class: Any) -> Iterator[tuple[str, Flag]]:
    for entry in fields(config_class):
        hint = _read_hints(config_class)[entry.name]
        if is_dataclass(hint):
            yield from _walk(hint)
        else:
            yield entry.name, _find_rule(config_class, entry.name)


def _find_rule(config_class: Any, name: str) -> Flag:
    """Return the rules of a flag; those of a base class where the class itself declares none."""
    for base in config_class.__mro__:
        metadata = getattr(_read_hints(base).get(name), "__metadata__", ())
        for rule in metadata:
            if isinstance(rule, Flag):
                return rule
    raise TypeError(f"{config_class.__qualname__}.{name}: has no rules; declare them by Annotated[..., Flag(...)]")


def find_aliases(config_class: type[Any]) -> Mapping[str, str]:
    """Return the names that flags had in the original programs, each with the name of today; groups are followed."""
    return dict(_walk_aliases(config_class))


def _walk_aliases(config_class: Any) -> Iterator[tuple[str, str]]:
    for name, hint in _read_hints(config_class).items():
        if is_dataclass(hint):
            yield from _walk_aliases(hint)
        for entry in getattr(hint, "__metadata__", ()):
            long = (alias for alias in getattr(entry, "aliases", None) or () if alias.startswith("--"))
            yield from ((alias.removeprefix("--"), name) for alias in long)


@cache
def _read_hints(config_class: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(config_class, include_extras=True)


def list_resume_safe(config_class: type[Any], *, rate_needs_length: bool) -> frozenset[str]:
    """Return the names of the flags that a resumed run may change.

    Args:
        config_class: dataclass of the flags.
        rate_needs_length: the learning rate depends on the last step, so that the length must stay.
    """
    return frozenset(
        name
        for name, flag in find_rules(config_class).items()
        if flag.resume_safe and not (flag.length and rate_needs_length)
    )


def list_settings(config: Any, global_batch: int, *, rate_needs_length: bool) -> dict[str, Any]:
    """Return what decides the weights of a run, and what a resumed run compares: values of flags by name.

    Args:
        config: dataclass of the flags.
        global_batch: images of a step on all ranks, which are compared in place of the flags that set them.
        rate_needs_length: see `list_resume_safe`.
    """
    rules = find_rules(type(config))
    safe = list_resume_safe(type(config), rate_needs_length=rate_needs_length)
    values = {name: value for name, value in list_flags(config) if name not in safe and not rules[name].sets_batch}
    return {**values, "batch_size": global_batch}


def select_flags(config_class: type[Any], rule: str) -> tuple[str, ...]:
    """Return the names of the flags that have a rule, by the name of its attribute, such as ``"per_rank"``."""
    return tuple(name for name, flag in find_rules(config_class).items() if getattr(flag, rule))


def list_idle(config: Any, **resolved: str) -> Iterator[str]:
    """Yield a line for each flag that has another value than its default, and no effect without another flag.

    Args:
        config: dataclass of the flags, as the user gives them.
        resolved: values of flags whose default follows from others.
    """
    values = {**dict(list_flags(config)), **resolved}
    defaults = dict(list_flags(type(config)()))
    for name, rule in find_rules(type(config)).items():
        other, needed = rule.needs
        if other and values[name] != defaults[name] and values[other] not in needed:
            shown = " ".join((f"--{other}", " or ".join(each for each in needed if isinstance(each, str)))).rstrip()
            yield f"--{name} has no effect {'with' if needed == (False,) else 'without'} {shown}"


def make_short_run(config: Any, steps: int) -> dict[str, Any]:
    """Return the flags of a run by name, shortened to some steps: it saves each step and does nothing besides.

    Flags of one command are left out.
    """
    rules = find_rules(type(config))
    values = {name: value for name, value in list_flags(config) if not rules[name].per_command}
    values |= {name: flag.short_run for name, flag in rules.items() if flag.short_run is not _UNSET}
    return values | {name: steps for name, flag in rules.items() if flag.length == "steps"}


def check_bounds(config: Any) -> None:
    """Check every number of a dataclass of flags, and each of several, against its bounds; groups are followed.

    Raises:
        FlagError: for the first flag that is out of bounds.
    """
    rules = find_rules(type(config))
    for name, found in list_flags(config):
        for value in found if isinstance(found, tuple) else (found,):
            fault = rules[name].find_fault(value)
            if fault is not None:
                is_long = isinstance(value, int) and not _fits_float(value)
                shown = f"of {value.bit_length()} bits" if is_long else f"{value:g}"
                raise flag_error(f"--{name} {shown}: {fault}")


def parse_step_range(text: str, flag: str = "profile") -> range:
    """Parse the steps of a flag such as `--profile a,b`, counted from 1; the range is empty for ``0,0``.

    Raises:
        FlagError: it is not two numbers of at least 1, the smaller one first.
    """
    match = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", text, re.ASCII)
    if match is None:
        raise flag_error(f"--{flag} {text!r}: must be two steps as in 100,110, or 0,0 for none")
    first, last = int(match[1]), int(match[2])
    if first == last == 0:
        return range(0)
    if not 1 <= first <= last:
        raise flag_error(f"--{flag} {text}: must be steps of at least 1, the smaller one first")
    return range(first, last + 1)


def check_urls(config: Any) -> None:
    """Keep the copies of what URLs name where the flags say; refuse URLs in flags that name files of this machine.

    Raises:
        FlagError: for the first flag with a URL that it does not take.
    """
    for name, value in list_flags(config):
        if name in _AT_URLS:
            if isinstance(value, str) and is_url(value):
                require_plain_url(value, f"--{name}")
            continue
        if name == "inference" or (name == "data_dir" and not getattr(config.data, "static", False)):
            continue  # which has addresses of its own; a folder of records
        for each in value if isinstance(value, tuple) else (value,):
            refuse_url(each, f"--{name}")
    data_dir = getattr(config.data, "data_dir", None)
    if is_url(data_dir):
        require_plain_url(data_dir, "--data_dir")
    given = next((value for name, value in list_flags(config) if name in _AT_URLS and is_url(value)), data_dir)
    check_records_url(given, config.data.cache_dir, config.data.cache_gb)
    if is_url(given):
        from gaudi_datasets.records.remote_records import use_cache

        use_cache(config.data.cache_dir, config.data.cache_gb)


def require_alone(flag: str, value: str, others: Mapping[str, Any]) -> None:
    """Raise FlagError for the first of the other flags, by name, that is given beside one that replaces them."""
    for name, other in others.items():
        if other:
            shown = "" if other is True else f" {other}"
            raise flag_error(f"--{flag} {value}: contradicts --{name}{shown}", "leave one of them out")


def replace_flags(config: Any, values: Mapping[str, Any]) -> Any:
    """Return a dataclass of flags with other values of some of them by name; groups are followed.

    Raises:
        KeyError: there is no such flag.
    """
    if unknown := values.keys() - dict(list_flags(config)).keys():
        raise KeyError(min(unknown))
    changed: dict[str, Any] = {}
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            names = {name for name, _ in list_flags(value)}
            changed[entry.name] = replace_flags(value, {name: values[name] for name in names & values.keys()})
        elif entry.name in values:
            changed[entry.name] = values[entry.name]
    return replace(config, **changed)


def list_flags(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the value of every flag of a dataclass; groups are followed."""
    for entry in fields(config):
        value = getattr(config, entry.name)
        if is_dataclass(value):
            yield from list_flags(value)
        else:
            yield entry.name, value


Config = TypeVar("Config")


def parse_config(
    config_class: type[Config],
    argv: Sequence[str],
    *,
    prog: str,
    description: str,
    former_flags: Sequence[FormerFlag] = (),
    choose: Callable[[Config, frozenset[str]], Sequence[str]] | None = None,
) -> Config:
    """Make a `config_class` from the command line, from the YAML file that --config names, and from presets.

    The command line wins over the file, and both win over the presets of a flag, see `gaudi_apps.cli.flag_rules`, and
    over a recipe.

    Args:
        config_class: a dataclass.
        argv: the command line.
        prog: the program's name.
        description: what stands at the top of its help text.
        former_flags: of the program that this one replaces.
        choose: returns the flags of a recipe, from the flags without it and the names of those that are given.

    Raises:
        FlagError: a flag of the command line is unknown or has a value it does not take.
        ConfigFileError: the same in the file, or the file is no YAML mapping of flags to values.
        MissingInputError: there is no such file.
    """
    path, from_file = _read_file(config_class, argv, former_flags)
    if path is not None:
        try:
            _parse(config_class, from_file, prog=prog, former_flags=former_flags)
        except FlagError as error:
            raise ConfigFileError(str(error), path=path, flag=error.flag) from None
    given = [*from_file, *argv]
    complete = [*_list_preset(config_class, given), *given]
    config = _parse(config_class, complete, prog=prog, description=description, former_flags=former_flags)
    if choose is None:
        return config
    words = replace_former_flags(given, former_flags, config_class)
    chosen = choose(config, list_given(words, config_class))
    return _parse(config_class, [*chosen, *complete], prog=prog, former_flags=former_flags) if chosen else config


def _parse(config_class: type[Config], argv: Sequence[str], **options: Any) -> Config:
    """Parse flags; a value that the original took is answered with the reason that it is gone."""
    try:
        return parse_flags(config_class, argv, **options)
    except FlagError as error:
        rules = find_rules(config_class)
        for long_form, word, values in list_typed(argv, config_class):
            gone = rules[long_form.removeprefix("--")].gone
            for value in values:
                if word == error.flag and value in gone:
                    raise flag_error(f"{word} {value}: {gone[value]}") from None
        raise


@contextlib.contextmanager
def naming_as_typed(
    config_class: type[Any], argv: Sequence[str], former_flags: Sequence[FormerFlag] = ()
) -> Iterator[None]:
    """Make errors name the flags as the command line and the file of --config write them."""
    try:
        yield
    except GaudiError as error:
        words = list(argv)
        with contextlib.suppress(GaudiError, OSError, UnicodeDecodeError):
            words = [*_read_file(config_class, argv, former_flags)[1], *argv]
        with contextlib.suppress(FlagError):  # a switch with a wrong value, which is the error itself
            name_as_typed(error, words, config_class)
        raise


def _read_file(
    config_class: type[Any], argv: Sequence[str], former_flags: Sequence[FormerFlag]
) -> tuple[Path | None, list[str]]:
    """Return the file that --config names, and its flags."""
    path = _find_last(argv, config_class, "--config")
    return (None, []) if path is None else (Path(path), read_flags(Path(path), config_class, former_flags))


def _find_last(argv: Sequence[str], config_class: type[Any], flag: str) -> str | None:
    """Find the value that a flag has in the end, by any of its names."""
    values = [found for name, _, found in list_typed(argv, config_class) if name == flag]
    return values[-1][0] if values and values[-1] else None


def _list_preset(config_class: type[Any], argv: Sequence[str]) -> list[str]:
    """Return the flags that the presets among some arguments stand for."""
    words: list[str] = []
    for name, flag in find_rules(config_class).items():
        if not flag.presets:
            continue
        chosen = _find_last(argv, config_class, f"--{name}")
        if chosen is None:
            continue
        if chosen not in flag.presets:
            raise flag_error(f"--{name} {chosen}: must be one of {', '.join(flag.presets)}")
        for other, value in flag.presets[chosen].items():
            words += [f"--{other}" if value else f"--no_{other}"] if isinstance(value, bool) else [f"--{other}={value}"]
    return words


def read_flags(path: Path, config_class: type[Any], former_flags: Sequence[FormerFlag] = ()) -> list[str]:
    """Return the entries of a YAML file as command-line arguments; null stands for the default.

    Raises:
        ConfigFileError: no YAML, no mapping, or an entry that is no flag of `config_class` (with the nearest one).
        MissingInputError: there is no such file.
    """
    from gaudi_datasets.documents import load_yaml  # here, since help needs no YAML

    try:
        entries = load_yaml(path)
    except MissingInputError:
        raise MissingInputError(
            f"--config {path}: there is no such file", flag="--config", remedy="give a YAML file of flags"
        ) from None
    except DataError as error:
        raise ConfigFileError(str(error.args[0]), path=path, flag="--config", remedy=error.remedy) from None
    if not isinstance(entries, dict):
        raise ConfigFileError(f"holds {_describe_kind(entries)}", path=path, remedy="write one `flag: value` a line")
    _drop_former_default(entries)
    own = dict(list_flags(config_class()))
    aliases = {alias: own[name] for alias, name in find_aliases(config_class).items()}
    former = (flag.name.removeprefix("--").replace("-", "_") for flag in former_flags)
    defaults = {**dict.fromkeys(former), **aliases, **own}
    return [argument for name, value in entries.items() for argument in _to_arguments(path, name, value, defaults)]


def _drop_former_default(entries: dict[Any, Any]) -> None:
    """Drop the 8 workers a machine that earlier versions wrote beside every run, also beside one of one process."""
    has_engine = entries.get("use_horovod") or entries.get("distribution_strategy", "off") != "off"
    if entries.get("num_workers_per_hls") == 8 and not has_engine:
        del entries["num_workers_per_hls"]


def _to_arguments(path: Path, name: Any, value: Any, defaults: dict[str, Any]) -> list[str]:
    flag = str(name).replace("-", "_")
    if flag not in defaults or flag == "config":
        nearest = difflib.get_close_matches(flag, defaults, n=1, cutoff=0.5)
        remedy = f"did you mean {nearest[0]}?" if nearest and flag != "config" else "remove it"
        raise ConfigFileError(f"{name}: is no flag that a file can give", path=path, field=str(name), remedy=remedy)
    if value is None:
        return []
    if isinstance(defaults[flag], bool):
        if not isinstance(value, bool):
            raise ConfigFileError(f"{name}: holds {value!r}", path=path, field=str(name), remedy="write true or false")
        # The default too, which would else be that of a preset or a recipe.
        return [f"--{flag}" if value else f"--no_{flag}"]
    if isinstance(value, dict):
        remedy = "give a value, flags stand at the top level"
        raise ConfigFileError(f"{name}: holds {_describe_kind(value)}", path=path, field=str(name), remedy=remedy)
    if isinstance(value, list):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}={value}"]


def _describe_kind(value: Any) -> str:
    kinds = {dict: "a mapping", list: "a list", type(None): "nothing"}
    return kinds.get(type(value), "a single value")

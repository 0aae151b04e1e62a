"""Run a program: print its lines and its error, escaped, and end with the exit status of what went wrong.

All that our programs print goes through `say`; `tests/test_printing.py` finds other ways. `gaudi_distributed.errors`
has the same functions, because no arrow joins the two.
"""

from __future__ import annotations

import errno
import gc
import importlib.util
import io
import os
import re
import select
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TextIO

EX_SOFTWARE = 70
EX_IOERR = 74
EX_TEMPFAIL = 75
EX_CONFIG = 78
MAX_ERROR = 400  # characters of an error as it is printed
_CV_NO_MEMORY = -4  # the code of such a cv2.error
# Of a kernel of oneDNN in TensorFlow: no memory (1), or none for what it needs while it computes (5).
_KERNEL_NO_MEMORY = re.compile(r"Status: (1, message: |5, message: could not (create|execute) a primitive)")
# Of a GPU: its memory is full, or its libraries cannot begin, for which another program that fills it is the most
# frequent cause. TensorFlow has no type of its own for these.
_GPU_NO_MEMORY = re.compile(
    r"CUDA_ERROR_OUT_OF_MEMORY|Status: out of memory|Dst tensor is not initialized|DNN library initialization failed"
    r"|CU(DNN|BLAS)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)"
)
_OF_GPU = ("InternalError", "FailedPreconditionError", "UnknownError")
NO_THREAD = "can't start new thread"  # whose stack finds no place, says Python
NO_REASON = "error return without exception set"

_status: TextIO | None = None  # where a line stands on a terminal that the next one replaces
_faults: list[OSError] = []  # of standard output and standard error
# What ends a program from outside, where the system has it: Windows knows no SIGHUP.
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def escape(text: str) -> str:
    """Return a text with what a terminal may obey, such as escape characters of names in data, written out."""
    return text if text.isprintable() else "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def say(*lines: object, error: bool = False, stream: TextIO | None = None) -> None:
    """Print lines on standard output, standard error or a stream; each is one line, whatever names it holds."""
    show_status("")
    stream = stream or (sys.stderr if error else sys.stdout)
    stream.write("".join(f"{escape(str(line))}\n" for line in lines))
    stream.flush()


def show_status(text: str, stream: TextIO | None = None) -> None:
    """Show on a terminal a line that the next line replaces; an empty one removes it."""
    global _status
    if (shown := stream or _status) is not None:
        shown.write(f"\r\x1b[K{escape(text)}")
        shown.flush()
    _status = shown if text else None


@contextmanager
def importing(name: str, *, deferred: str = "") -> Iterator[None]:
    """Import a large library within a context, in up to a third less time; nothing is done where it is there already.

    What it makes stays, so Python does not look through it for garbage, neither meanwhile nor later.

    Args:
        name: of the library's module.
        deferred: name of another one that it imports, and uses on some calls only: it is imported on the first of them.
    """
    if name in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        with _deferring(deferred):
            yield
    finally:
        gc.freeze()
        gc.enable()


class _Deferred(types.ModuleType):
    """A module that is imported when a name of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        """Import the module, and return its value of this name."""
        # Whoever looks through all modules asks for such names; to import a submodule, Python asks for the path.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        _remove_module(self)
        module = importlib.import_module(self.__name__)
        self.__dict__.update(vars(module))
        return getattr(module, name)


@contextmanager
def _deferring(name: str) -> Iterator[None]:
    """Within a context, have an import of a module, if it is installed, wait until the module is used."""
    if not name or name in sys.modules or importlib.util.find_spec(name) is None:
        yield
        return
    sys.modules[name] = module = _Deferred(name)
    try:
        yield
    finally:
        _remove_module(module)


def _remove_module(module: types.ModuleType) -> None:
    """Let Python import a module anew, unless another one is there by its name."""
    if sys.modules.get(module.__name__) is module:
        del sys.modules[module.__name__]


def run_program(main: Callable[[], int | None], *, prog: str, debug: bool = False) -> NoReturn:
    """Run `main` and leave the process with the status that it returns, None being 0, or with that of its error.

    Args:
        main: the program.
        prog: the name that error messages begin with.
        debug: show the traceback of an error before its message.
    """
    with exit_on_error(prog, debug=debug):
        sys.exit(main() or 0)
    sys.exit(0)


@contextmanager
def exit_on_error(prog: str, *, debug: bool = False) -> Iterator[None]:
    """Print an error that is raised within a context as one line, and leave the process with its exit status.

    An error with an integer `exit_status`, as every `GaudiError` has, ends the program with it; another OSError (disk
    full, no permission) or a lack of memory ends it with 74, an interrupt with 75, a missing module with 78, any other
    error with 70.
    SIGTERM and SIGHUP interrupt as Ctrl-C does. A reader that leaves early, as `head` does, changes nothing; output
    that could not be written for another reason ends a program with 74 that has done its work.

    Args:
        prog: the name that error messages begin with.
        debug: show the traceback of an error before its message.
    """
    open_output()
    os.environ.pop("MPLBACKEND", None)  # programs draw into files only, and matplotlib ends on a value it does not know
    status: Any = 0
    try:
        with _interrupting():
            yield
    except SystemExit as end:
        status = end.code
    except (Exception, KeyboardInterrupt) as error:
        status = exit_status_of(error)
        if debug:
            say(*traceback.format_exc().splitlines(), error=True)
        say(*describe_end(prog, error, debug=debug), error=True)
    flush_output()
    if _faults and not status:
        status = exit_status_of(_faults[0])
        say(*describe_end(prog, _faults[0]), error=True)
    if status:
        sys.exit(status)


def exit_status_of(error: BaseException) -> int:
    """Return the exit status of a program that ends with this error."""
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    if lacks_memory(error):
        return EX_IOERR
    statuses = {OSError: EX_IOERR, KeyboardInterrupt: EX_TEMPFAIL, ImportError: EX_CONFIG}
    return next((status for kind, status in statuses.items() if isinstance(error, kind)), EX_SOFTWARE)


def describe_end(prog: str, error: BaseException, *, debug: bool = False) -> list[str]:
    """Return the lines of an error that ends a program, at most `MAX_ERROR` characters unless `debug`."""
    lines = [f"{prog}: error: {describe_error(error)}"]
    if not debug and not is_foreseen(error):
        lines.append(f"{prog}: this was not foreseen; rerun with --debug for the traceback")
    return lines if debug else [shorten(lines[0], MAX_ERROR - len("".join(lines[1:])) - len(lines)), *lines[1:]]


def describe_error(error: BaseException) -> str:
    """Return the error as one line, which begins with its type where it was not foreseen."""
    return escape(_describe(error))


def shorten(text: str, limit: int) -> str:
    """Return at most so many characters of a text, without its middle, because an error ends with what to do."""
    kept = (limit - 5) // 2
    return text if len(text) <= limit else f"{text[:kept]} ... {text[-kept:]}"


def _describe(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    lines = str(error).strip().splitlines()
    if hasattr(error, "exit_status") and lines:
        return " ".join(line.strip() for line in lines)
    if lacks_memory(error):
        said = [line for line in lines if _KERNEL_NO_MEMORY.search(line)] or lines
        if _is_gpu_exhausted(error):
            told = next(line.strip() for line in lines if _GPU_NO_MEMORY.search(line))
            return f"the GPU is full, or its libraries do not fit it ({told}); nvidia-smi shows what else uses it"
        told = f" ({said[0]})" if said else ""
        return f"there is not enough memory{told}; free some, or take a smaller batch or fewer processes"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, ImportError) and lines:
        return lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def is_foreseen(error: BaseException) -> bool:
    """Return True for an error that a user can act on, so that a traceback would add nothing."""
    kinds = (OSError, KeyboardInterrupt, ImportError)
    return hasattr(error, "exit_status") or isinstance(error, kinds) or lacks_memory(error)


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error tells of too little memory; NumPy, TensorFlow and OpenCV each have their own."""
    kind = type(error)
    told = kind.__name__ if kind.__module__.startswith("tensorflow.") else ""
    is_exhausted = told == "ResourceExhaustedError" or (
        told == "AbortedError" and _KERNEL_NO_MEMORY.search(str(error)) is not None
    )
    # Python says the latter of a library in C that fails and does not say why, as one that finds no memory.
    is_told = (kind, str(error)) in ((RuntimeError, NO_THREAD), (SystemError, NO_REASON))
    return (
        isinstance(error, MemoryError) or is_exhausted or is_told or _is_cv_exhausted(error) or _is_gpu_exhausted(error)
    )


def _is_gpu_exhausted(error: BaseException) -> bool:
    kind = type(error)
    is_of_gpu = kind.__module__.startswith("tensorflow.") and kind.__name__ in _OF_GPU
    return is_of_gpu and _GPU_NO_MEMORY.search(str(error)) is not None


def _is_cv_exhausted(error: BaseException) -> bool:
    return type(error).__module__ == "cv2" and getattr(error, "code", None) == _CV_NO_MEMORY


@contextmanager
def _interrupting() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt a context as Ctrl-C does; one that is ignored, as by nohup, stays ignored."""
    before = {number: signal.getsignal(number) for number in _ENDING}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP wait for the end of a context, in which processes are started.

    A process of multiprocessing whose start is interrupted shows a traceback. Those that are started here do not hear
    Ctrl-C, which is for the one that started them; on Windows they do. In another thread than the main one nothing
    waits.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDING)}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        handlers = {}
    noted: list[int] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: noted.append(number))
    has_masks = hasattr(signal, "pthread_sigmask")
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if has_masks else set()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if has_masks:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if noted:
            signal.raise_signal(noted[0])


class _Output(io.FileIO):
    """Standard output or standard error, which drops the rest once nobody reads it or nothing can be written."""

    def write(self, content: Any) -> int:
        """Write all bytes, and return their number."""
        left = memoryview(content)
        try:
            while left:
                taken = super().write(left)
                left = left[taken or 0 :]
                if taken is None:  # the descriptor does not wait, and takes nothing now
                    select.select([], [self], [])
        except OSError as error:
            if error.errno != errno.EPIPE:
                name = "standard output" if self.fileno() == 1 else "standard error"
                _faults.append(OSError(error.errno, error.strerror, name))
            # The descriptor itself, so that libraries which write to it in C do not fail either.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
        return len(content)


def open_output() -> None:
    """Make sys.stdout and sys.stderr raise nothing: neither OSError nor BrokenPipeError, nor for a letter they lack.

    A program then does its work to the end, and its exit status is that of its work, or of output that was lost. A
    stream that is closed from the beginning drops everything. Streams that somebody has replaced are left alone.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:  # else the next file would be standard output
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the program began, as by `>&-`
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w"), encoding="utf-8"))
        elif stream is getattr(sys, f"__{name}__"):
            stream.flush()
            output = _Output(stream.fileno(), "w", closefd=False)
            reopened = io.TextIOWrapper(
                output if stream.write_through else io.BufferedWriter(output),
                encoding=stream.encoding,
                errors="backslashreplace",
                line_buffering=stream.line_buffering,
                write_through=stream.write_through,
            )
            setattr(sys, name, reopened)


def flush_output() -> None:
    """Write what standard output and standard error still hold."""
    sys.stdout.flush()
    sys.stderr.flush()

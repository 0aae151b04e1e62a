"""Hide from three packages what Windows lacks; Python imports this where the folder is on PYTHONPATH.

Every process that a test starts gets it, too. Only the sources of gaudi-ops, gaudi-datasets and gaudi-models are
affected: they see no POSIX-only module, and `os`, `signal`, `select` and `socket` without the names that Python has on
POSIX systems alone. The standard library and other libraries have their own code for Windows, and see everything.
TensorFlow and MXNet are hidden from all, for these are the tests of what works without.
"""

from __future__ import annotations

import builtins
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

OURS = {"gaudi_ops", "gaudi_datasets", "gaudi_models"}
# By Python's documentation of each: "Availability: Unix" or "not Windows".
MODULES = {
    *("_posixshmem", "_posixsubprocess", "crypt", "curses", "fcntl", "grp", "nis", "ossaudiodev", "pipes", "posix"),
    *("pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty"),
}
OF_OS = """
O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_LARGEFILE O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW O_NONBLOCK O_PATH
O_RSYNC O_SYNC O_TMPFILE WCOREDUMP WEXITSTATUS WIFCONTINUED WIFEXITED WIFSIGNALED WIFSTOPPED WNOHANG WSTOPSIG WTERMSIG
WUNTRACED chown chroot confstr copy_file_range ctermid environb eventfd fchdir fchmod fchown fdatasync fork forkpty
fpathconf fstatvfs getegid geteuid getgid getgrouplist getgroups getloadavg getpgid getpgrp getpriority getresgid
getresuid getsid getuid getxattr initgroups killpg lchown listxattr lockf major makedev memfd_create minor mkfifo mknod
nice openpty pathconf pidfd_open pipe2 posix_fadvise posix_fallocate posix_spawn posix_spawnp pread preadv ptsname
pwrite pwritev register_at_fork removexattr sched_get_priority_max sched_getaffinity sched_getparam sched_getscheduler
sched_setaffinity sched_yield sendfile set_blocking setegid seteuid setgid setgroups setpgid setpriority setresgid
setresuid setsid setuid setxattr splice statvfs sync sysconf tcgetpgrp tcsetpgrp ttyname uname unshare wait wait3 wait4
waitid
"""
OF_SIGNAL = """
SIGALRM SIGBUS SIGCHLD SIGCLD SIGCONT SIGHUP SIGIO SIGIOT SIGKILL SIGPIPE SIGPOLL SIGPROF SIGPWR SIGQUIT SIGRTMAX
SIGRTMIN SIGSTKFLT SIGSTOP SIGSYS SIGTRAP SIGTSTP SIGTTIN SIGTTOU SIGURG SIGUSR1 SIGUSR2 SIGVTALRM SIGWINCH SIGXCPU
SIGXFSZ SIG_BLOCK SIG_SETMASK SIG_UNBLOCK alarm getitimer pause pidfd_send_signal pthread_kill pthread_sigmask setitimer
siginterrupt sigpending sigtimedwait sigwait sigwaitinfo
"""
NAMES: Mapping[str, frozenset[str]] = {
    "os": frozenset(OF_OS.split()),
    "signal": frozenset(OF_SIGNAL.split()),
    "select": frozenset({"PIPE_BUF", "devpoll", "epoll", "kevent", "kqueue", "poll"}),
    "socket": frozenset({"AF_UNIX", "CMSG_LEN", "SCM_RIGHTS", "recv_fds", "send_fds", "sethostname"}),
}
FRAMEWORKS = {"keras", "mxnet", "tensorflow", "tf_keras"}
_import = builtins.__import__
_seen: dict[str, types.ModuleType] = {}


class _Lacking(types.ModuleType):
    """A module without some of its names."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__(module.__name__)
        object.__getattribute__(self, "__dict__")["_module"] = module

    def __getattribute__(self, name: str) -> Any:
        """Return what the module has, unless Windows lacks it."""
        module = object.__getattribute__(self, "__dict__")["_module"]
        if name in NAMES[module.__name__]:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on Windows", name=name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: object) -> None:
        """Set it in the module itself, for tests that replace a function."""
        setattr(object.__getattribute__(self, "__dict__")["_module"], name, value)

    def __delattr__(self, name: str) -> None:
        """Delete it from the module itself."""
        delattr(object.__getattribute__(self, "__dict__")["_module"], name)


def import_without_posix(
    name: str,
    namespace: Mapping[str, object] | None = None,
    local: Mapping[str, object] | None = None,
    fromlist: Sequence[str] | None = (),
    level: int = 0,
) -> types.ModuleType:
    """Import as `__import__` does; for three packages, what there is on Windows."""
    importer = str((namespace or {}).get("__name__", "")).partition(".")[0]
    is_ours = not level and importer in OURS
    first = name.partition(".")[0]
    if is_ours and first in MODULES:
        raise ModuleNotFoundError(f"No module named {first!r} on Windows", name=first)
    module = _import(name, namespace, local, fromlist, level)
    if is_ours and module.__name__ in NAMES:
        return _seen.setdefault(module.__name__, _Lacking(module))
    return module


builtins.__import__ = import_without_posix  # type: ignore[assignment]


class _FinderWithoutFrameworks(PathFinder):
    """Finds what Python finds, but no framework."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module."""
        return None if fullname in FRAMEWORKS else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _FinderWithoutFrameworks

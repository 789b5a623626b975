"""One rank of a job: `python -m mpips SCRIPT.py ARGS` or `python -m mpips -m MODULE ARGS`, under any launcher.

This runner builds on `python -m mpi4py` and works like it. In addition, an uncaught exception or an exit code other
than 0 is printed with the rank, and ends the whole job at once.
"""

import difflib
import io
import os
import re
import sys
import threading
from collections.abc import Callable
from urllib.parse import unquote_to_bytes

from mpi4py import run

from mpips.collectives.recorder.own import answer_usr2
from mpips.ending.alone import remark
from mpips.ending.process import StatusLine, is_fork, is_started, leave_fork, say
from mpips.ending.uncaught import INTERRUPTED, end, end_after_hook, end_unstarted, is_alone, show
from mpips.store.world import ENCODED, launched_as, variables_of_place

# The subcommands of the `mpips` command. A user who types `python -m mpips SUBCOMMAND` meant `mpips SUBCOMMAND`.
COMMANDS = (
    "run",
    "doctor",
    "script",
    "train",
    "bench",
    "tune",
    "sim",
    "plan",
    "chaos",
    "lab",
    "why",
    "top",
    "page",
    "trace",
    "metrics",
)


def whole_lines() -> None:
    """From now on, write each printed line when it ends, in a single write.

    The launcher mixes the output of several ranks. With PYTHONUNBUFFERED each word would be written separately.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def decode_words(words: list[str]) -> list[str]:
    """Return the words of a command line. If the first word is `ENCODED`, decode the others from percent-encoding."""
    encoded = words[1:] if words[:1] == [ENCODED] else []
    return [os.fsdecode(unquote_to_bytes(word)) for word in encoded] or words


def search_as_python(script: str) -> None:
    """Set the first entry of `sys.path` as Python does for a script, a module or a command.

    Unless Python was started with -P, the first entry is now the current folder, which Python has put there for this
    runner. This entry is removed first. When `python -m mpips -m MODULE` runs a module of mpips, the current folder is
    not searched for the module.
    """
    if not sys.flags.safe_path:
        del sys.path[0]
    if script == "-m":
        module = sys.argv[2] if len(sys.argv) > 2 else ""
        first = [] if module.partition(".")[0] == "mpips" else [os.getcwd()]
    elif script in ("-c", "-"):
        first = [""]
    else:
        # This entry is added even with -P or PYTHONSAFEPATH, because mpi4py.run adds it in any case.
        sys.path.insert(0, os.path.realpath(os.path.dirname(script)))
        return
    if sys.flags.ignore_environment or not os.environ.get("PYTHONSAFEPATH"):
        sys.path[:0] = first


def exit_of(left: SystemExit) -> tuple[int, str]:
    """Return the exit code that Python itself would use for this SystemExit, and the text that it would print."""
    if left.code is None or isinstance(left.code, int):
        code = int(left.code or 0)
        return (code & 255 if -(1 << 63) <= code < 1 << 63 else 255), ""
    return 1, f"{left.code}\n"


def _set_abort_status(status: object, set_status: Callable[[object], None] = run.set_abort_status) -> None:
    """Give mpi4py the exit code that Python would use. mpi4py then aborts MPI with this code.

    mpi4py's own conversion of the status fails for codes of 2**40 or more.
    """
    set_status(exit_of(status)[0] if isinstance(status, SystemExit) else status)


def run_program() -> None:
    """Run the program of the command line. A process that the program forks also ends in this function."""
    code = 0
    try:
        run.main()
    except BaseException as error:
        if not is_fork():
            raise
        if isinstance(error, SystemExit):
            code, text = exit_of(error)
            say(text)
        else:
            left = show(error)
            code = 1 if left is None else exit_of(left)[0]
    if is_fork():
        leave_fork(code)


def name_threads_that_stay() -> None:
    """Start a timer. If threads still keep this process alive when it expires, print the names of these threads.

    Called after the program has ended. The timer has the time limit for stalls. This call itself returns at once.
    """

    def staying() -> list[str]:
        main = threading.main_thread()
        return [repr(thread.name) for thread in threading.enumerate() if not thread.daemon and thread is not main]

    def say() -> None:
        if names := staying():
            rank, _ = launched_as(os.environ) or (0, 1)
            what, them = ("threads", "them") if len(names) > 1 else ("thread", "it")
            text = f"its program ended {seconds:g} s ago, and waits for its {what} {', '.join(names)}"
            os.write(2, f"mpips: rank {rank}: {text}: end {them}, or make {them} with daemon=True\n".encode())

    if staying():
        from mpips.collectives.fabric.wait import read_limits

        seconds = read_limits().stall_seconds
        timer = threading.Timer(seconds, say)
        timer.daemon = True
        timer.start()


def hint_at_backend(error: BaseException) -> None:
    """Add a hint to PyTorch's error for a backend whose name is nearly ours."""
    unknown = re.fullmatch(r"Unknown (?:c10d )?backend type (\S+) ?", str(error))
    if unknown and difflib.get_close_matches(unknown[1].lower(), ["mpips"]):
        error.add_note('did you mean init_process_group("mpips")?')


if __name__ == "__main__":
    sys.argv[1:] = decode_words(sys.argv[1:])
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    if word in COMMANDS and not os.path.exists(word):
        print(
            f"mpips: python -m mpips runs a script, and there is none named {word!r}; the command is `mpips {word}`,"
            f" or `python -m launch.cli {word}`",
            file=sys.stderr,
        )
        sys.exit(2)
    whole_lines()
    answer_usr2()
    search_as_python(word)
    os.environ.update(variables_of_place(os.environ))
    status = StatusLine()
    run.set_abort_status = _set_abort_status
    try:
        run_program()
        status.ends_well(remark())
        name_threads_that_stay()
    except SystemExit as left:
        code, why = exit_of(left)
        # End the job now and not in an atexit handler: there an open store would wait for ranks that wait for this one.
        if code:
            status.fails(code)
            if is_started() or launched_as(os.environ) is None:
                end(f"exit {code}", why, code, same=(code, why))
            else:
                say(why)
                end_unstarted(f"exit {code}", code)
            raise SystemExit(code) from None
        status.ends_well(remark())
        raise
    except BaseException as error:
        # Every error that leaves the program is printed, and ends the job.
        hint_at_backend(error)
        interrupted = isinstance(error, KeyboardInterrupt)
        code, what = (INTERRUPTED, "interrupted") if interrupted else (1, type(error).__name__)
        status.fails(code)
        if interrupted and is_started() and is_alone():
            # Python then ends by the signal SIGINT. A loop in a shell stops only if its command ends by the signal.
            raise
        if is_started() or not interrupted:
            # In a job of several ranks our own hook does not return, because it ends the job.
            hooks_code = show(error)
            code = code if hooks_code is None else exit_of(hooks_code)[0] or code
        if is_started():
            end_after_hook(error, code)
        else:
            end_unstarted(what, code)
        raise SystemExit(code) from None

"""`mpips run` and the `mpips` command as a user meets them, without starting MPI."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from ipaddress import IPv4Interface
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from collectives.benchmark.__main__ import CASES
from launch import Launcher, LauncherError, Machine, cli, machine, network, run
from launch.hosts import RankBlock
from launch.running import process
from mpips.__main__ import COMMANDS
from mpips.store import world


def call(*words: str) -> Result:
    return CliRunner().invoke(run.command, list(words))


def test_dry_run_prints_the_whole_command(mpirun: str) -> None:
    done = call(
        "-s", "2", "-c", "2", "-w", "4", "--masters", "all", "--mpirun", mpirun, "--dry-run", "x.py", "--lr", "0.1"
    )
    assert done.exit_code == 0, done.output
    words = shlex.split(done.output)
    assert words[-6:] == ["-P", "-m", "mpips", "x.py", "--lr", "0.1"]
    assert words[words.index("-n") + 1] == "6"
    pairs = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-genv"}
    roles = {"MPIPS_SERVERS": "2", "MPIPS_CLIENTS": "2", "MPIPS_WORKERS": "4", "MPIPS_MASTERS": "all"}
    assert roles.items() <= pairs.items()


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (("--log-dir", ""), {}, "--log-dir '' names no folder: name one, or leave it out"),
        (("--log-format", "json"), {}, "--log-format json says how the log looks, and none is written: add --log info"),
        (("--log-dir", "{here}/x.py/logs"), {}, "/x.py/logs' cannot be made: Not a directory"),
        ((), {"MPIPS_LOG_DIR": "{here}/x.py/logs"}, "MPIPS_LOG_DIR='"),
        ((), {"MPIPS_RECORDER": "maybe"}, "MPIPS_RECORDER='maybe' is unknown: give 0 for no pages, or leave it unset"),
        (
            ("--summary", "--page", "0"),
            {"MPIPS_RECORDER": "0"},
            "MPIPS_RECORDER=0 leaves out the ranks' pages, without which there is no --summary, --page: unset that "
            "variable",
        ),
        (("--trace", "{here}/t.json"), {"MPIPS_RECORDER": "0"}, "without which there is no --trace: unset"),
        (("--metrics", "{here}"), {"MPIPS_RECORDER": "0"}, "without which there is no --metrics: unset"),
        (
            (),
            {"MPIPS_RECORDER": "0", "MPIPS_DUMP_DIR": "{here}/dumps"},
            "there is no MPIPS_DUMP_DIR: unset that variable",
        ),
        ((), {"MPIPS_DUMP_DIR": "{here}/x.py"}, "/x.py' cannot be made: File exists: name a folder"),
    ],
)
def test_options_are_not_taken_in_silence(
    words: tuple[str, ...], variables: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "x.py").write_text("pass")
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(here=tmp_path))
    done = call(*(word.format(here=tmp_path) for word in words), "-w", "2", "--dry-run", "x.py")
    assert done.exit_code == 2 and said in done.output, done.output


def test_env_sets_variables_of_ranks(mpirun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "a secret")
    words = ("--env", "KEY", "-x", "OMP_NUM_THREADS=3", "--env", "EMPTY=")
    done = call("-w", "2", *words, "--mpirun", mpirun, "--dry-run", "x.py")
    line = shlex.split(done.output)
    pairs = {line[i + 1]: line[i + 2] for i, word in enumerate(line) if word == "-genv"}
    assert {"OMP_NUM_THREADS": "3", "EMPTY": ""}.items() <= pairs.items()
    assert "-genvall" in line  # mpirun has the value of the other in its environment
    assert "a secret" not in done.output  # all users see the words of a command


@pytest.mark.parametrize(
    ("size", "rank"),
    [
        ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
        ("PMI_SIZE", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ],
)
def test_a_rank_starts_no_job_of_its_own(mpirun: str, monkeypatch: pytest.MonkeyPatch, size: str, rank: str) -> None:
    """Each rank of `mpirun -n 4 mpips run ...` would start a whole job."""
    monkeypatch.setenv(size, "4")
    monkeypatch.setenv(rank, "1")
    done = call("-w", "2", "--mpirun", mpirun, __file__)
    assert done.exit_code == 2
    assert "rank 1 of 4 that a launcher has started: call it once" in done.output


@pytest.mark.slow
def test_ranks_meet_on_the_first_host_unless_the_user_says_where(
    mpirun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("me@a:2\nb:2\n")
    for name in (world.RANK, world.SIZE, world.LOCAL_RANK, world.MASTER, world.PORT):
        monkeypatch.delenv(name, raising=False)

    def place(*words: str) -> str | None:
        line = shlex.split(call("-w", "2", *words, "--mpirun", mpirun, "--dry-run", "x.py").output)
        return {line[i + 1]: line[i + 2] for i, word in enumerate(line) if word == "-genv"}.get(world.PLACE)

    port = rf"MASTER_PORT=({'|'.join(map(str, run.PORTS))})"
    assert re.fullmatch(f"MASTER_ADDR=127.0.0.1,{port}", str(place()))
    assert re.fullmatch(f"MASTER_ADDR=a,{port}", str(place("--hostfile", str(hosts))))
    assert place("-s", "1") is place("-x", "RANK=3") is None
    assert re.fullmatch(port, str(place("-x", "MASTER_ADDR=c")))
    monkeypatch.setenv("MASTER_PORT", "9")
    assert place("-x", "MASTER_ADDR=c") == ""
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert place() is None
    monkeypatch.setenv(world.PLACE, "WORLD_SIZE=1")  # it is that of a rank whose child this is
    assert place() == "MASTER_ADDR=127.0.0.1"


def test_options_behind_a_script_that_reads_none_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script := tmp_path / "x.py").write_text("print(1)")
    for words, said in (("-s 1", True), ("--servers=1", True), ("--lr 0.1", False), ("", False)):
        run.warn_of_late_options([str(script), *words.split()], run.command.params)
        assert ("the script gets" in capsys.readouterr().err) == said
    script.write_text("import sys\nprint(sys.argv)")
    run.warn_of_late_options([str(script), "-s", "1"], run.command.params)
    assert not capsys.readouterr().err


def test_hostfile(mpirun: str, tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("a:2\nb:2\nc:1\n")
    words = ("-s", "1", "-w", "4", "--hostfile", str(hosts), "--mpirun", mpirun, "--dry-run", "x.py")
    assert "-hosts a:2,b:2,c:1" in call(*words).output
    hosts.write_text("a:2\nb:x\n")
    done = call(*words)
    assert done.exit_code == 2
    assert "line 2" in done.output


@pytest.mark.parametrize(
    "words, said",
    [
        ("-w 2 --env NOT_SET_HERE x.py", "no variable NOT_SET_HERE is set here"),
        ("-w 2 --env =3 x.py", "'=3' names no variable"),
        ("-w 2 --env MPIPS_SERVERS=2 x.py", "MPIPS_* variables reach all ranks by themselves"),
        ("-w 4 -c 5 x.py", "clients=5"),
        ("-w 4 no-such-script.py", "there is no script 'no-such-script.py'"),
        ("-w 4 -m no_such_module.part", "there is no module 'no_such_module.part'"),
        ("-w 2 python x.py", "leave out 'python': the ranks run the script that follows it by"),
        ("python x.py", "leave out 'python': the ranks run the script that follows it by"),
        ("-w 2 /bin/sh -c true", "'/bin/sh' is a binary program, and the ranks run Python: start it with mpirun"),
        ("-w 2 x.sh", "'x.sh' is a shell script, and the ranks run Python"),
        ("-w 2 no-python", "no rank is started: the script is not valid Python"),
        ("-w 2 .", "'.' is a folder: name a script in it"),
        ("-w 4 --nics eth0 x.py", "--nics says which NIC serves which level of a --topology: give that, too"),
        ("-w 0 x.py", "'0' is not a whole number of at least 1"),
        ("-w 2 --topology ring:2 x.py", "unknown topology"),
        ("-w 2 --interface nope0 x.py", "there is no network interface 'nope0' here: there are .*lo"),
        ("-w 2 --hostfile none.txt x.py", "there is no host file 'none.txt' here"),
        ("-w 1000000000 x.py", "1000000000 ranks cannot start on this machine"),
        ("-n 3 -s 3 x.py", "--ranks 3 and --servers 3 leave no worker: ask for --ranks 4 or more"),
        ("-n 3 -w 3 -s 1 x.py", "--ranks 3 and --servers 1 make 2 workers, but --workers is 3"),
        ("-s 1 x.py", "how many ranks[?] Give -n/--ranks, which counts all, or -w/--workers"),
    ],
)
def test_what_cannot_be_run_is_a_sentence(
    mpirun: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    (tmp_path / "x.sh").write_text("#!/bin/bash\nls\n")
    (tmp_path / "no-python").write_text("echo 1\n")
    done = call("--mpirun", mpirun, *words.split())
    assert done.exit_code == 2
    assert re.search(said.replace("*", "[*]").replace(".[*]", ".*"), " ".join(done.output.split())), done.output


def test_a_command_for_a_larger_machine_is_shown(mpirun: str) -> None:
    assert call("-w", "1000000000", "--mpirun", mpirun, "--dry-run", "x.py").exit_code == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "variable, said",
    [
        ("MPIPS_STALL_SECONDS=soon", "MPIPS_STALL_SECONDS='soon' is not a number"),
        ("MPIPS_SEVERS=1", "MPIPS_SEVERS is unknown"),
    ],
)
def test_variables_are_checked_before_ranks_start(
    mpirun: str, monkeypatch: pytest.MonkeyPatch, variable: str, said: str
) -> None:
    monkeypatch.setenv(*variable.split("="))
    done = call("-w", "2", "--mpirun", mpirun, "--dry-run", "x.py")
    assert done.exit_code == 2
    assert said in done.output
    done = ranked("bench", "allreduce", "--ranks", "2")
    assert done.returncode == 2
    assert said in done.stderr


def test_the_command_line_wins_over_variables_and_the_others_reach_all_ranks(
    mpirun: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPIPS_SERVERS", "2")
    monkeypatch.setenv("MPIPS_TIMEOUT_SECONDS", "9")
    words = shlex.split(call("-w", "2", "-s", "0", "--mpirun", mpirun, "--dry-run", "x.py").output)
    pairs = {words[i + 1]: words[i + 2] for i, word in enumerate(words) if word == "-genv"}
    assert words[words.index("-n") + 1] == "2"
    assert pairs["MPIPS_SERVERS"] == "0"
    assert float(pairs["MPIPS_TIMEOUT_SECONDS"]) == 9


@pytest.mark.parametrize("text", ["x = 1\ndef f(:\n", "x = '\0'\n"])
def test_a_script_that_is_no_python_is_refused_once_and_shown(mpirun: str, tmp_path: Path, text: str) -> None:
    script = tmp_path / "bad.py"
    script.write_text(text)
    done = call("-w", "2", "--mpirun", mpirun, str(script))
    assert done.exit_code == 2
    assert "no rank is started: the script is not valid Python" in done.output
    assert "Error: " in done.output.splitlines()[-1]
    done = call("-w", "2", "--mpirun", mpirun, "--", "-c", "x = = 1")
    assert done.exit_code == 2
    assert "    x = = 1\n" in done.output


def test_many_ranks_are_warned_of_before_they_start(mpirun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LONG_SECONDS", 0.0)
    monkeypatch.setattr(process, "run", lambda argv, **_: sys.exit(f"started {shlex.join(argv)}"))
    done = call("-w", "2", "--mpirun", mpirun, "--", "-c", "1")
    warning, started = done.output.splitlines()
    assert warning.startswith("mpips: 2 ranks share ")
    assert "-n 2" in started


def test_ctrl_c_before_the_job_starts(mpirun: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "check_interface", ask)
    done = call("-w", "2", "--mpirun", mpirun, "--interface", "eth7", "--", "-c", "1")
    assert done.exit_code == 130
    assert done.output.split("\n")[1:] == ["run: interrupted", ""]


def test_hosts_are_asked_for_an_interface_that_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(launcher: Launcher, hosts: list[str], *_: object) -> list[network.HostReport]:
        addresses = [IPv4Interface("10.0.0.1/24")]
        return [network.HostReport(host, {"lo": (), f"fast{i}": tuple(addresses)}, ()) for i, host in enumerate(hosts)]

    monkeypatch.setattr(network, "ask_hosts", ask)
    launcher, machine = Launcher("mpiexec", "mpich", "4"), Machine(2)
    network.check_interface("fast0", launcher, (RankBlock("a", 1), RankBlock("a", 1)), machine)
    network.check_interface("10.0.0.0/8", launcher, (RankBlock("a", 1),), machine)
    with pytest.raises(LauncherError, match=r"b has no interface 'fast0'.*lo, fast1"):
        network.check_interface("fast0", launcher, (RankBlock("a", 1), RankBlock("b", 1)), machine)
    with pytest.raises(LauncherError, match=r"a has no IPv4 address in the subnet 10\.9\.0\.0/16.*10\.0\.0\.1"):
        network.check_interface("10.9.0.0/16", launcher, (RankBlock("a", 1),), machine)


def test_a_subnet_is_looked_for_among_the_addresses_here(monkeypatch: pytest.MonkeyPatch) -> None:
    nics = {"lo": (IPv4Interface("127.0.0.1/8"),), "eth0": (IPv4Interface("10.0.0.1/24"), IPv4Interface("10.7.0.1/24"))}
    monkeypatch.setattr(network, "report_this_host", lambda: network.HostReport("here", nics, ()))
    launcher, machine = Launcher("mpiexec", "mpich", "4"), Machine(2)
    network.check_interface("10.7.0.0/16", launcher, (), machine)
    with pytest.raises(LauncherError, match=r"no IPv4 address in the subnet 10\.9\.0\.0/16.*10\.0\.0\.1"):
        network.check_interface("127.0.0.0/8,10.9.0.0/16", launcher, (), machine)
    with pytest.raises(LauncherError, match=r"'10\.0\.0\.0/99' is not an IPv4 subnet"):
        network.check_interface("10.0.0.0/99", launcher, (), machine)


def test_a_line_of_python_stands_after_two_dashes(mpirun: str) -> None:
    done = call("-w", "2", "--mpirun", mpirun, "-c", "1/0")
    assert done.exit_code == 2
    assert "-- -c" in done.output
    assert call("-w", "2", "--mpirun", mpirun, "--dry-run", "--", "-c", "1/0").output.split()[-2:] == ["-c", "1/0"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run", "sim", "plan", "lab", "doctor"])
def test_every_command_has_a_short_help(name: str) -> None:
    done = ranked(name, "-h")
    assert done.returncode == 0
    assert f"Usage: mpips {name}" in done.stdout


def test_help_names_every_command_and_imports_none() -> None:
    code = """
import atexit, sys
import launch.cli
atexit.register(lambda: print(sorted(m for m in sys.modules if m.startswith(("mpips.collectives.", "numpy", "rich")))))
sys.argv[1:] = ["--help"]
launch.cli.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180)
    assert all(name in done.stdout for name in cli.main.commands)
    imported = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    light = {
        "clock",
        "terminal",
        "errors",
        "files",
        "log",
        "machine",
        "kernels",
        "kernels.engine",
        "recorder",
        "recorder.own",
        "recorder.dump",
        "recorder.folders",
        "recorder.page",
        "recorder.ring",
        "recorder.tracing",
    }
    assert imported <= {f"mpips.collectives.{name}" for name in light}


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["--help", "--version", "sim --help", "bench optimizers --elements 1000 --repeats 1 --json cases.json"]
)
def test_a_full_standard_output_is_one_sentence_after_the_work(words: str, full_disk: str, tmp_path: Path) -> None:
    with open(full_disk, "w") as full:
        done = lost(words, full.fileno(), tmp_path)
    said = [line for line in done.stderr.splitlines() if not re.fullmatch(r"updates: .*, \d+ of \d+", line)]
    assert said == ["Error: standard output cannot be written: No space left on device"]
    assert done.returncode == 1
    assert (tmp_path / "cases.json").is_file() == ("--json" in words)


def test_a_pipe_that_nobody_reads_is_no_error_to_tell(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = lost("--help", writing, tmp_path)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def lost(words: str, stdout: int, folder: Path) -> subprocess.CompletedProcess[str]:
    """`mpips WORDS`, printing to where nothing can be printed."""
    command = [sys.executable, "-m", "launch.cli", *words.split()]
    clean = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, timeout=180, cwd=folder, env=clean
    )


def ranked(*words: str) -> subprocess.CompletedProcess[str]:
    """`mpips WORDS` in a process of its own, where starting the ranks is printed instead of done."""
    code = (
        "import sys, launch.cli\n"
        "launch.cli.start = lambda ranks, script, name: sys.exit(f'{name}: started {ranks} {script}')\n"
        "launch.cli.main()"
    )
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


@pytest.mark.slow
def test_ranks_start_the_module_under_mpirun() -> None:
    done = ranked("bench", "kvstore", "--ranks", "3", "--sizes", "1KiB")
    assert done.stderr.strip() == "mpips bench kvstore: started 3 ['-m', 'mpips.bench.kvstore', '--sizes', '1KiB']"
    for two in (["--ranks=2"], ["-n", "2"], ["-n2"]):
        done = ranked("bench", "allreduce", *two)
        words = "['-m', 'mpips.collectives.benchmark', 'allreduce']"
        assert done.stderr.strip() == f"mpips bench allreduce: started 2 {words}"
    done = ranked("bench", "-n", "3", "mlp", "--rounds", "4")
    assert done.stderr.strip() == "mpips bench mlp: started 3 ['-m', 'mpips.bench.mlp', '--rounds', '4']"
    done = ranked("bench", "allreduce", "--ranks", "2", "--help")
    assert (done.returncode, "--algorithms" in done.stdout) == (0, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("bench allreduce --ranks two", "two"),
        ("bench allreduce --ranks 2 --sizes 3", "--sizes 3"),
        ("bench allreduce --ranks 2 --dtype float23", "'float23' is not a number type"),
        ("bench --ranks 2", "Missing command"),
        ("sim --bytes 0", "--bytes 0"),
        ("lab status --json /nosuch/x.json", "there is no folder '/nosuch'"),
        ("bench kvstore --ranks 2 --servers 2", "--ranks 2 and --servers 2 leave no worker"),
        ("plan --rate fast", "'fast' is no rate: give a node's operations a second, as 1.33e12 or 1.33T"),
        ("train --ranks 2 --data digits --grid 3x1", "3x1"),
        ("tune --ranks 2 --bogus", "--bogus"),
        ("bench mlp -n 2 --grid 3x1", "a grid of 3x1 needs 3 ranks, the job has 2"),
        ("bench mlp -n 2 --grid foo", "grid 'foo' must be BATCHxMODEL"),
    ],
)
def test_wrong_words_are_refused_once_before_any_rank_starts(words: str, named: str) -> None:
    done = ranked(*words.split())
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stderr.count("Error") == 1
    assert "started" not in done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("bench optimizers -n 2", "mpips bench optimizers is a single process and takes no --ranks"),
        ("bench iallreduce -n 1", "overlap with compute needs two ranks: use --ranks 2"),
        ("bench -n 2 optimizers", "mpips bench optimizers is a single process and takes no --ranks"),
        ("bench allreduce -n0", "-n must be a whole number of at least 1, not '0'"),
        ("bench allreduce -n", "-n must be a whole number of at least 1, not ''"),
        ("bench kvstor -n 2", "No such command 'kvstor'. Did you mean 'kvstore'?"),
        ("fly", "No such command 'fly'. There are run, doctor"),
        ("runn -w 2", "No such command 'runn'. Did you mean 'run'?"),
        ("bench xyz", "There are allreduce, reduce_scatter, allgather, alltoall, broadcast, "),
        ("script slurm -s 1 -w 2 -c 3 x.py", "clients=3 is more than workers=2"),
        ("script slurm -n 2 -w 2 -s 1 x.py", "--ranks 2 and --servers 1 make 1 workers, but --workers is 2"),
        ("script slurm x.py", "how many ranks? Give -n/--ranks, which counts all, or -w/--workers"),
        ("script slurm -n 2 --minuts 3 x.py", "--minuts"),
        ("script -n 2 x.py", "No such command 'x.py'. There are slurm, lsf, pbs."),
        ("script slurm -n 2", "no script is named"),
    ],
)
def test_wrong_words_that_need_no_mpi_are_a_sentence(words: str, named: str) -> None:
    done = CliRunner().invoke(cli.main, words.split())
    assert done.exit_code == 2
    assert named in done.output
    assert done.output.count("Error") == 1


@pytest.mark.parametrize("there", [True, False])
def test_a_batch_script_may_name_a_script_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if there:
        (tmp_path / "train.py").touch()
    done = CliRunner().invoke(cli.main, ["script", "slurm", "-n", "2", "--mpi", "openmpi", "train.py"])
    assert done.exit_code == 0
    assert done.stdout.startswith("#!")
    note = f"note: there is no script 'train.py' here ({tmp_path}): the job needs it there\n"
    assert done.stderr == ("" if there else note)


@pytest.mark.slow
def test_what_train_lacks_is_said_before_any_rank_starts(tmp_path: Path) -> None:
    table = tmp_path / "d.csv"
    table.write_text("a,b\n1,2\n3,4\n")
    words = ["train", "--ranks", "2", "--data", str(table)]
    lacking = [(["--target", "z"], f"{table} has no column 'z': the columns are a, b")]
    if importlib.util.find_spec("cupy") is None:
        lacking.append((["--device", "gpu"], "--device gpu needs CuPy, which is not installed: pip install cupy"))
    for more, said in lacking:
        done = ranked(*words, *more)
        assert done.returncode == 2
        assert f"Error: {said}" in done.stderr
        assert "started" not in done.stderr


@pytest.mark.slow
def test_a_package_that_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('libmpi.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = ranked("bench", "allreduce", "--ranks", "2")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "Error: a part of this installation is missing (libmpi.so.12: cannot open shared object file): "
        "see `mpips doctor`"
    )
    assert "mpips " in ranked("--version").stdout


def completions(words: str) -> list[str]:
    """What a shell offers after these words."""
    environment = {"_MPIPS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    code = "import launch.cli; launch.cli.main(prog_name='mpips')"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180, env=environment)
    return [line.split(",")[1] for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("mpips d", ["doctor"]),
        ("mpips bench kvstore --se", ["--servers", "--seconds"]),
        ("mpips bench --ra", ["--ranks"]),
        ("mpips bench kv", ["kvstore"]),
        ("mpips bench allreduce --al", ["--algorithms"]),
        ("mpips script sl", ["slurm"]),
        ("mpips lab sta", ["status"]),
        ("mpips run --mas", ["--masters"]),
    ],
)
def test_completion_reaches_into_every_command(words: str, offered: list[str]) -> None:
    assert completions(words) == offered


@pytest.mark.parametrize("words", ["sim", "plan", "doctor", "lab status"])
def test_an_interrupt_of_a_command_is_130(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    name, *rest = words.split()
    module = importlib.import_module(cli.COMMANDS[name].module)
    command = module.command.commands[rest[0]] if name == "lab" else module.command
    monkeypatch.setattr(command, "callback", interrupted)
    done = CliRunner().invoke(cli.main, words.split())
    assert done.exit_code == 130
    assert f"mpips {name}: interrupted" in done.output


def test_a_list_of_no_labs_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("launch.lab.client"), "list_labs", list)
    done = CliRunner().invoke(cli.main, ["lab", "list"])
    assert (done.exit_code, done.output) == (0, "no lab is up: mpips lab up makes one\n")


def test_an_interrupt_while_a_command_is_imported_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert CliRunner().invoke(cli.main, ["sim"]).exit_code == 130


def test_the_list_of_benchmarks_needs_no_mpi_and_names_them_all() -> None:
    code = "import atexit, sys, launch.cli\natexit.register(lambda: print('numpy' in sys.modules))\nlaunch.cli.main()"
    command = [sys.executable, "-c", code, "bench", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=180)
    listed = [line.split()[0] for line in done.stdout.splitlines() if re.match(r"  [a-z]\w+ {2,}[A-Z]", line)]
    assert listed == [*CASES, "kvstore", "optimizers", "mlp"]
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    "words", [["-n", "6", "-s", "2"], ["--ranks", "6", "-s", "2", "-w", "4"], ["-w", "4", "-s", "2"]]
)
def test_ranks_are_workers_and_servers(mpirun: str, words: list[str]) -> None:
    done = call(*words, "--mpirun", mpirun, "--dry-run", "x.py")
    assert done.exit_code == 0, done.output
    started = shlex.split(done.output)
    assert started[started.index("-n") + 1] == "6"
    assert "MPIPS_WORKERS 4" in done.output


@pytest.mark.parametrize("scheduler, mark", [("slurm", "#SBATCH"), ("lsf", "#BSUB"), ("pbs", "#PBS")])
def test_options_stand_before_or_behind_the_scheduler(scheduler: str, mark: str) -> None:
    def written(*words: str) -> str:
        done = CliRunner().invoke(cli.main, ["script", *words, "train.py", "--lr", "0.1", "-N", "9"])
        assert done.exit_code == 0, done.output
        return done.output

    job, rest = ["-N", "4", "-s", "2", "-w", "14"], ["--name", "slurm", "--mpi", "openmpi"]
    behind = written(scheduler, *job, *rest)
    assert mark in behind and "train.py --lr 0.1 -N 9" in behind
    assert written(*job, *rest, scheduler) == behind
    assert written("-N", "2", "-n", "16", "-s", "2", *rest, scheduler, "-N", "4") == behind


def test_words_of_a_program_are_not_taken_for_ours() -> None:
    words = ["lab", "run", "--name", "none", "-n", "2", "--", "python", "x.py", "--ranks", "3", "--help"]
    done = CliRunner().invoke(cli.main, words)
    assert done.exit_code == 1
    assert "no lab named 'none' is up" in done.output


def test_a_command_that_is_run_as_a_script_is_named() -> None:
    assert set(COMMANDS) == set(cli.main.commands)
    command = [sys.executable, "-m", "mpips", "run", "-w", "2", "train.py"]
    done = subprocess.run(command, cwd=Path(run.__file__).parents[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "the command is `mpips run`" in done.stderr

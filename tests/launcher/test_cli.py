"""The `ndistribute` command: what it takes, what it refuses, and what it hands on."""

import re
import sys
from pathlib import Path

import pytest

import ndistribute as nd
from ndistribute import cli
from ndistribute.blas import LAUNCHER_VARIABLES, THREAD_VARIABLES
from ndistribute.launcher import doctor
from ndistribute.launcher.commands import Host
from ndistribute.launcher.job import JobOptions
from tests.jobs.launched import ROOT

HERE, FAR = Host("localhost", 2), [Host("a", 2), Host("b", 1)]


LIMITED = {"port": 4000, "max_restarts": 2, "log_dir": Path("d"), "timeout": 5.0}
DURABLE = {"snapshot_dir": Path("d"), "snapshot_seconds": 5.0, "durable": True}


ELASTIC = {"min_workers": 1, "max_workers": 2, "max_restarts": 5}
WATCHING = {"min_workers": 1, "max_restarts": 5, "hosts_file": Path("hosts")}


@pytest.mark.parametrize(
    ("text", "script", "hosts", "options"),
    [
        ("-n 2 -- x.py", "x.py", [HERE], {}),
        ("-n 2 --mpi -m package -x", "-m package -x", [HERE], {"mpi": True}),
        ("-n 3 --hosts a:2,b:2 --max-restarts 2 x.py", "x.py", FAR, {"max_restarts": 2}),
        ("--hostfile hosts x.py -n 9", "x.py -n 9", FAR, {}),
        ("-n 2 --log-dir d --timeout 5 --max-restarts 2 --port 4000 x", "x", [HERE], LIMITED),
        ("--workers 2 --ps 3 --chief x.py", "x.py", [HERE], {"servers": 3, "chief": True}),
        (
            "--workers 2 --ps 1 --snapshot-dir d --snapshot-seconds 5 --durable x",
            "x",
            [HERE],
            {"servers": 1, **DURABLE},
        ),
        ("--elastic -n 2 x", "x", [HERE], {"min_workers": 1, "max_restarts": 5}),
        ("--elastic --max-workers 2 --spares 3 x", "x", [HERE], {**ELASTIC, "spares": 3}),
        ("--elastic --min-workers 2 --max-restarts 0 -m x", "-m x", [HERE], {"min_workers": 2}),
        ("--elastic --hosts a:2,b:2 --max-workers 2 x", "x", FAR[:1], ELASTIC),
        ("--elastic --hosts-file hosts x", "x", FAR, WATCHING),
    ],
)
def test_the_options_of_a_job(tmp_path, monkeypatch, text, script, hosts, options):
    (tmp_path / "hosts").write_text("a slots=2\nb\n")
    monkeypatch.chdir(tmp_path)
    job = cli.job_options(cli.parser().parse_args(["run", *text.split()]))
    assert job == JobOptions(tuple(script.split()), tuple(hosts), **options)
    assert job.is_local == (hosts == [HERE])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("x.py", "the number of processes is missing"),
        ("-n 2", "the script is missing"),
        ("-n 0 x.py", "-n must be at least 1"),
        ("-n 3 --hosts a:2 x.py", "-n 3 is more than the 2"),
        ("-n 1 --timeout 0 x.py", "--timeout must be more than 0"),
        ("-n 1 --max-restarts -1 x.py", "--max-restarts must be 0 or more"),
        ("--workers 2 x.py", "--workers needs parameter servers"),
        ("-n 2 --chief x.py", "--chief needs parameter servers"),
        ("-n 2 --snapshot-dir d x.py", "--snapshot-dir needs parameter servers"),
        ("--ps 2 x.py", "--workers 2 --ps 1"),
        ("-n 2 --ps 2 x.py", "--workers 2 --ps 1"),
        ("--workers 2 --ps 0 x.py", "--ps must be more than 0"),
        ("--workers 0 --ps 2 x.py", "--workers must be more than 0"),
        ("--workers 2 --ps 1 --snapshot-seconds 0 x.py", "--snapshot-seconds must be more than 0"),
        ("--workers 2 --ps 1 --durable x.py", "--durable needs a directory"),
        ("--workers 2 --ps 1 --hosts a,b x.py", "start each task"),
        ("--workers 2 --ps 1 --mpi x.py", "without MPI"),
        ("--hosts a: x.py", "is not HOST or HOST:PROCESSES"),
        ("--hostfile /dev/null x.py", "names no host"),
        ("--hostfile /no/such/file x.py", "No such file"),
        ("--hosts far:2 --port 65535 --dry-run x.py", "--port 65535"),
        ("-n 2 --min-workers 1 x.py", "works only in elastic jobs: add --elastic"),
        ("-n 2 --min-workers 0 x.py", "--min-workers works only in elastic jobs"),
        ("-n 2 --max-workers 1 x.py", "add --elastic"),
        ("-n 2 --spares 1 x.py", "add --elastic"),
        ("--elastic x.py", "the number of processes is missing"),
        ("--elastic -n 2 --mpi x.py", "MPI ends all ranks when one ends"),
        ("--elastic --workers 2 --ps 1 x.py", "Remove --elastic, or --mpi or --ps"),
        ("--elastic -n 2 --min-workers 3 x.py", "max-workers allow 3 to 2"),
        ("--elastic -n 2 --min-workers 0 x.py", "--min-workers must be 1 or more, got 0"),
        ("--elastic -n 2 --max-workers 0 x.py", "--max-workers must be 1 or more, got 0"),
        ("--elastic --min-workers 3 --max-workers 2 x", "allow 3 to 2: change them, -n or"),
        ("--elastic -n 3 --max-workers 2 x.py", "allow 1 to 2"),
        (
            "--elastic --hosts a:2,localhost --spares 1 x.py",
            "this machine: remove --spares, or the host a",
        ),
        ("--elastic -n 1 --spares -1 x.py", "--spares must be 0 or more, got -1"),
        ("--elastic -n 1 --spares 1 -- -c 0", "after -m; got '-c'"),
        ("--elastic -n 1 --spares 1 .", "after -m; got '.'"),
    ],
)
def test_what_does_not_fit_is_said_and_nothing_started(capfd, arguments, message):
    assert cli.main(["run", *arguments.split()]) == 2
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.startswith("ndistribute: ")
    assert message in said.err


@pytest.mark.parametrize(
    "arguments",
    ["", "fly", "run --mpi --tcp -n 1 x.py", "run -n 1 --workers 1 x.py", "trace fly ."],
)
def test_an_unknown_command_is_refused(capfd, arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments.split())
    assert caught.value.code == 2
    assert "usage: ndistribute" in capfd.readouterr().err


def test_the_command_is_installed_under_its_name():
    assert "\n    ndistribute = ndistribute.cli:main\n" in (ROOT / "setup.cfg").read_text()


def test_the_doctor_looks_at_everything_and_names_a_remedy_for_what_is_not_well(capfd):
    names = (
        "Python|processor|BLAS|BLAS threads|BLAS kernels|mpi4py|CuPy|NCCL|cloudpickle|"
        "JAX|mpiexec|GPUs|shared memory|loopback|host name|ssh"
    )
    findings = doctor.examine()
    assert [finding.name for finding in findings] == names.split("|")
    for finding in findings:
        assert finding.state == "ok" or finding.remedy or finding.name == "GPUs", finding
    assert cli.main(["doctor"]) == 0
    said = capfd.readouterr().out
    assert all(name in said for name in names.split("|"))


def test_the_doctor_lists_the_devices_of_jax_without_opening_them_here(monkeypatch):
    def line():
        return str(doctor._jax())

    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=3")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert re.fullmatch(r"ok +JAX +jax [\d.]+, 3 x cpu", line())
    monkeypatch.setenv("JAX_PLATFORMS", "abacus")
    assert re.search("^slow .* cannot open a device: .*\n.* set JAX_PLATFORMS=cpu", line())

    def version(package):
        raise doctor.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(doctor.metadata, "version", version)
    assert "pip install 'ndistribute[jax]'" in line()


def test_the_doctor_says_how_many_blas_threads_steps_use_and_why(monkeypatch):
    def line():
        return next(str(one) for one in doctor.examine() if one.name == "BLAS threads")

    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor.blas, "core_numbers", lambda: range(64))
    monkeypatch.setattr(doctor.blas, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(doctor.blas, "cores", lambda: 1)
    assert "1: 64 cores, and the control group grants 1.5" in line()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS=3" in line()


def test_the_doctor_says_what_is_missing_for_every_job(monkeypatch, capfd):
    lost = doctor.Finding("loopback", "missing", "no free port", "ip link set lo up")
    monkeypatch.setattr(doctor, "examine", lambda: [lost])
    assert cli.main(["doctor"]) == 1
    assert "Missing for `ndistribute run`: 1" in capfd.readouterr().out


AVX512 = {"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx2"}


def test_other_kernels_are_asked_for_only_where_blas_chose_below_the_processor():
    for architecture in ("Haswell", "Zen"):
        assert doctor.better_kernel(AVX512, architecture) == "SkylakeX"
    for architecture in ("SkylakeX", "Cooperlake", "SapphireRapids", "neoversen1", None):
        assert doctor.better_kernel(AVX512, architecture) is None
    for flags in (AVX512 - {"avx512vl"}, {"avx2"}, ()):
        assert doctor.better_kernel(flags, "Haswell") is None


def test_ranks_get_the_better_kernel_but_never_in_place_of_the_users(monkeypatch):
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: AVX512)
    monkeypatch.setattr(doctor, "_architecture", lambda: "Haswell")
    monkeypatch.setattr(doctor.blas, "cores", lambda: 6)
    threads = dict.fromkeys(LAUNCHER_VARIABLES, "1")
    assert doctor.blas_settings({}, 4) == {**threads, "OPENBLAS_CORETYPE": "SkylakeX"}
    assert doctor.blas_settings({}, 2)["OMP_NUM_THREADS"] == "3"
    mine = {"OPENBLAS_CORETYPE": "Zen", "OMP_NUM_THREADS": "5"}
    assert doctor.blas_settings(mine, 2) == {}


def test_the_version_is_printed(capfd):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--version"])
    assert capfd.readouterr().out == f"ndistribute {nd.__version__}\n"


def test_every_benchmark_is_offered():
    scripts = (ROOT / "benchmarks").glob("*.py")
    runnable = {path.stem for path in scripts if 'if __name__ == "__main__":' in path.read_text()}
    assert set(cli._BENCHMARKS.split()) == runnable


@pytest.mark.parametrize(
    ("arguments", "gone"),
    [("graph --quick", "pytest"), ("models --plot", "matplotlib"), ("input", "cloudpickle")],
)
def test_a_benchmark_names_what_to_install(monkeypatch, capfd, arguments, gone):
    monkeypatch.setitem(sys.modules, gone, None)  # As if it were not installed.
    assert cli.main(["bench", *arguments.split()]) == 2
    said = capfd.readouterr().err
    assert gone in said
    assert f"run `pip install --editable '.[bench,test]'` in {ROOT}." in said


def test_a_benchmark_runs_in_a_clone_and_says_what_to_do_elsewhere(monkeypatch, capfd, tmp_path):
    monkeypatch.setattr(cli, "__file__", str(tmp_path / "ndistribute" / "cli.py"))
    monkeypatch.chdir(ROOT)  # As where the package is installed and the user stands in a clone.
    assert cli.main(["bench", "all_reduce", "--help"]) == 0
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "all_reduce"]) == 2
    said = capfd.readouterr().err
    assert "the package does not include the benchmarks" in said
    assert "pip install --editable '.[bench,test]'" in said


@pytest.mark.parametrize("what", ["merge", "report"])
def test_a_folder_without_traces_is_refused(capfd, tmp_path, what):
    assert cli.main(["trace", what, str(tmp_path / "gone")]) == 2
    assert "is not a directory" in capfd.readouterr().err
    assert cli.main(["trace", what, str(tmp_path)]) == 2
    assert "NDISTRIBUTE_TRACE" in capfd.readouterr().err

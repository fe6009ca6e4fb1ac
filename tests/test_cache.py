"""The cache of compiled programs: where it is, whose it is, and commands that do not notice what is wrong with it."""

import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer import _cache
from sdeinfer._cache import LARGEST, LAST_START, _cpu

SETTINGS = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_min_entry_size_bytes",
)

PROGRAM = """
import jax, resource, sys
import sdeinfer as si
si.use_compilation_cache()
size = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
print(jax.jit(lambda x: 2 * x + 1)(3.0), events.count("/jax/compilation_cache/cache_hits"))
"""
"""Compiles a small program, and says how many were in the cache; a file may have so many bytes."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A user's cache folder, and JAX as before the test at its end."""
    for name in ("SDEINFER_NO_CACHE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in SETTINGS}
    jax.config.update("jax_compilation_cache_dir", None)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)


def started(size: int = resource.RLIM_INFINITY) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(size)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def hits(process: subprocess.Popen) -> int:
    """How many programs were in the cache; the process ends well and says nothing on standard error."""
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0
    assert err == ""
    value, count = out.split()
    assert value == "7.0"
    return int(count)


def test_one_folder_for_each_jaxlib_and_cpu_that_only_the_user_may_write(home):
    folder = si.use_compilation_cache()
    assert folder is not None
    assert folder.parent == home / "sdeinfer"
    assert re.fullmatch(r"jaxlib-\d+\.[\d.]+\w*-[0-9a-f]{12}", folder.name)
    assert _cpu() in folder.name
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0
    assert si.use_compilation_cache() == folder


@pytest.mark.parametrize(("name", "value"), [("SDEINFER_NO_CACHE", "1"), ("JAX_COMPILATION_CACHE_DIR", "elsewhere")])
def test_a_variable_leaves_jax_as_it_is(home, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert si.use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None
    assert list(home.iterdir()) == []


def test_a_folder_that_jax_was_told_of_stays(home):
    jax.config.update("jax_compilation_cache_dir", str(home / "own"))
    assert si.use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir == str(home / "own")


def test_folders_that_cannot_be_used_are_left_alone(home, monkeypatch):
    def unusable():
        return si.use_compilation_cache() is None and jax.config.jax_compilation_cache_dir is None

    (home / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home / "file" / "cache"))
    assert unusable()
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    (home / "sdeinfer").mkdir(mode=0o700)
    (home / "sdeinfer").chmod(0o777)
    assert unusable()
    (home / "sdeinfer").chmod(0o700)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert unusable()
    with monkeypatch.context() as patch:
        patch.setattr(_cache.shutil, "disk_usage", lambda _: type("Usage", (), {"free": LARGEST // 2}))
        assert unusable()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "touch", lambda *_: (_ for _ in ()).throw(PermissionError()))
        assert unusable()
    assert not list((home / "sdeinfer").glob("*/*"))
    assert not unusable()


@pytest.mark.parametrize("error", [None, RuntimeError("no home")])
def test_a_user_without_a_home_has_no_cache(home, monkeypatch, error):
    """Versions of platformdirs differ in what they do then."""

    def no_home(*_, **__):
        if error is not None:
            raise error
        return "~/.cache/sdeinfer"

    monkeypatch.setattr(_cache.platformdirs, "user_cache_dir", no_home)
    assert si.use_compilation_cache() is None
    assert not Path("~").exists()


def test_a_start_leaves_the_programs_used_last_and_removes_damaged_ones(home, monkeypatch):
    monkeypatch.setattr(_cache, "LARGEST", 10_000)
    folder = si.use_compilation_cache()
    assert folder is not None
    rng = np.random.default_rng(0)
    for age in range(10):
        file = folder / f"{age}-cache"
        file.write_bytes(_cache.zlib.compress(rng.bytes(2000)))
        used = (folder / LAST_START).stat().st_mtime + 10 - age
        os.utime(file, (used, used))
    for name, content in (("broken", _cache.zlib.compress(rng.bytes(500))[:-1]), ("empty", b""), ("noise", b"noise")):
        (folder / f"{name}-cache").write_bytes(content)
    zstd = folder / "zstd-cache"
    zstd.write_bytes(_cache.ZSTD)
    os.utime(zstd, (used, used + 100))
    unused = folder.parent / "jaxlib-0.1-0"
    unused.mkdir()
    (unused / LAST_START).touch()
    os.utime(unused / LAST_START, (0, 0))
    jax.config.update("jax_compilation_cache_dir", None)
    assert si.use_compilation_cache() == folder
    assert {path.name for path in folder.iterdir()} == {LAST_START, "zstd-cache", *(f"{age}-cache" for age in range(4))}
    assert list(folder.parent.iterdir()) == [folder]


def test_processes_share_programs_at_once_on_a_full_disk_and_after_damage(home):
    """A program on a full disk is cut off, and removed by the next process."""
    assert hits(started(size=100)) == 0
    first, second = started(), started()
    hits(first), hits(second)
    (folder,) = (home / "sdeinfer").iterdir()
    programs = [path for path in folder.iterdir() if path.name.endswith("-cache")]
    assert programs
    assert hits(started()) == len(programs)
    # Damaged in the middle and long ago, so that no start finds it: JAX itself fails to read it.
    for path in programs:
        path.write_bytes(path.read_bytes()[:-10])
        os.utime(path, (0, 0))
    assert hits(started()) == 0


@pytest.mark.slow  # compiles all programs of the main job
@pytest.mark.skipif(sys.platform != "linux", reason="a small disk is mounted")
def test_the_main_job_does_not_notice_a_small_disk(home, monkeypatch):
    small = ["--width", "48", "--depth", "5", "--tokens", "2", "--networks", "6", "--norm", "1.2"]
    short = ["--chains", "2", "--draws", "60", "--warmup", "100"]
    with tempfile.TemporaryDirectory() as disk:
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        try:
            monkeypatch.setenv("XDG_CACHE_HOME", disk)
            command = [sys.executable, "-c", "from sdeinfer import _cache, cli; _cache.LARGEST = 1; cli.app()"]
            done = subprocess.run(
                [*command, "calibrate", *small, *short, "--out", home / "out"], capture_output=True, text=True
            )
            assert shutil.disk_usage(disk).free < 2**14
        finally:
            subprocess.run(["umount", disk], check=True)
    assert done.returncode == 0
    assert not re.search("Error|Warning", done.stderr)
    assert "verdict: " in done.stdout
